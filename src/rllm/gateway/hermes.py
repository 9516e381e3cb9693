"""Tool calls in Hermes' form, which Qwen models also use: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Calls as the chat route tells them, and tools, calls and results written into messages for templates that have no words for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.gateway.messages import ToolUse, arguments_of, tool_call
from rllm.tools.calls import CLOSE, OPEN, parse_tool_calls
from rllm.types import Message, new_id

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


def parse_calls(text: str, thinking: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """(content, calls) of an answer. Content is all that is no call (see `parse_tool_calls`): a block that cannot be read stays in it as
    it was sampled."""
    calls: list[dict[str, Any]] = []
    content: list[str] = []
    end = 0
    for call in parse_tool_calls(text, thinking):
        if call.error is not None:
            continue
        start = call.span[0]
        content.append(text[end:start].strip() if calls else text[:start].rstrip())
        calls.append(tool_call(f"call_{new_id()[:24]}", call.name, call.arguments))
        end = call.span[1]
    if not calls:
        return text, []
    return "\n".join(part for part in (*content, text[end:].strip()) if part), calls


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
