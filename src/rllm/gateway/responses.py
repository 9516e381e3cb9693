"""OpenAI's Responses API as far as agents need it: its items as chat messages, and answers as its objects and events.

Stateless: every request brings its whole conversation, as the OpenAI Agents SDK does. Knows shapes; nothing of HTTP.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from rllm.gateway.chat import Piece
from rllm.gateway.errors import RequestError
from rllm.gateway.events import event
from rllm.gateway.messages import ToolUse, plain_messages, plain_text, plain_tools
from rllm.types import Message, ModelOutput, new_id

_USED = {
    "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "max_output_tokens",
    "stream", "chat_template_kwargs", "separate_reasoning",
}  # fmt: skip
_IGNORED = {
    "store", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream_options",
}  # fmt: skip
_TEXT = {"format": {"type": "text"}}
# Settings that would change the answer and cannot be honoured: name -> the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "include": (None, []),
    "conversation": (None,),
    "previous_response_id": (None,),
    "max_tool_calls": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "text": (None, {}, _TEXT, _TEXT | {"verbosity": "medium"}, {"verbosity": "medium"}),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
_WHY = {
    "previous_response_id": "no conversation is kept here; send all of it as input",
    "conversation": "no conversation is kept here; send all of it as input",
    "text": "decoding held to a format would sample from another distribution than the log-probabilities tell; ask for the format "
    "in the prompt and check the answer",
}


def check_names(body: Mapping[str, Any]) -> None:
    """Refuse what is unknown, and what would have to be ignored although it changes the answer."""
    for name, value in body.items():
        if name in _OFF:
            if value not in _OFF[name]:
                why = _WHY.get(name, "leave it out")
                raise RequestError(f"{name} is not supported here: {why}", name, "unsupported_parameter")
        elif name not in _USED and name not in _IGNORED:
            raise RequestError(f"unknown parameter {name!r}", name, "unknown_parameter")


def as_messages(body: Mapping[str, Any]) -> list[Message]:
    """`instructions` and `input` as plain chat messages. A text and the calls that follow it are one answer."""
    given, instructions = body.get("input"), body.get("instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise RequestError("input must be a text or a list of at least one item", "input")
    chat: list[dict[str, Any]] = []
    if instructions is not None:
        chat.append({"role": "system", "content": plain_text(instructions, "instructions", "instructions")})
    for i, item in enumerate(items):
        _add_item(chat, item, f"input[{i}]")
    try:
        return plain_messages(chat)
    except RequestError as error:
        raise RequestError(f"input, as messages: {error}", "input", error.code) from error


def _add_item(chat: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} must be an object", "input")
    kind = item.get("type", "message")
    last = chat[-1] if chat else {}
    if kind == "message":
        said = {"role": item.get("role"), "content": _text_of(item.get("content"), where)}
        if (
            said["role"] == "assistant"
            and "reasoning_content" in last
            and not (last["content"] or "tool_calls" in last)
        ):
            last["content"] = said["content"]
        else:
            chat.append(said)
    elif kind == "reasoning":  # of the answer that follows it
        given = [item.get(name) or [] for name in ("content", "summary")]
        parts = [part for one in given for part in (one if isinstance(one, list) else [None])]
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            raise RequestError(f"{where}: its content and summary must be lists of texts", "input")
        chat.append(
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "".join(str(part["text"]) for part in parts if part),
            }
        )
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if last.get("role") == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), call]
        else:
            chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        content = _text_of(item.get("output"), where)
        chat.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    else:
        raise RequestError(
            f"{where}: items of type {kind!r} are not supported; message, reasoning, function_call and function_call_output are",
            "input",
            "unsupported_parameter",
        )


def _text_of(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    texts = [
        part.get("text")
        for part in content
        if isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text", "text")
    ]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{where}.content: only text parts are supported", "input")
    return "".join(map(str, texts))


def tool_use(body: Mapping[str, Any]) -> ToolUse | None:
    """The tools of a request: the same as the chat route's, written flat."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if isinstance(tools, list):
        nested = []
        for i, tool in enumerate(tools):
            if not isinstance(tool, Mapping) or tool.get("type") != "function":
                raise RequestError(f"tools[{i}]: only tools of type 'function' are supported", "tools")
            nested.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}})
        tools = nested
    if isinstance(choice, Mapping):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return plain_tools(tools, choice, body.get("parallel_tool_calls"))


@dataclass(frozen=True)
class ResponseReply:
    """What all parts of one answer share."""

    call_id: str
    model_name: str
    body: Mapping[str, Any]
    message_id: str
    created: int
    apart: bool
    """Whether a thought is an item of its own."""

    @classmethod
    def to(cls, body: Mapping[str, Any], call_id: str, model_name: str, apart: bool) -> ResponseReply:
        return cls(call_id, model_name, body, f"msg_{new_id()}", int(time.time()), apart)

    def whole(self, output: ModelOutput) -> dict[str, Any]:
        """The response object of a finished answer."""
        cut = output.finish_reason == "length"
        prompt, sampled = output.prompt_length, output.completion_length
        return self._response("incomplete" if cut else "completed") | {
            "output": self._items(output),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    async def events(self, stream: AsyncIterator[Piece | ModelOutput]) -> AsyncIterator[str]:
        """The same as events: the message's text as it is sampled, function calls when they are whole, then the response."""
        numbers = itertools.count()

        def tell(kind: str, **data: Any) -> str:
            return event({"type": kind, "sequence_number": next(numbers)} | data, kind)

        thought = ""
        said = False
        output: ModelOutput | None = None
        begun = False
        try:
            async for piece in stream:
                if not begun:
                    begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield tell(kind, response=self._response("in_progress"))
                if isinstance(piece, ModelOutput):
                    output = piece
                    continue
                if piece.thought:
                    if not thought:
                        yield tell("response.output_item.added", output_index=0, item=self._thought(None))
                    thought += piece.thought
                    yield tell("response.reasoning_text.delta", delta=piece.thought, **self._part(self.thought_id, 0))
                if piece.text:
                    if not said:
                        said = True
                        for line in (*self._thought_ends(tell, thought), *self._message_begins(tell, thought)):
                            yield line
                    where = self._part(self.message_id, int(bool(thought)))
                    yield tell("response.output_text.delta", delta=piece.text, logprobs=[], **where)
        finally:
            await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        assert output is not None
        if not said:
            begins = [] if output.tool_calls else self._message_begins(tell, thought)
            for line in (*self._thought_ends(tell, thought), *begins):
                yield line
        for i, item in enumerate(self._items(output)):
            for line in self._item_ends(tell, i, item):
                yield line
        kind = "response.incomplete" if output.finish_reason == "length" else "response.completed"
        yield tell(kind, response=self.whole(output))

    @property
    def thought_id(self) -> str:
        return f"rs_{self.message_id.removeprefix('msg_')}"

    def _part(self, item_id: str, index: int) -> dict[str, Any]:
        return {"item_id": item_id, "output_index": index, "content_index": 0}

    def _thought_ends(self, tell: Any, thought: str) -> list[str]:
        if not thought:
            return []
        return [
            tell("response.reasoning_text.done", text=thought, **self._part(self.thought_id, 0)),
            tell("response.output_item.done", output_index=0, item=self._thought(thought)),
        ]

    def _message_begins(self, tell: Any, thought: str) -> list[str]:
        index = int(bool(thought))
        empty = _message(self.message_id, "in_progress", None)
        return [
            tell("response.output_item.added", output_index=index, item=empty),
            tell("response.content_part.added", part=_text_part(""), **self._part(self.message_id, index)),
        ]

    def _item_ends(self, tell: Any, i: int, item: dict[str, Any]) -> list[str]:
        if item["type"] == "reasoning":  # it ended when the message began
            return []
        if item["type"] == "message":
            text, part = item["content"][0]["text"], self._part(self.message_id, i)
            lines = [
                tell("response.output_text.done", text=text, logprobs=[], **part),
                tell("response.content_part.done", part=item["content"][0], **part),
            ]
        else:
            where = {"item_id": item["id"], "output_index": i}
            begun = item | {"arguments": "", "status": "in_progress"}
            lines = [
                tell("response.output_item.added", output_index=i, item=begun),
                tell("response.function_call_arguments.delta", delta=item["arguments"], **where),
                tell("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"], **where),
            ]
        return [*lines, tell("response.output_item.done", output_index=i, item=item)]

    def _items(self, output: ModelOutput) -> list[dict[str, Any]]:
        """The thought if it is told apart, the message unless there are only calls, the calls."""
        status = "incomplete" if output.finish_reason == "length" else "completed"
        items = [self._thought(output.reasoning)] if self.apart and output.reasoning else []
        if output.content or not output.tool_calls:
            items.append(_message(self.message_id, status, output.content))
        for call in output.tool_calls:
            item = {"type": "function_call", "id": f"fc_{call['id'].removeprefix('call_')}", "call_id": call["id"]}
            items.append(item | dict(call["function"]) | {"status": "completed"})
        return items

    def _thought(self, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": self.thought_id, "summary": [], "content": content}

    def _response(self, status: str) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.call_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": self.model_name,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "temperature": body.get("temperature"),
            "text": _TEXT,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "truncation": "disabled",
            "usage": None,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(identity: str, status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_text_part(text)]
    return {"type": "message", "id": identity, "role": "assistant", "status": status, "content": content}
