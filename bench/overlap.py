"""A step with and without `trainer.overlap`: episodes of very different length, and tools that keep some of them waiting.

    python bench/overlap.py                    # the packaged model on CPU; --shapes: random weights of a size

Each task is tried `--group` times. An episode is two calls of the model with a tool between them: completions of 1/8 to 2 times `--tokens`,
most of them short, and tools that take an exponentially distributed time (`--wait` in the mean). Both sides see the same draws.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI

import rllm
from rllm.data.countdown import countdown

sys.path.insert(0, str(Path(__file__).parent))
SETTINGS: dict[str, float] = {}


@cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://unset", api_key="none", timeout=600, max_retries=0)


@rllm.rollout
async def tool_user(task: rllm.Task, config: rllm.AgentConfig) -> rllm.Trajectory:
    numbers = random.Random(config.session_uid.rpartition("-")[0])  # of the task and the attempt
    api = client().with_options(base_url=config.base_url)
    messages: list[Any] = [{"role": "user", "content": task.metadata["question"]}]
    steps = []
    for turn in range(2):
        tokens = int(SETTINGS["tokens"] * min(2.0, max(0.125, numbers.lognormvariate(-1.0, 0.8))))
        answer = await api.chat.completions.create(model=config.model, messages=messages, max_tokens=tokens)
        steps.append(rllm.Step(id=answer.id))
        if not turn:
            await asyncio.sleep(numbers.expovariate(1.0 / SETTINGS["wait"]) if SETTINGS["wait"] else 0.0)
            text = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "tool: go on"}]
    return rllm.Trajectory(name="agent", steps=steps, output=answer.choices[0].message.content)


@rllm.evaluator
def parity(task: rllm.Task, episode: rllm.Episode) -> float:
    return float(len(episode.trajectories[0].output or "") % 2)


def model_folder(shapes: str, folder: Path) -> str:
    from gpu import SHAPES, random_decoder, shape_of

    from rllm.backends.local.loading import save_model

    model = random_decoder(SHAPES[shapes])
    save_model(model, Path(rllm.__file__).parent / "models" / "default", folder)
    known = json.loads((folder / "config.json").read_text())
    layers = {"layer_types": ["full_attention"] * model.config.n_layers}
    (folder / "config.json").write_text(json.dumps(known | shape_of(SHAPES[shapes]) | layers))
    return str(folder)


def run(args: argparse.Namespace, model: str, folder: Path, overlap: bool) -> list[dict[str, float]]:
    config = {
        "model": {"path": model, "max_model_len": 6 * args.tokens},
        "data": {"train_batch_size": args.tasks, "max_prompt_length": 4 * args.tokens, "max_response_length": 2 * args.tokens},
        "rollout": {"n": args.group, "max_concurrency": 512, "max_batch": 256 if args.shapes else 64},
        "lora": {"rank": 8},
        "trainer": {
            "total_steps": args.steps + 1, "run_dir": str(folder), "experiment_name": f"overlap-{overlap}",
            "overlap": overlap, "log_episodes": False, "val_before_train": False,
        },
    }  # fmt: skip
    rllm.AgentTrainer(
        agent_flow=tool_user, evaluator=parity, config=config, train_dataset=countdown("train", args.tasks)
    ).train()
    lines = (folder / f"overlap-{overlap}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]  # the first compiles and captures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", choices=["0.6b", "tiny"], help="random weights of these shapes; default: the packaged model"
    )
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=None, help="default: 512 with --shapes, else 48")
    parser.add_argument("--wait", type=float, nargs="+", default=[0.0, 1.0], help="mean seconds of a tool")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    args.tokens = args.tokens or (512 if args.shapes else 48)
    with tempfile.TemporaryDirectory() as name:
        model = model_folder(args.shapes, Path(name) / "model") if args.shapes else "default"
        for wait in args.wait:
            SETTINGS.update(tokens=args.tokens, wait=wait)
            for overlap in (False, True):
                lines = run(args, model, Path(name) / f"runs-{wait}", overlap)
                medians = {
                    key: statistics.median(line[key] for line in lines)
                    for key in (
                        "timing_s/step",
                        "timing_s/rollout",
                        "timing_s/update",
                        "train/ahead_tokens",
                        "actor/tokens",
                    )
                    if all(key in line for line in lines)
                }
                print(f"wait {wait:g} overlap {overlap!s:5}", {k: round(v, 3) for k, v in medians.items()}, flush=True)
    print("device", torch.cuda.get_device_name() if args.shapes else "cpu")


if __name__ == "__main__":
    main()
