"""The countdown reward: does the last <answer> reach the target with exactly the given numbers?

Arithmetic is parsed here and done in exact fractions; text of a model is never run as code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

MAX_EXPRESSION_LENGTH = 256
MAX_DEPTH = 32
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")


class BadExpression(ValueError):
    """The text is no arithmetic over whole numbers with + - * / and brackets."""


def last_answer(text: str) -> str | None:
    """What stands in the last ``<answer>...</answer>``, stripped; None where there is none. Linear in the length of `text`."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.index("</answer>", start)].strip()


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]]:
    """(exact value, the numbers used). Raises `BadExpression` for anything else than + - * / ( ) over ASCII digits.

    Linear in the length, which is bounded; there is no power operator, so results stay small.
    """
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise BadExpression(f"longer than {MAX_EXPRESSION_LENGTH} characters")
    compact = re.sub(r"[ \t\r\n]+", " ", expression)
    tokens = _TOKEN.findall(compact)
    if "".join(tokens) != compact.replace(" ", "") or re.search(r"[0-9] [0-9]", compact):
        raise BadExpression("only digits, + - * /, brackets and spaces are allowed")
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.at != len(tokens):
        raise BadExpression(f"unexpected {tokens[parser.at]!r}")
    return value, parser.numbers


class _Parser:
    """Recursive descent: sum -> product -> factor."""

    def __init__(self, tokens: Sequence[str]):
        self.tokens, self.at = tokens, 0
        self.numbers: list[int] = []

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            operator = self.next()
            right = self.product(depth)
            value = value + right if operator == "+" else value - right
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.peek() in ("*", "/"):
            operator = self.next()
            right = self.factor(depth)
            if operator == "*":
                value *= right
            elif right == 0:
                raise BadExpression("division by zero")
            else:
                value /= right
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise BadExpression(f"brackets nested deeper than {MAX_DEPTH}")
        token = self.next()
        if token == "-":
            return -self.factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self.next() != ")":
                raise BadExpression("a bracket is not closed")
            return value
        if not token.isdigit():
            raise BadExpression(f"unexpected {token!r}")
        self.numbers.append(int(token))
        return Fraction(int(token))

    def peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def next(self) -> str:
        token = self.peek()
        if token is None:
            raise BadExpression("ends too early")
        self.at += 1
        return token


def countdown_reward(answer: str | None, nums: Sequence[int], target: int) -> float:
    """1.0 if the expression `answer` uses each of `nums` exactly once and equals `target`, else 0.0."""
    if answer is None:
        return 0.0
    try:
        value, used = evaluate_expression(answer)
    except BadExpression:
        return 0.0
    return float(sorted(used) == sorted(int(n) for n in nums) and value == target)


def countdown_reward_fn(task_info: Mapping[str, Any], action: str) -> float:
    """The same for a whole response: judges its last ``<answer>``. `task_info` holds ``nums`` and ``target``."""
    return countdown_reward(last_answer(action), task_info["nums"], int(task_info["target"]))
