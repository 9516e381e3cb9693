"""What a foreign endpoint answered, as a record: read as far as it can be, since nobody promises what is in it.

Knows OpenAI's shapes; nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.gateway import responses
from rllm.gateway.errors import RequestError
from rllm.gateway.messages import tool_call
from rllm.gateway.recorder import Call, Session
from rllm.types import Message, ModelOutput, new_id


@dataclass
class Record:
    """One call on its way: what was asked, and what came back so far."""

    session: Session
    trajectory: str | None
    body: dict[str, Any]
    order: int = field(init=False)

    def __post_init__(self) -> None:
        self.order = self.session.next_order()

    def take(self, content: bytes) -> None:
        """Record the choices of a whole answer. What is no chat, text completion or response is none of ours."""
        data = _object(_json(content))
        if data.get("object") == "response":
            self._take_response(data)
            return
        choices = _objects(data.get("choices"))
        for i, choice in enumerate(choices):
            message = _object(choice.get("message"))
            call = str(data.get("id") or new_id())
            self._record(
                call if len(choices) == 1 else f"{call}-{i}",
                _text(message.get("content")) or _text(choice.get("text")),
                _text(choice.get("finish_reason")) or "stop",
                _text(message.get("reasoning_content")),
                [_call(part) for part in _objects(message.get("tool_calls"))],
            )

    def take_events(self, content: bytes) -> None:
        """Record a streamed answer from its events, as far as it came."""
        told: dict[int, _Told] = {}
        call = ""
        for line in content.split(b"\n"):
            event = _object(_json(line.removeprefix(b"data:")) if line.startswith(b"data:") else None)
            if event.get("type") in ("response.completed", "response.incomplete"):
                self._take_response(_object(event.get("response")))
            call = call or str(event.get("id") or "")
            for choice in _objects(event.get("choices")):
                told.setdefault(_index(choice), _Told()).add(choice)
        for i, one in told.items():
            name = (call or new_id()) if len(told) == 1 else f"{call}-{i}"
            self._record(name, one.text, one.reason or "stop", one.reasoning, list(one.calls.values()))

    def _take_response(self, data: Mapping[str, Any]) -> None:
        """Record an answer of the Responses API."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for item in _objects(data.get("output")):
            said = [_text(part.get("text")) for part in _objects(item.get("content"))]
            if item.get("type") == "function_call":
                calls.append(_call({"id": item.get("call_id"), "function": item}))
            elif item.get("type") == "reasoning":
                thoughts += [*said, *(_text(part.get("text")) for part in _objects(item.get("summary")))]
            else:
                texts += said
        cut = data.get("status") == "incomplete"
        reason = "length" if cut else "tool_calls" if calls else "stop"
        self._record(str(data.get("id") or new_id()), "".join(texts), reason, "".join(thoughts), calls)

    def _record(self, call: str, text: str, reason: str, reasoning: str, tool_calls: list[Any]) -> None:
        temperature = self.body.get("temperature")
        output = ModelOutput(
            id=call,
            text=text,
            content=text,
            prompt_ids=[],
            completion_ids=[],
            logprobs=[],
            versions=[],
            finish_reason=reason,
            temperature=float(temperature) if isinstance(temperature, (int, float)) else 0.0,
            reasoning=reasoning,
            tool_calls=tool_calls,
            adapter="",
        )
        messages: list[Message] = _objects(self.body.get("messages"))
        if "input" in self.body:
            with contextlib.suppress(RequestError):  # items that only this endpoint knows
                messages = responses.as_messages(self.body)
        self.session.record(Call(output, messages, self.trajectory, self.order))


@dataclass
class _Told:
    """One choice of a streamed answer, put together."""

    text: str = ""
    reasoning: str = ""
    reason: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, choice: Mapping[str, Any]) -> None:
        delta = _object(choice.get("delta"))
        self.text += _text(delta.get("content")) or _text(choice.get("text"))
        self.reasoning += _text(delta.get("reasoning_content"))
        self.reason = _text(choice.get("finish_reason")) or self.reason
        for part in _objects(delta.get("tool_calls")):
            function = _object(part.get("function"))
            call = self.calls.setdefault(_index(part), tool_call("", "", ""))
            call["id"] = _text(part.get("id")) or call["id"]
            call["function"]["name"] += _text(function.get("name"))
            call["function"]["arguments"] += _text(function.get("arguments"))


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    function = _object(part.get("function"))
    return tool_call(_text(part.get("id")), _text(function.get("name")), _text(function.get("arguments")))


def _json(text: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[Any]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _index(part: Mapping[str, Any]) -> int:
    index = part.get("index")
    return index if isinstance(index, int) else 0
