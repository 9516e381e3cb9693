"""Tool calls in Hermes' form, which Qwen models also use: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Reads calls out of sampled text, and writes tools, calls and results into messages for templates that have no words for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.gateway.messages import MAX_DEPTH, ToolUse, arguments_of, depth_of, no_constant, strict_json, tool_call
from rllm.types import Message, new_id

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_constant=no_constant)
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def parse_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(content, calls) of an answer. Content is all that is no call: a block whose JSON is broken stays in it as it was sampled.

    A call has a name and says its arguments, as an object or as JSON text of one; none is ever made up. What is said while
    thinking is no call.
    """
    calls: list[dict[str, Any]] = []
    content: list[str] = []
    thought = text.rfind("</think>")
    at = -1 if thought < 0 and "<think>" in text else text.find(OPEN, max(thought, 0))
    end = 0
    while at >= 0:
        call, after = _read_block(text, at + len(OPEN))
        if call is not None:
            content.append(text[end:at].strip() if calls else text[:at].rstrip())
            calls.append(call)
            end = after
        at = text.find(OPEN, after)
    if not calls:
        return text, []
    return "\n".join(part for part in (*content, text[end:].strip()) if part), calls


def _read_block(text: str, at: int) -> tuple[dict[str, Any] | None, int]:
    """(the call whose JSON begins at `at`, or None; where to read on). A block cut before its end tag counts if its JSON is whole."""
    start = _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, at
    end = _SPACE.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess]
    if text.startswith(CLOSE, end):
        end += len(CLOSE)
    elif end < len(text) and not text.startswith(OPEN, end):
        return None, at
    return _call(value), end


def _call(value: Any) -> dict[str, Any] | None:
    arguments = value.get("arguments") if isinstance(value, dict) else None
    try:
        if isinstance(arguments, str):
            arguments = strict_json(arguments)
        if not isinstance(arguments, dict) or depth_of(arguments) > MAX_DEPTH:
            return None
        name, written = value.get("name"), json.dumps(arguments, ensure_ascii=False)
        if not isinstance(name, str) or not name:
            return None
        (name + written).encode()  # half a surrogate pair is no text that could be sent
    except (ValueError, RecursionError):
        return None
    return tool_call(f"call_{new_id()[:24]}", name, written)


def forced_start(use: ToolUse | None) -> str:
    """What the answer is made to begin with so that it is a call (of the named tool): part of the prompt, not sampled."""
    if use is None or use.choice != "required":
        return ""
    if use.name is None:
        return f'{OPEN}\n{{"name":'
    return f'{OPEN}\n{{"name": {json.dumps(use.name)}, "arguments":'


def write_out(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same chat in plain messages: tools at the end of the system message, calls in the assistant's content, results as user
    messages in ``<tool_response>``."""
    plain: list[Message] = []
    for message in messages:
        content = message["content"]
        if message.get("tool_calls"):
            blocks = [
                f"{OPEN}\n{json.dumps({'name': call['function']['name'], 'arguments': _value(call)}, ensure_ascii=False)}\n{CLOSE}"
                for call in message["tool_calls"]
            ]
            plain.append({"role": "assistant", "content": "\n".join([*([content] if content else []), *blocks])})
        elif message["role"] == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if plain and plain[-1].get("tool_result"):
                plain[-1]["content"] += f"\n{result}"
            else:
                plain.append({"role": "user", "content": result, "tool_result": True})
        else:
            plain.append(message)
    plain = [{name: value for name, value in message.items() if name != "tool_result"} for message in plain]
    if tools:
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        system = _SYSTEM.format(signatures=signatures)
        if plain and plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{system}"}
        else:
            plain.insert(0, {"role": "system", "content": system})
    return plain


def _value(call: Mapping[str, Any]) -> Any:
    # A template is given arguments as an object; `Renderer` has made them one already where they are.
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, dict) else arguments_of(call)
