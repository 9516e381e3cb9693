"""Tool calls written as text, the way Qwen and Hermes models do: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Knows text only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it. `arguments` is JSON text; `error` says why there is nothing to call."""

    name: str = ""
    arguments: str = ""
    error: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Every call in `text`, in order. One that cannot be read is in the list too, with its `error`: it is never left out, and never
    becomes a call with other arguments."""
    calls: list[ToolCall] = []
    at = text.find(OPEN)
    while at >= 0:
        start = at + len(OPEN)
        end = text.find(CLOSE, start)
        if end < 0:
            calls.append(ToolCall(error=f"the tool call does not end with {CLOSE}"))
            break
        calls.append(_parse(text[start:end]))
        at = text.find(OPEN, end)
    return calls


def _parse(text: str) -> ToolCall:
    form = '{"name": "...", "arguments": {...}}'
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the tool call is not valid JSON: {error}; write {form}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(error=f"the tool call names no tool; write {form}")
    arguments = value.get("arguments")
    if isinstance(arguments, str):  # some models write the arguments as JSON inside JSON
        return ToolCall(value["name"], arguments)
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], error=f"the tool call has no arguments; write {form}")
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
