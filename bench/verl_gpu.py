"""A few steps of solver-judge on one GPU: verl with merged weights, verl with the adapter, and the local backend, side by side.

python bench/verl_gpu.py [--model FOLDER] [--steps 5] [--out runs/verl-gpu] [key=value]...

Needs a GPU and `pip install 'rllm[verl]'` (verl 0.9.1, vLLM 0.24.0 for CUDA 13, torch 2.11, Ray, TransferQueue, tensordict) in the Python
that runs it. Prints, for each, the medians over the steps after the first; what failed, with the end of its output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "solver_judge" / "train_solver_judge_flow.py"
MERGE = "actor_rollout_ref.model.lora.merge"
RUNS = {
    "local": ["backend=local"],
    "verl, merged": ["backend=verl", f"{MERGE}=true"],
    "verl, adapter": ["backend=verl", f"{MERGE}=false"],
}
COLUMNS = (
    "timing_s/step",
    "timing_s/rollout",
    "timing_s/update",
    "timing_s/publish",
    "publish/gap_mean",
    "publish/gap_max",
)
LIMIT_S = 560


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/verl-gpu"))
    parser.add_argument("--only", choices=list(RUNS), help="one of the runs")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print("| run | seconds in all | " + " | ".join(COLUMNS) + " | critic/score/mean |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    for name, settings in RUNS.items():
        if args.only in (None, name):
            run(name, settings, args)


def run(name: str, settings: list[str], args: argparse.Namespace) -> None:
    folder = args.out / name.replace(", ", "-")
    common = [
        f"model.path={args.model}",
        f"trainer.total_steps={args.steps}",
        f"trainer.run_dir={args.out}",
        f"trainer.experiment_name={folder.name}-{int(time.time())}",
        "trainer.val_before_train=false",
        "data.train_batch_size=16",
        "data.val_size=16",
        "rollout.n=4",
        "lora.rank=32",
        "lora.alpha=32",
        "algorithm.zero_std=keep",
    ]
    log = args.out / f"{folder.name}.log"
    began = time.monotonic()
    with log.open("w") as file:
        command = [sys.executable, str(SCRIPT), *common, *settings, *args.overrides]
        try:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            status = 124
    took = time.monotonic() - began
    run_folder = args.out / common[3].partition("=")[2]
    file = run_folder / "metrics.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    later = steps[1:] or steps
    cells = [
        f"{statistics.median(s[c] for s in later if c in s):.3g}" if any(c in s for s in later) else "-"
        for c in COLUMNS
    ]
    score = f"{statistics.fmean(s['critic/score/mean'] for s in steps):.3f}" if steps else "-"
    print(f"| {name} ({len(steps)} steps) | {took:.0f} | " + " | ".join(cells) + f" | {score} |", flush=True)
    if status:
        print(
            f"\n{name}: exit code {status}; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-25:]),
            flush=True,
        )


if __name__ == "__main__":
    main()
