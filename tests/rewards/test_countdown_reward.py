"""The countdown reward: right answers count, everything else is 0 at once.

Values are checked against Python's own parser with fractions, which shares no code with ours.
"""

from __future__ import annotations

import ast
import operator
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.rewards.countdown import (
    BadExpression,
    countdown_reward,
    countdown_reward_fn,
    evaluate_expression,
    last_answer,
)

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(expression: str) -> tuple[Fraction, list[int]]:
    """(value, numbers used) by walking Python's syntax tree."""
    numbers: list[int] = []

    def walk(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int)
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp):
            assert isinstance(node.op, ast.USub)
            return -walk(node.operand)
        assert isinstance(node, ast.BinOp)
        left = walk(node.left)
        return OPERATIONS[type(node.op)](left, walk(node.right))

    one_line = " ".join(expression.split())  # Python ends an expression at a line break, people do not
    return walk(ast.parse(one_line, mode="eval").body), numbers


def _pair(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    spaced = st.tuples(children, st.sampled_from(["+", " - ", "*", " / ", " + ", "-"]), children).map("".join)
    return st.one_of(spaced, spaced.map("({})".format), children.map("-({})".format))


expressions = st.recursive(st.integers(0, 99).map(str), _pair, max_leaves=8)
noise = st.text("0123456789+-*/() .^%eE_x,\n", max_size=4)
almost_expressions = st.tuples(expressions, noise, expressions).map("".join)


@settings(max_examples=300, deadline=None)
@given(expressions)
def test_values_and_numbers_equal_an_independent_evaluation(expression: str) -> None:
    try:
        expected = by_python(expression)
    except ZeroDivisionError:
        with pytest.raises(BadExpression, match="division by zero"):
            evaluate_expression(expression)
        return
    value, numbers = evaluate_expression(expression)
    assert (value, sorted(numbers)) == (expected[0], sorted(expected[1]))


@settings(max_examples=200, deadline=None)
@given(almost_expressions)
def test_what_is_accepted_means_the_same_to_python(text: str) -> None:
    try:
        value, numbers = evaluate_expression(text)
    except BadExpression:
        return
    without_leading_zeros = re.sub(r"(?<![0-9])0+(?=[0-9])", "", text)  # Python refuses those
    assert by_python(without_leading_zeros) == (value, numbers)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_has_a_reward_of_0_or_1_and_never_raises(text: str) -> None:
    assert countdown_reward(text, [3, 5], 8) in (0.0, 1.0)
    assert countdown_reward_fn({"nums": [3, 5], "target": 8}, f"<answer>{text}</answer>") in (0.0, 1.0)


@pytest.mark.parametrize("answer", ["3 * 7 + 5", "5+7*3", "(3 * 7) + 5", "((5 + (3 * 7)))", " 5 +\n3*7 ", "5 - -3 * 7"])
def test_a_right_expression_in_any_spelling_is_worth_1(answer: str) -> None:
    assert countdown_reward(answer, [3, 5, 7], 26) == 1.0


def test_arithmetic_is_exact_where_floats_are_not() -> None:
    assert countdown_reward("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24) == 1.0
    assert countdown_reward("10000000000000001 - 1", [10000000000000001, 1], 10000000000000001) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        "26",
        "3 * 7 + 4",  # not the target
        "21 + 5",  # a number that was not given
        "7 * 3 + 5 + 7 - 7",  # numbers used more than once
        "13 * 2",
        "3 * 7 + 5 = 26",
        "3 * 7 + 5.0",
        "3 * 7 + 5 / 1",
        "3 x 7 + 5",
        "3 * 7 5 +",
        "2 6",
        "3 * 7 + ",
        "3 * (7 + 5",
        "3 * 7) + 5",
        "()",
        "9**9**9",
        "3 * 7 + 5 // 1",
        "\uff13 * 7 + 5",  # full-width 3
        "\u0663 * 7 + 5",  # Arabic-Indic 3
        "3 \u00d7 7 + 5",
        "3\u00b2 + 7 + 5",
        "3\u00a0* 7 + 5",
        "__import__('os').getcwd()",
        "3 * 7 + 5 # right",
        "0x3 * 7 + 5",
        "1e1",
        "3_0",
        "3 / 0",
        "5 / (3 - 3) + 7",
    ],
)
def test_anything_else_is_worth_0(answer: str | None) -> None:
    assert countdown_reward(answer, [3, 5, 7], 26) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9*" * 5_000 + "9",
        "(" * 10_000,
        "(" * 5_000 + "1" + ")" * 5_000,
        "-" * 10_000 + "1",
        "9" * 10_000,
        "1/" * 5_000 + "0",
        "<answer>" * 20_000,
        "</answer>" * 20_000,
        "<answer></answer>" * 10_000,
    ],
    ids=lambda text: f"{text[:10]}..{len(text)}",
)
def test_hostile_answers_are_worth_0_at_once(text: str) -> None:
    started = time.perf_counter()
    assert countdown_reward(text, [9, 1], 9) == 0.0
    assert countdown_reward_fn({"nums": [9, 1], "target": 9}, f"<answer>{text}</answer>") == 0.0
    assert countdown_reward_fn({"nums": [9, 1], "target": 9}, text) == 0.0
    assert time.perf_counter() - started < 0.1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer> 3 + 5 </answer>.", "3 + 5"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer>1</answer> and 2</answer>", "1"),
        ("<answer><answer>3</answer>", "3"),
        ("<answer>\n3\n</answer>", "3"),
        ("<answer></answer>", ""),
        ("<answer>3", None),
        ("3</answer>", None),
        ("</answer>3<answer>", None),
        ("<Answer>3</Answer>", None),
        ("", None),
    ],
)
def test_the_last_complete_answer_counts(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer
