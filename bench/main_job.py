"""The main job over several seeds, LoRA beside full fine-tuning: one table for bench/RESULTS.md.

    python bench/main_job.py --seeds 0 1 2 3 4 --full-lr 1e-4

Each run is its own process, exactly as `make train` starts it; results are read from its run folder. Knows nothing of how it trains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOW = ROOT / "examples" / "solver_judge" / "solver_judge_flow.py"


def run(name: str, folder: Path, *overrides: str) -> dict:
    """One training run as its own process; returns result.json plus the wall time and when the first step ended."""
    started = time.time()
    command = [
        sys.executable,
        "-m",
        "rllm.cli",
        "train",
        str(FLOW),
        f"trainer.run_dir={folder}",
        f"trainer.experiment_name={name}",
    ]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True)
    wall = time.time() - started
    if done.returncode:
        sys.exit(f"{name} failed with exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    result = json.loads((folder / name / "result.json").read_text())
    steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    step_s = sorted(s["timing_s/step"] for s in steps)
    return result | {
        "wall_s": wall,
        "first_step_s": steps[0]["seconds"],
        "median_step_s": step_s[len(step_s) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--full-lr", type=float, help="learning rate of full fine-tuning (default: a tenth of LoRA's)")
    parser.add_argument("--only", choices=["lora", "full"], help="run one of the two")
    parser.add_argument("overrides", nargs="*", help="key=value for both")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rllm-bench-"))
    print(
        "| run | seed | solver_acc before -> after | judge_acc before -> after | first step s | median step s | wall s |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for seed in args.seeds:
        for kind in ("lora", "full"):
            if args.only not in (None, kind):
                continue
            extra = ["lora.rank=0", *([f"optim.lr={args.full_lr}"] if args.full_lr else [])] if kind == "full" else []
            r = run(f"{kind}-{seed}", folder, f"trainer.seed={seed}", *extra, *args.overrides)
            before, after = r["val"]["before"], r["val"]["after"]
            solver, judge = ([v[f"val/countdown/{m}"] for v in (before, after)] for m in ("solver_acc", "judge_acc"))
            print(
                f"| {kind} | {seed} | {solver[0]:.3f} -> {solver[1]:.3f} ({100 * (solver[1] - solver[0]):+.1f}) "
                f"| {judge[0]:.3f} -> {judge[1]:.3f} ({100 * (judge[1] - judge[0]):+.1f}) "
                f"| {r['first_step_s']:.1f} | {r['median_step_s']:.2f} | {r['wall_s']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
