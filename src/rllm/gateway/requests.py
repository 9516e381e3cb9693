"""What a caller asks for, checked: messages, prompt, sampling settings. HTTP bodies and workflow keywords go through here.

Knows OpenAI's request words; nothing of routes, models or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllm.types import Message

MAX_N = 128
MAX_STOPS = 16
# What a request may name although nothing here depends on it.
_IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
# Settings that would change the answer and cannot be honoured: name -> the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
}
_SAMPLING = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop")
_USED = {*_SAMPLING, "model", "messages", "prompt", "n", "stream", "stream_options", "logprobs", "return_token_ids"}


class RequestError(Exception):
    """A request that cannot be served, in OpenAI's terms."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class CallParams:
    """Sampling settings of one call; None means "the session's, else the default"."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplyForm:
    """How an HTTP caller wants the answer told; changes nothing about the answer."""

    n: int
    stream: bool
    stream_usage: bool
    logprobs: bool
    token_ids: bool


def check_names(body: Mapping[str, Any]) -> None:
    """Refuse what is unknown, and what would have to be ignored although it changes the answer."""
    for name, value in body.items():
        if name in _OFF:
            if value not in _OFF[name]:
                raise RequestError(f"{name} is not supported here; leave it out", name, "unsupported_parameter")
        elif name not in _USED and name not in _IGNORED:
            raise RequestError(f"unknown parameter {name!r}", name, "unknown_parameter")


def plain_messages(messages: Any) -> list[Message]:
    """`messages` as roles with texts: lists of text parts joined, fields without effect dropped."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    plain: list[Message] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] must be an object with a role", "messages")
        if message.get("tool_calls") or message.get("function_call") or message.get("tool_call_id"):
            raise RequestError(f"messages[{i}]: tool calls are not supported here", "messages", "unsupported_parameter")
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
            if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
                raise RequestError(f"messages[{i}].content: only text parts are supported", "messages")
            content = "".join(map(str, texts))
        plain.append({"role": message["role"], "content": _text(content, f"messages[{i}].content", "messages")})
    return plain


def plain_prompt(prompt: Any, vocab_size: int) -> str | list[int]:
    """A text or token ids, as the completions route takes them."""
    if isinstance(prompt, str) and prompt:
        return _text(prompt, "prompt", "prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise RequestError(f"prompt: token ids go from 0 to {vocab_size - 1}", "prompt")
        return prompt
    raise RequestError("prompt must be a text or a list of token ids, not empty", "prompt")


def call_params(given: Mapping[str, Any]) -> CallParams:
    """The sampling settings among `given`, each in its range."""
    stop = given.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple)) else (None,)
    if not all(isinstance(text, str) and text for text in stops) or len(stops) > MAX_STOPS:
        raise RequestError(f"stop must be a text or a list of at most {MAX_STOPS} texts, none empty", "stop")
    longest = _number(given, "max_completion_tokens", int, 1, 2**31)
    return CallParams(
        max_tokens=longest if longest is not None else _number(given, "max_tokens", int, 1, 2**31),
        temperature=_number(given, "temperature", float, 0, 100),
        top_p=_number(given, "top_p", float, 1e-6, 1),
        top_k=_number(given, "top_k", int, 0, 2**31),
        seed=_number(given, "seed", int, -(2**63), 2**63 - 1),
        stop=tuple(map(str, stops)),
    )


def sampling_keywords(given: Mapping[str, Any]) -> CallParams:
    """`call_params` for a Python caller: every keyword must be one of them."""
    for name in given:
        if name not in _SAMPLING:
            raise RequestError(f"unknown keyword {name!r}; allowed are {', '.join(_SAMPLING)} and trajectory", name)
    return call_params(given)


def reply_form(body: Mapping[str, Any], chat: bool) -> ReplyForm:
    """How to tell the answer. Only the sampled token's own log-probability is kept, so no alternatives can be asked for."""
    logprobs = body.get("logprobs")
    if not (logprobs is None or isinstance(logprobs, bool) or (logprobs == 0 and not chat)):
        allowed = "true or false" if chat else "0: alternatives to the sampled token are not kept"
        raise RequestError(f"logprobs must be {allowed}", "logprobs", "unsupported_parameter")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise RequestError("stream_options must be an object", "stream_options")
    return ReplyForm(
        n=_number(body, "n", int, 1, MAX_N) or 1,
        stream=_flag(body, "stream"),
        stream_usage=bool((options or {}).get("include_usage")),
        logprobs=logprobs is True or (logprobs is not None and logprobs is not False),
        token_ids=_flag(body, "return_token_ids"),
    )


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not (value is None or isinstance(value, bool)):
        raise RequestError(f"{name} must be true or false, found {value!r}", name)
    return bool(value)


def _text(value: Any, where: str, param: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} must be text", param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is no valid Unicode: {error.reason} at character {error.start}", param) from error
    return value


def _number(given: Mapping[str, Any], name: str, kind: type, low: float, high: float) -> Any:
    value = given.get(name)
    if value is None:
        return None
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = "number" if kind is float else "whole number"
        raise RequestError(f"{name} must be a {what} from {low:g} to {high:g}, found {value!r}", name)
    return kind(value)
