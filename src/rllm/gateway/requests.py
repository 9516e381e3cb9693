"""What a caller asks for, checked: messages, prompt, sampling settings. HTTP bodies and workflow keywords go through here.

Knows OpenAI's request words; nothing of routes, models or tokens.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllm.config.names import TEMPLATE_RESERVED
from rllm.config.schema import MIN_TEMPERATURE
from rllm.gateway.errors import RequestError
from rllm.gateway.messages import plain_text

MAX_N = 128
MAX_STOPS = 16
# What a request may name although nothing here depends on it.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Settings that would change the answer and cannot be honoured: name -> the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
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
    "reasoning_effort": (None,),
    "prediction": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_SAMPLING = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop")
_BOTH = {*_SAMPLING, "model", "n", "stream", "stream_options", "logprobs", "return_token_ids"}
_CHAT = {
    *_BOTH,
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "separate_reasoning",
}
_COMPLETIONS = {*_BOTH, "prompt", "echo", "prompt_logprobs"}
# Why a setting is refused, where the reason is not that nothing here does it.
_WHY = {
    "response_format": "decoding held to a format would sample from another distribution than the log-probabilities tell; ask for "
    "the format in the prompt and check the answer",
}


@dataclass(frozen=True)
class CallParams:
    """Sampling settings of one call; None means "the session's, else the default". `separate_reasoning` changes only how it is told."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    separate_reasoning: bool | None = None


@dataclass(frozen=True)
class ReplyForm:
    """How an HTTP caller wants the answer told; changes nothing about the answer."""

    n: int
    stream: bool
    stream_usage: bool
    logprobs: bool
    token_ids: bool


def check_names(body: Mapping[str, Any], chat: bool) -> None:
    """Refuse what is unknown, and what would have to be ignored although it changes the answer."""
    known = _CHAT if chat else _COMPLETIONS
    for name, value in body.items():
        if name in _OFF and name not in known:
            if value not in _OFF[name]:
                why = _WHY.get(name, "leave it out")
                raise RequestError(f"{name} is not supported here: {why}", name, "unsupported_parameter")
        elif name not in known and name not in _IGNORED:
            raise RequestError(f"unknown parameter {name!r}", name, "unknown_parameter")


def template_settings(given: Any) -> dict[str, Any]:
    """Settings for the chat template itself, such as Qwen3's ``enable_thinking``."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name, value in given.items():
        if not name.isidentifier() or name in TEMPLATE_RESERVED or not isinstance(value, (bool, int, float, str)):
            raise RequestError(
                f"chat_template_kwargs.{name}: allowed are flags, numbers and texts under names of the template's own",
                "chat_template_kwargs",
            )
        if isinstance(value, str):
            plain_text(value, f"chat_template_kwargs.{name}", "chat_template_kwargs")
    return dict(given)


def plain_prompt(prompt: Any, vocab_size: int) -> str | list[int]:
    """A text or token ids, as the completions route takes them."""
    if isinstance(prompt, str) and prompt:
        return plain_text(prompt, "prompt", "prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise RequestError(f"prompt: token ids go from 0 to {vocab_size - 1}", "prompt")
        return prompt
    raise RequestError("prompt must be a text or a list of token ids, not empty", "prompt")


def call_params(given: Mapping[str, Any], length: str = "max_tokens") -> CallParams:
    """The sampling settings among `given`, each in its range. `length`: what the most sampled tokens are called there."""
    stop = given.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple)) else (None,)
    if not all(isinstance(text, str) and text for text in stops) or len(stops) > MAX_STOPS:
        raise RequestError(f"stop must be a text or a list of at most {MAX_STOPS} texts, none empty", "stop")
    for text in stops:
        plain_text(text, "stop", "stop")
    longest = _number(given, "max_completion_tokens", int, 1, 2**31)
    temperature = _number(given, "temperature", float, 0, 100)
    if temperature is not None and 0 < temperature < MIN_TEMPERATURE:
        raise RequestError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}", "temperature")
    return CallParams(
        max_tokens=longest if longest is not None else _number(given, length, int, 1, 2**31),
        temperature=temperature,
        top_p=_number(given, "top_p", float, 1e-6, 1),
        top_k=_number(given, "top_k", int, 0, 2**31),
        seed=_number(given, "seed", int, -(2**63), 2**63 - 1),
        stop=tuple(map(str, stops)),
        separate_reasoning=None if given.get("separate_reasoning") is None else flag(given, "separate_reasoning"),
    )


def sampling_keywords(given: Mapping[str, Any]) -> CallParams:
    """`call_params` for a Python caller: every keyword must be one of them."""
    allowed = (*_SAMPLING, "separate_reasoning")
    for name in given:
        if name not in allowed:
            raise RequestError(f"unknown keyword {name!r}; allowed are {', '.join(allowed)} and trajectory", name)
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
        stream=flag(body, "stream"),
        stream_usage=bool((options or {}).get("include_usage")),
        logprobs=logprobs is True or (logprobs is not None and logprobs is not False),
        token_ids=flag(body, "return_token_ids"),
    )


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A setting that is true or false; false where it is not given."""
    value = body.get(name)
    if not (value is None or isinstance(value, bool)):
        raise RequestError(f"{name} must be true or false, found {reprlib.repr(value)}", name)
    return bool(value)


def _number(given: Mapping[str, Any], name: str, kind: type, low: float, high: float) -> Any:
    value = given.get(name)
    if value is None:
        return None
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = "number" if kind is float else "whole number"
        raise RequestError(f"{name} must be a {what} from {low:g} to {high:g}, found {reprlib.repr(value)}", name)
    return kind(value)
