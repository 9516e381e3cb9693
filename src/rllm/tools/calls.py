"""Tool calls written as text, the way Qwen and Hermes models do: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

The one parser of this form. Knows text only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from rllm.tools.json_text import MAX_DEPTH, depth_of, no_constant, strict_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
FORM = '{"name": "...", "arguments": {...}}'
_MARK = re.compile(f"{OPEN}|{THINK}|{THOUGHT}")
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_constant=no_constant)


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it. `arguments` is JSON text of an object; `error` says why there is nothing to call. `span`: where it
    stands in the text, tags included."""

    name: str = ""
    arguments: str = ""
    error: str | None = None
    span: tuple[int, int] = field(default=(0, 0), compare=False, repr=False)


class _Broken(ValueError):
    """Why a block is no call, and the tool that it names if it does."""

    def __init__(self, message: str, name: str = ""):
        super().__init__(message)
        self.name = name


def parse_tool_calls(text: str, thinking: bool = False) -> list[ToolCall]:
    """Every call in `text`, in order. One that cannot be read is in the list too, with its `error`: it is never left out, and never
    becomes a call with other arguments.

    Arguments are an object, or JSON text of one. A block cut before its end tag counts if its JSON is whole. What is said while thinking
    is no call; the tags of thinking inside of a call's JSON are text. `thinking`: the text begins inside of a thought, which its prompt
    opened.
    """
    calls: list[ToolCall] = []
    at = 0
    while mark := _MARK.search(text, at):
        at = mark.end()
        if mark[0] == THINK:
            thinking = True
        elif mark[0] == THOUGHT:
            thinking = False
            calls.clear()  # all before it was thought, whether the model or its template opened the tag
        elif not thinking:
            try:
                name, arguments, at = _read_block(text, at)
                calls.append(ToolCall(name, arguments, span=(mark.start(), at)))
            except _Broken as error:
                calls.append(ToolCall(error.name, error=str(error), span=(mark.start(), at)))
    return calls


def _read_block(text: str, at: int) -> tuple[str, str, int]:
    """(name, arguments, end) of the block whose inside begins at `at`, or `_Broken`."""
    start = _after_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        where = f"{error.msg} at character {error.pos - at}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise _Broken(f"the tool call is not valid JSON: {where}; write {FORM}") from error
    end = _after_space(text, end)
    if text.startswith(CLOSE, end):
        end += len(CLOSE)
    elif end < len(text) and not text.startswith(OPEN, end):
        raise _Broken(f"the tool call does not end with {CLOSE} after its JSON")
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise _Broken(f"the tool call names no tool; write {FORM}")
    return name, _arguments(name, value.get("arguments")), end


def _arguments(name: str, given: Any) -> str:
    if isinstance(given, str):  # some models write the arguments as JSON inside JSON
        try:
            given = strict_json(given)
        except (ValueError, RecursionError) as error:
            raise _Broken(f"the arguments of {name} are not valid JSON: {error}", name) from error
    if not isinstance(given, dict):
        raise _Broken(f"the tool call has no arguments; write {FORM}", name)
    if depth_of(given) > MAX_DEPTH:
        raise _Broken(f"the arguments of {name} are nested deeper than {MAX_DEPTH}", name)
    written = json.dumps(given, ensure_ascii=False)
    try:
        (name + written).encode()  # half a surrogate pair is no text that could be sent
    except UnicodeEncodeError as error:
        raise _Broken(f"the tool call is no valid Unicode: {error.reason}") from error
    return written


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
