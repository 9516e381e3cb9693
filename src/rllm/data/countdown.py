"""Countdown problems: reach a target with given numbers and + - * /. Made on the fly, seeded, each one solvable.

Knows the problem and its solutions; nothing of models, prompts or rewards.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rllm.data.dataset import Dataset
from rllm.errors import DataError

OPERATORS = "+-*/"
VALIDATION_SHARE = 0.2
SPLITS = ("train", "val")
MAX_NUMBERS = 5  # the search over all derivations grows with the factorial of this
MAX_MISSES = 10_000


@dataclass(frozen=True)
class Derivation:
    """One way to combine all numbers: the expression, its value, and the steps ``(left, operator, right, result)``."""

    expression: str
    value: Fraction
    steps: tuple[tuple[Fraction, str, Fraction, Fraction], ...]


def apply(left: Fraction, operator: str, right: Fraction) -> Fraction | None:
    """Exact result, or None for a division by zero."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return left / right if right else None


def derivations(numbers: Sequence[int]) -> Iterator[Derivation]:
    """Every way to combine all of `numbers`, each used once (commutative twins appear once)."""
    leaves = [Derivation(str(n), Fraction(n), ()) for n in numbers]
    seen: set[str] = set()
    for derivation in _combine(leaves):
        if derivation.expression not in seen:
            seen.add(derivation.expression)
            yield derivation


def _combine(parts: list[Derivation]) -> Iterator[Derivation]:
    if len(parts) == 1:
        yield parts[0]
        return
    for i, j in itertools.permutations(range(len(parts)), 2):
        left, right = parts[i], parts[j]
        rest = [part for k, part in enumerate(parts) if k not in (i, j)]
        for operator in OPERATORS:
            if operator in "+*" and i > j:
                continue
            value = apply(left.value, operator, right.value)
            if value is None:
                continue
            step = (left.value, operator, right.value, value)
            text = f"{_wrap(left, operator, False)} {operator} {_wrap(right, operator, True)}"
            yield from _combine([Derivation(text, value, (*left.steps, *right.steps, step)), *rest])


def _wrap(part: Derivation, operator: str, is_right: bool) -> str:
    """Brackets where precedence needs them."""
    if not part.steps:
        return part.expression
    inner = part.steps[-1][1]
    loose = inner in "+-"
    needed = (
        (operator in "*/" and loose)
        or (is_right and (operator in "-/"))
        or (is_right and operator == "*" and inner == "/")
    )
    return f"({part.expression})" if needed else part.expression


def solutions(numbers: Sequence[int], target: int) -> list[Derivation]:
    """Every derivation that reaches `target`."""
    return [derivation for derivation in derivations(numbers) if derivation.value == target]


def is_validation(numbers: Sequence[int], target: int) -> bool:
    """Whether a problem belongs to the validation split: decided by a hash of the problem, so the splits never share one."""
    key = f"{sorted(numbers)}->{target}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") / 2**32 < VALIDATION_SHARE


def problems(
    split: str, seed: int, n_numbers: int = 3, max_number: int = 10, max_target: int = 40
) -> Iterator[tuple[list[int], int]]:
    """Endless random (numbers, target) of a split (``train`` or ``val``): numbers 1..max_number, target 1..max_target, reachable
    through whole, non-negative intermediate results.

    Raises `DataError` for a split, size or limit that has no problems.
    """
    if split not in SPLITS:
        raise DataError(f"countdown: split {split!r} does not exist; use {' or '.join(SPLITS)}")
    if not (1 <= n_numbers <= MAX_NUMBERS and max_number >= 1 and max_target >= 1):
        raise DataError(
            f"countdown: n_numbers={n_numbers}, max_number={max_number}, max_target={max_target}; allowed are "
            f"1 to {MAX_NUMBERS} numbers and limits of at least 1"
        )
    rng = random.Random(f"countdown/{split}/{seed}")
    misses = 0
    while misses < MAX_MISSES:
        misses += 1
        numbers = [rng.randint(1, max_number) for _ in range(n_numbers)]
        targets = sorted(value for value in _plain_values(tuple(numbers)) if 1 <= value <= max_target)
        targets = [t for t in targets if is_validation(numbers, t) == (split == "val")]
        if targets:
            misses = 0
            yield numbers, rng.choice(targets)
    raise DataError(
        f"countdown: no {split} problem with {n_numbers} numbers up to {max_number}, target up to {max_target}"
    )


def _plain_values(numbers: tuple[int, ...]) -> set[int]:
    """Every value that all of `numbers` reach through whole, non-negative intermediate results."""
    if len(numbers) == 1:
        return set(numbers)
    values: set[int] = set()
    for i, j in itertools.combinations(range(len(numbers)), 2):
        rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
        high, low = max(numbers[i], numbers[j]), min(numbers[i], numbers[j])
        for result in {high + low, high - low, high * low, *([high // low] if low and high % low == 0 else [])}:
            values |= _plain_values((result, *rest))
    return values


def plain(derivation: Derivation) -> bool:
    """Whether every intermediate result is a whole number of at least 0."""
    return all(step[3].denominator == 1 and step[3] >= 0 for step in derivation.steps)


def question(numbers: Sequence[int], target: int) -> str:
    """The problem in words."""
    return f"Using the numbers {list(numbers)}, make {target}."


def countdown(
    split: str = "train",
    n: int = 1024,
    seed: int = 0,
    *,
    n_numbers: int = 3,
    max_number: int = 10,
    max_target: int = 40,
) -> Dataset:
    """`n` distinct problems of a split (``train`` or ``val``; no seed makes them overlap). Metadata: ``question``, ``nums``,
    ``target``, ``data_source``. Raises `DataError` where there are not that many."""
    if n < 1:
        raise DataError(f"countdown: {n} problems asked for; ask for at least 1")
    rows: dict[str, dict[str, object]] = {}
    for tries, (numbers, target) in enumerate(problems(split, seed, n_numbers, max_number, max_target)):
        key = f"countdown-{'-'.join(map(str, numbers))}-{target}"
        text = question(numbers, target)
        rows.setdefault(
            key,
            {
                "id": key,
                "question": text,
                "nums": numbers,
                "target": target,
                "data_source": "countdown",
            },
        )
        if len(rows) == n:
            break
        if tries > 100 * n + 1000:
            raise DataError(
                f"countdown: found only {len(rows)} of {n} {split} problems; raise max_number or max_target"
            )
    return Dataset(list(rows.values()), name="countdown", split=split)
