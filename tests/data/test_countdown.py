"""Countdown problems: solvable, seeded, and never in both splits.

Expressions are checked against Python's own arithmetic, which knows nothing of how they were made.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.data.countdown import countdown, derivations, is_validation, plain, question, solutions
from rllm.data.dataset import load_dataset
from rllm.errors import DataError


def value_of(expression: str) -> Fraction:
    """The value by Python's own parser, in fractions."""

    def walk(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp)
        left, right = walk(node.left), walk(node.right)
        operations = {ast.Add: left.__add__, ast.Sub: left.__sub__, ast.Mult: left.__mul__, ast.Div: left.__truediv__}
        return operations[type(node.op)](right)

    return walk(ast.parse(expression, mode="eval").body)


def numbers_in(expression: str) -> list[int]:
    return sorted(int(text) for text in expression.translate(str.maketrans("+-*/()", "      ")).split())


def reachable(numbers: Sequence[int]) -> set[Fraction]:
    """Every value of all `numbers`, found by pairing lists of values instead of building expressions."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    values: set[Fraction] = set()
    for size in range(1, len(numbers)):
        for part in itertools.combinations(range(len(numbers)), size):
            rest = [numbers[i] for i in range(len(numbers)) if i not in part]
            for left, right in itertools.product(reachable([numbers[i] for i in part]), reachable(rest)):
                values |= {left + right, left - right, left * right, *([left / right] if right else [])}
    return values


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_every_derivation_uses_each_number_once_and_has_the_value_it_states(numbers: list[int]) -> None:
    for derivation in derivations(numbers):
        assert numbers_in(derivation.expression) == sorted(numbers)
        assert value_of(derivation.expression) == derivation.value


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_derivations_reach_every_reachable_value_and_no_other(numbers: list[int]) -> None:
    assert {derivation.value for derivation in derivations(numbers)} == reachable(numbers)


def test_the_steps_of_a_derivation_are_right_and_end_in_its_value() -> None:
    for derivation in derivations([3, 8, 2, 5]):
        for left, operator, right, result in derivation.steps:
            assert result == {"+": left + right, "-": left - right, "*": left * right}.get(
                operator, left / (right or 1)
            )
        assert derivation.steps[-1][3] == derivation.value


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_problem_is_solvable_through_whole_numbers_and_within_its_limits(split: str) -> None:
    for task in countdown(split, 150, seed=3, max_number=9, max_target=30):
        numbers, target = task.metadata["nums"], task.metadata["target"]
        assert len(numbers) == 3 and all(1 <= n <= 9 for n in numbers) and 1 <= target <= 30
        assert any(plain(way) for way in solutions(numbers, target))
        assert task.instruction == task.metadata["question"] == question(numbers, target)
        assert task.data_source == "countdown"


def test_splits_share_no_problem_whatever_the_seeds_and_the_order_of_the_numbers() -> None:
    def keys(split: str, seed: int) -> set[tuple[tuple[int, ...], int]]:
        return {(tuple(sorted(t.metadata["nums"])), t.metadata["target"]) for t in countdown(split, 300, seed)}

    train = keys("train", 0) | keys("train", 1)
    val = keys("val", 0) | keys("val", 1)
    assert train and val and not train & val


@given(st.permutations([3, 7, 9]), st.integers(1, 40))
def test_the_split_of_a_problem_does_not_depend_on_the_order_of_its_numbers(numbers: list[int], target: int) -> None:
    assert is_validation(numbers, target) == is_validation([3, 7, 9], target)


def test_a_seed_gives_the_same_problems_and_another_seed_others() -> None:
    ids = [[task.id for task in countdown("train", 50, seed)] for seed in (5, 5, 6)]
    assert ids[0] == ids[1] != ids[2]
    assert len(set(ids[0])) == 50


def test_the_built_in_name_gives_the_same_validation_problems_for_every_seed() -> None:
    first, second = (load_dataset("countdown", split="val", seed=seed) for seed in (0, 1))
    assert [task.id for task in first] == [task.id for task in second]
    assert len(first) == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "'test' does not exist; use train or val"),
        ({"n": 0}, "ask for at least 1"),
        ({"n_numbers": 9}, "1 to 5 numbers"),
        ({"max_number": 0}, "limits of at least 1"),
        ({"n": 10, "n_numbers": 1, "max_number": 2}, "of 10 train problems"),
        ({"split": "val", "n_numbers": 1, "max_number": 1, "max_target": 1}, "no val problem"),
    ],
)
def test_impossible_requests_are_errors_and_never_hang(arguments: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        countdown(**arguments)


def test_an_unknown_split_of_a_built_in_dataset_is_an_error() -> None:
    with pytest.raises(DataError, match="split 'dev' does not exist"):
        load_dataset("countdown", split="dev")
