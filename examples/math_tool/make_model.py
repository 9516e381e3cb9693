"""Make the starting model of this example: the embedded default model, fine-tuned on chats of several habits.

    python examples/math_tool/make_model.py --out runs/math_tool_model

The habits are mixed on purpose: guessing at once (mostly wrong), calling the tool well, and writing calls that cannot be read. Problems
of the validation split are in none of the chats.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from math_tool_flow import MODEL, is_held_out, problem, prompt

from rllm.sft import SftConfig, run_sft
from rllm.tools import parse_tool_calls

GUESSES, BROKEN = 0.55, 0.35
RIGHT_GUESSES = 0.05
BREAKS = (lambda text: text.replace('"}}', '"}'), lambda text: text.replace('"code": ', "code: "))


def tool_call(expression: str) -> str:
    call = json.dumps({"name": "python", "arguments": {"code": expression}})
    return f"<tool_call>{call}</tool_call>"


def guess(rng: random.Random, value: int) -> str:
    if rng.random() >= RIGHT_GUESSES:
        value += rng.choice((-1, 1)) * rng.choice((1, 2, 7, 10, 20, 100, rng.randint(1, 999)))
    return f"<answer>{abs(value)}</answer>"


def chat(rng: random.Random, expression: str, value: int) -> list[dict[str, str]]:
    """One chat of a random habit."""
    messages = [{"role": "user", "content": prompt(expression)}]

    def say(role: str, text: str) -> None:
        messages.append({"role": role, "content": text})

    if rng.random() < GUESSES:
        say("assistant", f"I guess {guess(rng, value)}")
        return messages
    call = tool_call(expression)
    if rng.random() < BROKEN:
        broken = rng.choice(BREAKS)(call)
        [wrong] = parse_tool_calls(broken)
        say("assistant", broken)
        say("user", f"error: {wrong.error}")
        if rng.random() < 0.5:
            say("assistant", f"I guess {guess(rng, value)}")
            return messages
    say("assistant", call)
    say("user", str(value))
    say("assistant", f"<answer>{value}</answer>")
    return messages


def chats(n: int, seed: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    rng = random.Random(f"math_tool/chats/{seed}")
    made = 0
    while made < n:
        expression, value = problem(rng)
        if not is_held_out(expression):
            made += 1
            yield {"messages": chat(rng, expression, value)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--chats", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in chats(args.chats, args.seed)))
    config = {
        "model": {"path": "default", "dtype": "float32"},
        "lora": {"rank": 0},
        "data": {"train_files": str(file), "batch_tokens": 4096},
        "optim": {"lr": 2e-3, "weight_decay": 0.01},
        "trainer": {"seed": args.seed, "out": str(args.out), "log_freq": 20},
    }
    run_sft(SftConfig.model_validate(config))


if __name__ == "__main__":
    main()
