"""A few steps of solver-judge on one GPU: verl with merged weights, verl with the adapter, and the local backend, side by side.

python bench/verl_gpu.py [--model FOLDER] [--steps 5] [--out runs/verl-gpu] [--only RUN]... [--verl key=value]... [key=value]...

Needs a GPU and `pip install 'rllm[verl]'` (verl 0.9.1, vLLM 0.24.0 for CUDA 13, torch 2.11, Ray, TransferQueue, tensordict) in the Python
that runs it. Prints one table: for each run the medians over the steps after the first, with the largest and mean difference between the
sampler's and the trainer's log-probabilities; below it, of a run that failed, the end of its output and of what its workers wrote.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).parents[1] / "examples" / "solver_judge" / "train_solver_judge_flow.py"
MERGE = "actor_rollout_ref.model.lora.merge"
RUNS = {
    "local": ["backend=local"],
    "verl-merged": ["backend=verl", f"{MERGE}=true"],
    "verl-adapter": ["backend=verl", f"{MERGE}=false"],
}
# One machine: no page that watches the cluster, few processes beside the one that trains.
ONE_MACHINE = [
    "verl.+ray_kwargs.ray_init.include_dashboard=false",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
]
COLUMNS = (
    "timing_s/step",
    "timing_s/rollout",
    "timing_s/update",
    "timing_s/publish",
    "perf/tokens_per_s",
    "publish/gap_mean",
    "publish/gap_max",
)
LIMIT_S = 560
RAY_LOGS = Path("/tmp/ray/session_latest/logs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/verl-gpu"))
    parser.add_argument("--only", action="append", choices=list(RUNS), help="one of the runs; may be given again")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that one run may take")
    parser.add_argument(
        "--verl",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for the runs on verl alone; may be given again",
    )
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print("| run | seconds in all | to the end of step 1 | " + " | ".join(COLUMNS) + " | critic/score/mean |")
    print("|---" * (len(COLUMNS) + 4) + "|", flush=True)
    failed = [told for name in args.only or RUNS if (told := run(name, args))]
    print("\n".join(failed))
    sys.exit(1 if failed else 0)


def run(name: str, args: argparse.Namespace) -> str | None:
    """Run one, print its row, and return what to tell of it where it failed."""
    on_verl = RUNS[name][0] == "backend=verl"
    experiment = f"{name}-{int(time.time())}"
    settings = [
        f"model.path={args.model}",
        f"trainer.total_steps={args.steps}",
        f"trainer.run_dir={args.out}",
        f"trainer.experiment_name={experiment}",
        "trainer.val_before_train=false",
        "data.train_batch_size=16",
        "data.val_size=16",
        "rollout.n=4",
        "lora.rank=32",
        "lora.alpha=32",
        "algorithm.zero_std=keep",
        *RUNS[name],
        *(ONE_MACHINE + args.verl if on_verl else []),
        *args.overrides,
    ]
    log = args.out / f"{experiment}.log"
    began = time.monotonic()
    status = call([sys.executable, str(SCRIPT), *settings], log, args.limit)
    print(row(name, time.monotonic() - began, args.out / experiment / "metrics.jsonl"), flush=True)
    if status == 0:
        return None
    logs = worker_logs(began) if on_verl else []
    return f"\n{name}: {status}; the end of {log}:\n" + "\n".join(ends_of([log, *logs]))


def call(command: list[str], log: Path, limit: float) -> int | str:
    """Exit code of `command`, or what became of it. Past the limit, all that it started ends with it: a server left behind keeps the GPU's memory."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            started = psutil.Process(process.pid).children(recursive=True)
            for one in [process, *started]:
                try:
                    one.kill()
                except psutil.NoSuchProcess:
                    continue
            process.wait()
            return f"ended after {limit:g} s"


def row(name: str, took: float, metrics: Path) -> str:
    steps: list[dict[str, Any]] = []
    if metrics.is_file():
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    later = steps[1:] or steps
    cells = [[step[column] for step in later if column in step] for column in COLUMNS]
    medians = [f"{statistics.median(cell):.3g}" if cell else "-" for cell in cells]
    first = f"{steps[0]['seconds']:.0f}" if steps and "seconds" in steps[0] else "-"
    score = f"{statistics.fmean(step['critic/score/mean'] for step in steps):.3f}" if steps else "-"
    return f"| {name} ({len(steps)} steps) | {took:.0f} | {first} | " + " | ".join([*medians, score]) + " |"


def worker_logs(since: float) -> list[Path]:
    """What Ray's workers wrote in the run that began at `since` (of `time.monotonic`), newest first."""
    started = time.time() - (time.monotonic() - since)
    found = [f for pattern in ("*.err", "*.out") for f in RAY_LOGS.glob(f"worker-{pattern}")]
    written = [(f.stat().st_mtime, f) for f in found if f.stat().st_size and f.stat().st_mtime >= started]
    return [f for _, f in sorted(written, reverse=True)][:6]


def ends_of(files: list[Path]) -> list[str]:
    told: list[str] = []
    for file in files:
        lines = file.read_text(errors="replace").splitlines()[-25:]
        told += [f"--- {file}", *(line[:300] for line in lines)]
    return told


if __name__ == "__main__":
    main()
