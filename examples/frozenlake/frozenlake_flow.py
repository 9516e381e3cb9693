"""An agent in an environment: it sees the lake, says a direction, sees where it came to, until the game ends.

    python examples/frozenlake/make_model.py                           # the starting model; a few minutes, once
    rllm train examples/frozenlake/frozenlake_flow.py

An ordinary async function against an OpenAI client: the environment is a plain object, the loop a plain loop.
"""

from __future__ import annotations

import hashlib
import random
import re
from functools import cache
from pathlib import Path

from frozenlake import MOVES, FrozenLake, LakeMap, random_map
from openai import AsyncOpenAI

import rllm

MODEL = Path(__file__).parents[2] / "runs" / "frozenlake_model"
MAX_TURNS = 10
HELP = f"error: say one of {', '.join(MOVES)}"

# What this example trains with unless the command line says otherwise.
DEFAULTS = {
    "model.path": str(MODEL),
    "lora.rank": 8,
    "lora.alpha": 8,
    "data.train_batch_size": 16,
    "data.max_prompt_length": 960,
    "data.max_response_length": 8,
    "rollout.n": 4,
    "optim.lr": 2e-3,
    "trainer.total_steps": 15,
}


@cache
def _client() -> AsyncOpenAI:
    """One client for the process: making one costs tens of milliseconds, pointing it elsewhere nothing."""
    return AsyncOpenAI(api_key="unused", base_url="http://unused", max_retries=0, timeout=600)


def first_message(game: FrozenLake) -> str:
    return f"Go to G, not into H: {', '.join(MOVES)}?\n{game.observation()}"


def parse_move(text: str) -> str | None:
    """The last direction that is named, or None."""
    found = re.findall(r"\b(up|down|left|right)\b", text)
    return found[-1] if found else None


def game_of(task: rllm.Task) -> FrozenLake:
    metadata = task.metadata
    return FrozenLake(LakeMap.from_text(metadata["map"]), metadata.get("slip", 0.0), metadata.get("seed", 0))


@rllm.rollout(name="walker")
async def frozenlake(task: rllm.Task, config: rllm.AgentConfig) -> rllm.Episode:
    """One game, at most `MAX_TURNS` answers. An answer without a direction costs a turn and moves nothing."""
    client = _client().with_options(base_url=config.base_url, api_key=config.api_key)
    game, invalid = game_of(task), 0
    messages = [{"role": "user", "content": first_message(game)}]
    trajectory = rllm.Trajectory(name="walker")
    for _ in range(MAX_TURNS):
        response = await client.chat.completions.create(model=config.model_for("walker"), messages=messages)  # pyright: ignore[reportArgumentType, reportCallIssue]
        text = response.choices[0].message.content or ""
        move = parse_move(text)
        trajectory.steps.append(rllm.Step(id=response.id, action=move))
        if move is None:
            invalid += 1
        else:
            game.move(move)
        if game.over:
            break
        seen = HELP if move is None else game.observation()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": seen}]
    trajectory.output = {
        "at": list(game.at),
        "reached_goal": game.reached_goal,
        "moves": game.moves,
        "invalid": invalid,
    }
    reason = rllm.TerminationReason
    return rllm.Episode(
        trajectories=[trajectory], termination_reason=reason.ENV_DONE if game.over else reason.MAX_TURNS_EXCEEDED
    )


@rllm.evaluator
def frozenlake_evaluator(task: rllm.Task, episode: rllm.Episode) -> rllm.EvalOutput:
    """1 for reaching the goal; 0 for falling into a hole and for running out of turns."""
    result = episode.trajectories[0].output
    reached = result["reached_goal"]
    return rllm.EvalOutput(
        reward=float(reached),
        is_correct=reached,
        signals=[rllm.Signal("success", float(reached)), rllm.Signal("moves", result["moves"])],
    )


def is_held_out(lake: LakeMap) -> bool:
    """Whether a map belongs to validation: decided by the map alone, so that no seed can mix the two."""
    return hashlib.blake2b(lake.to_text().encode(), digest_size=1).digest()[0] % 5 == 0


def tasks(split: str, n: int, seed: int, size: int = 4) -> rllm.Dataset:
    """`n` different maps of a split."""
    rng = random.Random(f"frozenlake/{split}/{seed}")
    found: dict[str, LakeMap] = {}
    while len(found) < n:
        lake = random_map(rng, size)
        if is_held_out(lake) == (split == "val"):
            found[lake.to_text()] = lake
    rows = [
        {
            "id": text.replace("\n", "/"),
            "question": first_message(FrozenLake(lake)),
            "map": text,
            "data_source": "frozenlake",
        }
        for text, lake in found.items()
    ]
    return rllm.Dataset(rows, name="frozenlake", split=split)


def train_dataset(config: rllm.Config) -> rllm.Dataset:
    return tasks("train", 512, config.trainer.seed)


def val_dataset(config: rllm.Config) -> rllm.Dataset:
    return tasks("val", 96, 0)
