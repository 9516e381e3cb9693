"""Chat messages and tools as callers send them, in one plain form: checked, texts joined, what has no effect dropped.

Knows OpenAI's message shapes; nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.gateway.errors import RequestError
from rllm.tools.json_text import MAX_DEPTH, depth_of, strict_json
from rllm.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """The tools of one call. `choice`: ``none``, ``auto``, ``required``, or in `name` the one that must be called. Not `parallel`:
    at most one call."""

    tools: tuple[dict[str, Any], ...]
    choice: str = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def parses(self) -> bool:
        """Whether calls are looked for in what is sampled."""
        return self.choice != "none"


def plain_messages(messages: Any) -> list[Message]:
    """`messages` as roles with texts: lists of text parts joined, ``developer`` as ``system``, fields without effect dropped.

    Assistant messages keep `tool_calls` (arguments as the text they were sent as) and `reasoning_content`, tool messages
    `tool_call_id`.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a role", "messages")
    role = message["role"]
    if role not in ROLES:
        raise RequestError(f"{where}.role is {role!r}; allowed are {', '.join(ROLES)}", "messages")
    if message.get("function_call") is not None:
        raise RequestError(
            f"{where}.function_call is not supported; use tool_calls", "messages", "unsupported_parameter"
        )
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{where}.content: only text parts are supported", "messages")
        content = "".join(map(str, texts))
    plain: Message = {
        "role": "system" if role == "developer" else role,
        "content": plain_text(content, f"{where}.content", "messages"),
    }
    if message.get("tool_calls"):
        if role != "assistant":
            raise RequestError(f"{where}.tool_calls: only assistant messages have them", "messages")
        plain["tool_calls"] = _plain_calls(message["tool_calls"], where)
    if role == "assistant" and message.get("reasoning_content"):
        plain["reasoning_content"] = plain_text(message["reasoning_content"], f"{where}.reasoning_content", "messages")
    if role == "tool" and message.get("tool_call_id") is not None:
        plain["tool_call_id"] = plain_text(message["tool_call_id"], f"{where}.tool_call_id", "messages")
    return plain


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", "messages")
    plain = []
    for k, call in enumerate(calls):
        at = f"{where}.tool_calls[{k}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise RequestError(
                f'{at} must be {{"id", "type": "function", "function": {{"name", "arguments"}}}}', "messages"
            )
        name = plain_text(function.get("name"), f"{at}.function.name", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):  # what templates take; some agents send it so
            arguments = json.dumps(plain_json(arguments, f"{at}.function.arguments", "messages"), ensure_ascii=False)
        arguments = plain_text(arguments, f"{at}.function.arguments", "messages")
        identity = plain_text(call.get("id") or "", f"{at}.id", "messages")
        plain.append(tool_call(identity, name, arguments))
    return plain


def tool_call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    """One tool call in OpenAI's form; `arguments` is JSON text, for a template an object."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any] | str:
    """Arguments of a tool call as an object; the text itself where it is no JSON object."""
    text = call["function"]["arguments"]
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) and depth_of(value) <= MAX_DEPTH else text


def plain_tools(tools: Any, choice: Any, parallel: Any) -> ToolUse | None:
    """The tools of a chat request, in OpenAI's chat form; None where there are none."""
    if not (parallel is None or isinstance(parallel, bool)):
        raise RequestError(f"parallel_tool_calls must be true or false, found {parallel!r}", "parallel_tool_calls")
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
        return None
    if not isinstance(tools, list):
        raise RequestError("tools must be a list", "tools")
    plain = tuple(_plain_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in plain]
    if len(set(names)) < len(names):
        raise RequestError(f"tools: each name once, found {', '.join(names)}", "tools")
    if choice is None or choice in ("none", "auto", "required"):
        return ToolUse(plain, choice or "auto", None, parallel is not False)
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": one of '
            f"{', '.join(names)}}}}}",
            "tool_choice",
        )
    return ToolUse(plain, "required", name, parallel=False)


def _plain_tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(
            f'{where} must be {{"type": "function", "function": {{"name", "description", "parameters"}}}}', "tools"
        )
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise RequestError(f"{where}.function.name must be 1 to 64 letters, digits, '_', '.' or '-'", "tools")
    plain: dict[str, Any] = {"name": name}
    if function.get("description") is not None:
        plain["description"] = plain_text(function["description"], f"{where}.function.description", "tools")
    parameters = function.get("parameters")
    if not (parameters is None or isinstance(parameters, Mapping)):
        raise RequestError(f"{where}.function.parameters must be a JSON schema (an object)", "tools")
    plain["parameters"] = plain_json(
        parameters or {"type": "object", "properties": {}}, f"{where}.function.parameters", "tools"
    )
    return {"type": "function", "function": plain}


def plain_text(value: Any, where: str, param: str) -> str:
    """`value`, which must be text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise RequestError(f"{where} must be text", param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is no valid Unicode: {error.reason} at character {error.start}", param) from error
    return value


def plain_json(value: Any, where: str, param: str) -> Any:
    """A JSON value that is not nested too deep and whose texts are valid."""
    if depth_of(value) > MAX_DEPTH:
        raise RequestError(f"{where} is nested deeper than {MAX_DEPTH}", param)
    try:
        plain_text(json.dumps(value, ensure_ascii=False, allow_nan=False), where, param)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where} is no valid JSON: {error}", param) from error
    return value


def canonical_json(value: Any) -> str:
    """The same text for equal JSON values, whatever the order of keys or the spaces they were written with."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def same_calls(calls: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """What makes tool calls the same: names and arguments, not ids nor how the arguments were written."""
    return [[call["function"]["name"], arguments_of(call)] for call in calls]
