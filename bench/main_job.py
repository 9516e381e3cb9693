"""The main job over several seeds: one shared adapter, one adapter per role, full fine-tuning. One table for bench/RESULTS.md.

    python bench/main_job.py --seeds 0 1 2 3 4 --kinds lora full --full-lr 2e-4
    python bench/main_job.py --seeds 0 1 2 --kinds lora roles full --full-lr 2e-4 --jobs 7 --cores 2 model.device=cpu

Each run is its own process, exactly as `make train` starts it, with ``--jobs`` pinned to ``--cores`` cores each; results are read from
its run folder. Knows nothing of how it trains.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOW = ROOT / "examples" / "solver_judge" / "solver_judge_flow.py"


KINDS = {"lora": [], "roles": ["lora.per_role={solver: {}, judge: {}}"], "full": ["lora.rank=0"]}


def run(name: str, folder: Path, overrides: list[str], cores: list[int] | None = None) -> dict:
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
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    environment = os.environ | ({"OMP_NUM_THREADS": str(len(cores))} if cores else {})
    done = subprocess.run([*pinned, *command, *overrides], capture_output=True, text=True, env=environment)
    wall = time.time() - started
    if done.returncode:
        sys.exit(f"{name} failed with exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    result = json.loads((folder / name / "result.json").read_text())
    steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    step_s = sorted(s["timing_s/step"] for s in steps)
    return result | {
        "wall_s": wall,
        "first_step_s": steps[0]["seconds"],
        "gap_max": max(s.get("publish/gap_max", 0.0) for s in steps),
        "median_step_s": step_s[len(step_s) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--kinds", choices=list(KINDS), nargs="+", default=["lora", "full"])
    parser.add_argument("--full-lr", type=float, help="learning rate of full fine-tuning (default: that of LoRA)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--cores", type=int, default=0, help="cores that each run is pinned to (0: no pinning)")
    parser.add_argument("overrides", nargs="*", help="key=value for all")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rllm-bench-"))
    free: queue.Queue[list[int] | None] = queue.Queue()
    for job in range(args.jobs):
        free.put(list(range(job * args.cores, (job + 1) * args.cores)) or None)

    def row(kind: str, seed: int) -> str:
        cores = free.get()
        try:
            extra = [f"optim.lr={args.full_lr}"] if kind == "full" and args.full_lr else []
            overrides = [f"trainer.seed={seed}", *KINDS[kind], *extra, *args.overrides]
            r = run(f"{kind}-{seed}", folder, overrides, cores)
        finally:
            free.put(cores)
        before, after = r["val"]["before"], r["val"]["after"]
        solver, judge = ([v[f"val/countdown/{m}"] for v in (before, after)] for m in ("solver_acc", "judge_acc"))
        return (
            f"| {kind} | {seed} | {solver[0]:.3f} -> {solver[1]:.3f} ({100 * (solver[1] - solver[0]):+.1f}) "
            f"| {judge[0]:.3f} -> {judge[1]:.3f} ({100 * (judge[1] - judge[0]):+.1f}) "
            f"| {r['first_step_s']:.1f} | {r['median_step_s']:.2f} | {r['wall_s']:.0f} | {r['gap_max']:.1e} |"
        )

    head = "| run | seed | solver_acc before -> after | judge_acc before -> after | first step s | median step s | wall s | publish gap |"
    print(f"{head}\n|---|---|---|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(row, *zip(*((kind, seed) for kind in args.kinds for seed in args.seeds), strict=True)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
