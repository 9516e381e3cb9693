"""Arithmetic with a Python tool: the model may guess, or write a tool call, read the result, and answer.

    python examples/math_tool/make_model.py                            # the starting model; a few minutes, once
    rllm train examples/math_tool/math_tool_flow.py

An ordinary async function against an OpenAI client. The calls are plain text (``<tool_call>{...}</tool_call>``), so any model can
write them.
"""

from __future__ import annotations

import hashlib
import random
from functools import cache
from pathlib import Path

from openai import AsyncOpenAI

import rllm
from rllm.rewards.countdown import last_answer
from rllm.tools import PythonTool, Toolset, parse_tool_calls

MODEL = Path(__file__).parents[2] / "runs" / "math_tool_model"
MAX_TURNS = 3
TOOLS = Toolset([PythonTool(timeout_s=2, max_characters=60)])

# What this example trains with unless the command line says otherwise.
DEFAULTS = {
    "model.path": str(MODEL),
    "lora.rank": 8,
    "lora.alpha": 8,
    "data.train_batch_size": 16,
    "data.max_prompt_length": 512,
    "data.max_response_length": 96,
    "rollout.n": 4,
    "optim.lr": 2e-3,
    "trainer.total_steps": 15,
}


@cache
def _client() -> AsyncOpenAI:
    """One client for the process: making one costs tens of milliseconds, pointing it elsewhere nothing."""
    return AsyncOpenAI(api_key="unused", base_url="http://unused", max_retries=0, timeout=600)


def prompt(expression: str) -> str:
    return f"Compute {expression}. Answer in <answer>...</answer>."


@rllm.rollout(name="solver")
async def math_tool(task: rllm.Task, config: rllm.AgentConfig) -> rllm.Episode:
    """Turns of model and tool until the model answers without a call, at most `MAX_TURNS` of them."""
    client = _client().with_options(base_url=config.base_url, api_key=config.api_key)
    messages = [{"role": "user", "content": prompt(task.metadata["expression"])}]
    trajectory = rllm.Trajectory(name="solver")
    results: list[str] = []
    ended = rllm.TerminationReason.MAX_TURNS_EXCEEDED
    for _ in range(MAX_TURNS):
        response = await client.chat.completions.create(model=config.model_for("solver"), messages=messages)  # pyright: ignore[reportArgumentType, reportCallIssue]
        text = response.choices[0].message.content or ""
        trajectory.steps.append(rllm.Step(id=response.id, action=text))
        calls = parse_tool_calls(text)
        if not calls:
            trajectory.output = last_answer(text)
            cut = response.choices[0].finish_reason == "length"
            ended = rllm.TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED if cut else rllm.TerminationReason.ENV_DONE
            break
        results += [await TOOLS.answer(call) for call in calls]
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "\n".join(results[-len(calls) :])},
        ]
    trajectory.metadata["tool_results"] = results
    return rllm.Episode(trajectories=[trajectory], termination_reason=ended)


@rllm.evaluator
def math_evaluator(task: rllm.Task, episode: rllm.Episode) -> rllm.EvalOutput:
    """1 for the right number, else 0, an episode that ran out of turns included."""
    [trajectory] = episode.trajectories
    right = trajectory.output == str(task.metadata["value"])
    results = trajectory.metadata["tool_results"]
    return rllm.EvalOutput(
        reward=float(right),
        is_correct=right,
        signals=[
            rllm.Signal("acc", float(right)),
            rllm.Signal("used_tool", float(bool(results))),
            rllm.Signal("tool_errors", float(sum(result.startswith("error: ") for result in results))),
        ],
    )


def problem(rng: random.Random) -> tuple[str, int]:
    """(expression, value): a product of two-digit numbers with a third added or taken away."""
    a, b, c = (rng.randint(11, 99) for _ in range(3))
    operator = rng.choice("+-")
    return f"{a} * {b} {operator} {c}", a * b + (c if operator == "+" else -c)


def is_held_out(expression: str) -> bool:
    """Whether a problem belongs to validation: decided by the problem alone, so that no seed can mix the two."""
    return hashlib.blake2b(expression.encode(), digest_size=1).digest()[0] % 5 == 0


def tasks(split: str, n: int, seed: int) -> rllm.Dataset:
    """`n` different problems of a split."""
    rng = random.Random(f"math_tool/{split}/{seed}")
    found: dict[str, int] = {}
    while len(found) < n:
        expression, value = problem(rng)
        if is_held_out(expression) == (split == "val"):
            found[expression] = value
    rows = [
        {"id": text, "question": prompt(text), "expression": text, "value": value, "data_source": "math_tool"}
        for text, value in found.items()
    ]
    return rllm.Dataset(rows, name="math_tool", split=split)


def train_dataset(config: rllm.Config) -> rllm.Dataset:
    return tasks("train", 512, config.trainer.seed)


def val_dataset(config: rllm.Config) -> rllm.Dataset:
    return tasks("val", 128, 0)
