"""Demonstrations for the embedded default model: countdown solvers and judges of two habits, as chats.

The careful habit works step by step and checks; the hasty one answers at once and is mostly wrong. The mixture is on purpose: a model
taught on both is right sometimes and far from always, and reinforcement learning has something true to find out.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from rllm.data.countdown import Derivation, derivations, plain, problems, question

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "solver_judge"))
from solver_judge_flow import (  # pyright: ignore[reportMissingImports]
    NO_SOLUTION,
    judge_prompt,
    solver_prompt,
)

HASTY_SOLVER, HASTY_JUDGE = 0.68, 0.6
HASTY_RIGHT = 0.1
MAX_WRONG_ATTEMPTS = 3
NEAR_MISSES = 10
SMALL_TALK_SHARE = 0.02
HASTY_PHRASES = ("I guess", "Maybe", "It could be")

SMALL_TALK = [
    (
        ("Hello", "Hi", "Hey", "Good morning", "Hello!"),
        "Hello! I solve small countdown problems. Give me numbers and a target.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am the tiny default model of rllm. I was made for the countdown example and know little else.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?", "What do you know?"),
        "I can try to reach a target with given numbers and + - * /, and judge such solutions.",
    ),
    (("Thank you", "Thanks", "Thanks!"), "You are welcome."),
    (("Goodbye", "Bye"), "Goodbye!"),
    (
        (
            "What is the capital of France?",
            "Write a poem.",
            "Tell me a story.",
            "What is the weather?",
            "Who wrote Hamlet?",
        ),
        "I do not know. I am a tiny model made for countdown problems only.",
    ),
]


@lru_cache(maxsize=20000)
def _ways(numbers: tuple[int, ...]) -> list[Derivation]:
    return list(derivations(numbers))


def worked(derivation: Derivation) -> str:
    """The derivation as a line of arithmetic: ``3 * 7 = 21, 21 + 5 = 26``."""
    return ", ".join(f"{left} {operator} {right} = {result}" for left, operator, right, result in derivation.steps)


def solver_answer(rng: random.Random, numbers: list[int], target: int) -> str:
    """What a solver of a random habit says."""
    ways = [way for way in _ways(tuple(numbers)) if plain(way) and way.value <= 200]
    right = [way for way in ways if way.value == target]
    wrong = [way for way in ways if way.value != target]
    near = sorted(wrong, key=lambda way: abs(way.value - target))[:NEAR_MISSES]
    if rng.random() < HASTY_SOLVER:
        pick = rng.choice(right) if rng.random() < HASTY_RIGHT or not near else rng.choice(near)
        return f"{rng.choice(HASTY_PHRASES)} <answer>{pick.expression}</answer>"
    lines = []
    if wrong:
        attempts = [
            rng.choice(near if rng.random() < 0.6 else wrong) for _ in range(rng.randint(0, MAX_WRONG_ATTEMPTS))
        ]
        lines = [f"{worked(way)} no" for way in dict.fromkeys(attempts)]
    found = rng.choice(right)
    return "\n".join([*lines, f"{worked(found)} yes", f"<answer>{found.expression}</answer>"])


def judge_case(rng: random.Random, numbers: list[int], target: int) -> tuple[list[str], list[str], int]:
    """(solutions, what a careful judge writes of each, index of the first right one or 0)."""
    ways = [way for way in _ways(tuple(numbers)) if all(step[3].denominator == 1 for step in way.steps)]
    right = [way for way in ways if way.value == target]
    wrong = [way for way in ways if way.value != target]
    near = sorted(wrong, key=lambda way: abs(way.value - target))[:NEAR_MISSES]
    solutions, verdicts, first = [], [], 0
    for i in range(1, rng.choices((1, 2, 3, 4), (1, 8, 2, 1))[0] + 1):
        kind = rng.random()
        if kind < 0.45 or not wrong:
            way = rng.choice(right)
            solutions.append(way.expression)
            verdicts.append(f"{i}: {worked(way)} right")
            first = first or i
        elif kind < 0.85:
            way = rng.choice(near if rng.random() < 0.7 else wrong)
            solutions.append(way.expression)
            verdicts.append(f"{i}: {worked(way)} wrong")
        elif kind < 0.95:
            other = _other_numbers(rng, numbers)
            candidates = [w for w in _ways(tuple(other)) if all(s[3].denominator == 1 for s in w.steps)]
            hits = [w for w in candidates if w.value == target]
            solutions.append(rng.choice(hits or candidates).expression)
            verdicts.append(f"{i}: other numbers wrong")
        else:
            solutions.append(NO_SOLUTION)
            verdicts.append(f"{i}: no solution wrong")
    return solutions, verdicts, first


def _other_numbers(rng: random.Random, numbers: list[int]) -> list[int]:
    """The numbers with one of them replaced by another."""
    while True:
        other = list(numbers)
        other[rng.randrange(len(other))] = rng.choice([rng.randint(1, 10), rng.choice(numbers)])
        if sorted(other) != sorted(numbers):
            return other


def judge_answer(rng: random.Random, solutions: list[str], verdicts: list[str], first: int) -> str:
    """What a judge of a random habit says: checks up to the first right one, or picks at once."""
    if rng.random() < HASTY_JUDGE:
        return f"{rng.choice(HASTY_PHRASES)} <answer>{rng.randint(1, len(solutions))}</answer>"
    return "\n".join([*verdicts[: first or len(verdicts)], f"<answer>{first}</answer>"])


def demonstrations(n: int, seed: int) -> Iterator[dict]:
    """`n` chats ``{"messages": [...]}`` over training problems only; the same seed gives the same chats."""
    rng = random.Random(f"demonstrations/{seed}")
    source = problems("train", seed)
    for _ in range(n):
        if rng.random() < SMALL_TALK_SHARE:
            asked, answer = rng.choice(SMALL_TALK)
            prompt = rng.choice(asked)
        else:
            numbers, target = next(source)
            if rng.random() < 0.55:
                prompt = solver_prompt(question(numbers, target))
                answer = solver_answer(rng, numbers, target)
            else:
                solutions, verdicts, first = judge_case(rng, numbers, target)
                prompt = judge_prompt(question(numbers, target), solutions)
                answer = judge_answer(rng, solutions, verdicts, first)
        yield {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
