"""Tools: the schema the model reads, and a text for every way in which a call can go wrong."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rllm
from rllm.errors import UserError
from rllm.tools import Toolset, parse_tool_calls

RAN: list[Any] = []


@rllm.tool(timeout_s=1.0)
def add(a: int, b: int = 2, unit: Literal["m", "km"] | None = None) -> int:
    """Add two numbers.

    Exactly.

    Args:
        a: the first one
        b (int): the other one,
            or 2
    """
    RAN.append((a, b, unit))
    return a + b


@rllm.tool
async def fails(what: str) -> None:
    """Always fails."""
    raise LookupError(f"no {what}")


@rllm.tool(timeout_s=0.2)
def slow() -> str:
    """Takes an hour."""
    time.sleep(3600)
    return "done"


TOOLS = Toolset([add, fails, slow])


def call(name: str, arguments: str) -> str:
    RAN.clear()
    return asyncio.run(TOOLS.call(name, arguments))


def test_the_schema_comes_from_the_signature_and_the_docstring() -> None:
    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nExactly.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["a"],
                "properties": {
                    "a": {"type": "integer", "description": "the first one"},
                    "b": {"type": "integer", "default": 2, "description": "the other one, or 2"},
                    "unit": {"anyOf": [{"enum": ["m", "km"], "type": "string"}, {"type": "null"}], "default": None},
                },
            },
        },
    }
    assert [schema["function"]["name"] for schema in TOOLS.schemas] == ["add", "fails", "slow"]
    assert add(1, 1) == 2, "the function can still be called"


@pytest.mark.parametrize(
    ("arguments", "text", "ran"),
    [
        ('{"a": 1, "b": 3}', "4", (1, 3, None)),
        ('{"a": 1}', "3", (1, 2, None)),
        ('{"a": "5", "unit": "km"}', "7", (5, 2, "km")),
    ],
)
def test_a_good_call_gives_its_result_as_text(arguments: str, text: str, ran: Any) -> None:
    assert call("add", arguments) == text and [ran] == RAN


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('{"a": 1,', "error: the arguments of add are not valid JSON: Expecting property name"),
        ("", "error: the arguments of add are not valid JSON"),
        ("[1, 2]", "error: the arguments of add must be a JSON object, found list"),
        ("null", "must be a JSON object, found NoneType"),
        ("{}", "error: wrong arguments for add: a: Field required"),
        ('{"a": "x"}', "error: wrong arguments for add: a: Input should be a valid integer"),
        ('{"a": 1, "c": 2}', "error: wrong arguments for add: c: Extra inputs are not permitted"),
        ("[" * 100_000, "error: the arguments of add are not valid JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_told_and_the_tool_never_runs(arguments: str, says: str) -> None:
    assert says in call("add", arguments) and RAN == []


def test_an_unknown_a_raising_and_a_slow_tool_each_give_an_error_text() -> None:
    assert call("sub", '{"a": 1}') == "error: there is no tool called 'sub'; there are add, fails, slow"
    assert call("fails", '{"what": "bread"}') == "error: fails failed: LookupError: no bread"
    started = time.monotonic()
    assert call("slow", "{}") == "error: slow did not end within 0.2 s"
    assert time.monotonic() - started < 2


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


RAISED = [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), Unsayable(), StopIteration(), OSError("\ud800")]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_raises_is_an_error_text_and_others_go_on(error: BaseException, is_async: bool) -> None:
    if is_async and isinstance(error, KeyboardInterrupt):
        pytest.skip("in the main thread it is the user's")

    def raises() -> None:
        raise error

    async def raises_later() -> None:
        await asyncio.sleep(0)
        raise error

    broken = rllm.tool(raises_later if is_async else raises, name="broken")

    async def both() -> list[str]:
        return await asyncio.gather(broken.call("{}"), add.call('{"a": 1}'))

    told, other = asyncio.run(both())
    assert told.startswith("error: broken failed: ") and other == "3"
    told.encode()


def test_a_cancelled_caller_is_cancelled_not_told() -> None:
    @rllm.tool
    async def waits() -> None:
        await asyncio.sleep(3600)

    async def give_up() -> None:
        async with asyncio.timeout(0.05):
            await waits.call("{}")

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())


@pytest.mark.parametrize("result", ["a\ud800b", {"k": "\udfff"}, ["\ud83d\ude00"]])
def test_results_can_always_be_sent(result: Any) -> None:
    @rllm.tool
    def gives() -> Any:
        return result

    text = asyncio.run(gives.call("{}"))
    assert not text.startswith("error") and "\ufffd" in text
    text.encode()


@pytest.mark.parametrize(
    "call", [("x" * 10**6, "{}"), ("add", '{"' + "x" * 10**6 + '": 1}'), ("add", "[" * 10**6), ("\ud800", "{}")]
)
def test_no_error_text_is_longer_than_a_result_may_be(call: tuple[str, str]) -> None:
    text = asyncio.run(TOOLS.call(*call))
    assert text.startswith("error: ") and len(text) < 8100
    text.encode()


def test_a_tool_in_a_tight_loop_is_ended_with_its_thread() -> None:
    @rllm.tool(timeout_s=0.2)
    def spin() -> None:
        """Never ends."""
        while True:
            pass

    assert asyncio.run(spin.call("{}")) == "error: spin did not end within 0.2 s"
    deadline = time.monotonic() + 5
    while any(thread.name == "rllm-spin" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "its thread still runs"
        time.sleep(0.02)


def test_a_tool_without_parameters_may_be_called_with_nothing() -> None:
    @rllm.tool
    def now() -> dict[str, int]:
        """The time."""
        return {"hour": 7}

    assert asyncio.run(now.call("")) == '{"hour": 7}'


def test_a_long_result_is_cut_and_says_so() -> None:
    @rllm.tool(max_characters=10)
    def long() -> str:
        """Long."""
        return "x" * 25

    assert asyncio.run(long.call("{}")) == "x" * 10 + "\n[cut: 15 more characters]"


def test_what_cannot_be_a_tool_is_refused_by_name() -> None:
    def many(*args: int) -> None:
        """Many."""

    def odd(a: threading.Lock) -> None:  # pyright: ignore[reportInvalidTypeForm]
        """Odd."""

    with pytest.raises(UserError, match="'many': parameter 'args' has no name of its own"):
        rllm.tool(many)
    with pytest.raises(UserError, match="tool 'odd'"):
        rllm.tool(odd)
    with pytest.raises(UserError, match="tool name 'a b'"):
        rllm.tool(add.fn, name="a b")
    with pytest.raises(UserError, match="two tools are called 'add'"):
        Toolset([add, add])


def test_calls_written_as_text_are_found_in_order() -> None:
    text = 'So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> and <tool_call>\n{"name": "x", "arguments": "{\\"b\\": 2}"}\n</tool_call>'
    assert [(c.name, c.arguments, c.error) for c in parse_tool_calls(text)] == [
        ("add", '{"a": 1}', None),
        ("x", '{"b": 2}', None),
    ]
    assert parse_tool_calls("no call") == []
    assert parse_tool_calls('<think>maybe <tool_call>{"name": "add", "arguments": {}}</tool_call></think>') == []
    assert [c.name for c in parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}')] == ["add"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1,</tool_call>', "error: the tool call is not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}} so', "error: the tool call does not end with </tool_call>"),
        (
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            "error: the tool call is not valid JSON: NaN",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
            "error: the tool call is no valid Unicode",
        ),
        ('<tool_call>{"name": "add"}</tool_call>', "error: the tool call has no arguments"),
        ('<tool_call>{"arguments": {}}</tool_call>', "error: the tool call names no tool"),
        ("<tool_call>[]</tool_call>", "error: the tool call names no tool"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "error: the arguments of add are not valid JSON"),
    ],
)
def test_a_malformed_call_in_text_is_answered_and_nothing_runs(text: str, says: str) -> None:
    RAN.clear()
    [found] = parse_tool_calls(text)
    assert asyncio.run(TOOLS.answer(found)).startswith(says) and RAN == []


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='{}[]":,ab1 \\<>/tolcneurgms_', max_size=60))
def test_whatever_the_model_writes_the_answer_is_a_text(text: str) -> None:
    RAN.clear()
    for found in parse_tool_calls(f"<tool_call>{text}</tool_call>"):
        assert isinstance(asyncio.run(TOOLS.answer(found)), str)
    answer = asyncio.run(TOOLS.call("add", text))
    try:
        fits = isinstance(json.loads(text), dict)
    except ValueError:
        fits = False
    assert (answer.startswith("error: ") and RAN == []) or fits
