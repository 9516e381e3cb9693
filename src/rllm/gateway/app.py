"""The OpenAI-compatible routes: chat completions, completions, models, with and without a session in the path.

Knows HTTP and OpenAI's shapes; how an answer comes about is `chat.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from rllm.backends.base import BASE, DEFAULT_ADAPTER
from rllm.gateway.chat import CallParams, ChatModel, RequestError
from rllm.gateway.recorder import Session
from rllm.types import Message, ModelOutput, new_id

logger = logging.getLogger(__name__)
MAX_N = 128
# What a request may name although nothing here depends on it.
_IGNORED = {"user", "metadata", "store", "stream_options", "service_tier", "parallel_tool_calls", "safety_identifier"}
# Settings that would change the answer and are not built: name -> the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
}
_USED = {
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "n",
    "stream",
    "logprobs",
    "return_token_ids",
}


def create_app(model: ChatModel, find_session: Callable[[str], Session | None], model_names: list[str]) -> FastAPI:
    """The ASGI app. `find_session` gives the open session of a uid, or None."""
    app = FastAPI(title="rllm gateway", docs_url=None, redoc_url=None, openapi_url=None)

    def session_of(request: Request) -> tuple[Session | None, str | None]:
        uid = request.path_params.get("session")
        if uid is None:
            return None, None
        session = find_session(uid)
        if session is None:
            raise RequestError(f"no open session {uid!r}; its episode has ended", code="session_not_found", status=404)
        return session, request.path_params.get("trajectory") or request.headers.get("x-rllm-trajectory")

    async def chat(request: Request) -> Response:
        session, trajectory = session_of(request)
        body = await _body(request)
        messages = _messages(body)
        params, n = _params(body), _number(body, "n", int, 1, MAX_N) or 1
        adapter = _adapter(body, session, model_names)
        call = f"chatcmpl-{new_id()}"
        names = [call] if n == 1 else [f"{call}-{i}" for i in range(n)]
        outputs = await asyncio.gather(
            *(model.chat(messages, params, session, trajectory, name, adapter) for name in names)
        )
        return _reply(body, call, outputs, "chat.completion", _chat_choice, model)

    async def completions(request: Request) -> Response:
        session, trajectory = session_of(request)
        body = await _body(request)
        prompt_ids = _prompt(body, model)
        params, n = _params(body), _number(body, "n", int, 1, MAX_N) or 1
        adapter = _adapter(body, session, model_names)
        call = f"cmpl-{new_id()}"
        names = [call] if n == 1 else [f"{call}-{i}" for i in range(n)]
        outputs = await asyncio.gather(
            *(model.complete(list(prompt_ids), params, session, trajectory, name, adapter) for name in names)
        )
        return _reply(body, call, outputs, "text_completion", _text_choice, model)

    async def models(request: Request) -> Response:
        session_of(request)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "rllm"} for name in model_names]
        return JSONResponse({"object": "list", "data": data})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    for prefix in ("/v1", "/s/{session}/v1", "/s/{session}/t/{trajectory}/v1"):
        app.add_route(f"{prefix}/chat/completions", chat, methods=["POST"])
        app.add_route(f"{prefix}/completions", completions, methods=["POST"])
        app.add_route(f"{prefix}/models", models, methods=["GET"])
    app.add_route("/healthz", health, methods=["GET"])

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return _error(str(error), error.status, error.param, error.code)

    @app.exception_handler(404)
    async def not_found(request: Request, _: Exception) -> Response:
        return _error(f"no route {request.method} {request.url.path}", 404, code="not_found")

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        logger.error("the model failed to answer: %s: %s", type(error).__name__, error)
        return _error(f"{type(error).__name__}: {error}", 500, kind="server_error")

    return app


def _error(
    message: str, status: int, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status_code=status)


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    for name, off in _OFF.items():
        if name in body and body[name] not in off:
            raise RequestError(f"{name} is not supported here; leave it out", name, "unsupported_parameter")
    unknown = [name for name in body if name not in _USED and name not in _OFF and name not in _IGNORED]
    if unknown:
        raise RequestError(f"unknown parameter {unknown[0]!r}", unknown[0], "unknown_parameter")
    return body


def _messages(body: dict[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    plain: list[Message] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] must be an object with a role", "messages")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
            if len(parts) != len(content) or not all(isinstance(part.get("text"), str) for part in parts):
                raise RequestError(f"messages[{i}].content: only text parts are supported", "messages")
            content = "".join(part["text"] for part in parts)
        if not isinstance(content, str):
            raise RequestError(f"messages[{i}].content must be text", "messages")
        plain.append({"role": message["role"], "content": content})
    return plain


def _prompt(body: dict[str, Any], model: ChatModel) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return model.backend.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise RequestError("prompt must be a text or a list of token ids, not empty", "prompt")


def _number(body: dict[str, Any], name: str, kind: type, low: float, high: float) -> Any:
    value = body.get(name)
    if value is None:
        return None
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = "number" if kind is float else "whole number"
        raise RequestError(f"{name} must be a {what} from {low:g} to {high:g}, found {value!r}", name)
    return kind(value)


def _params(body: dict[str, Any]) -> CallParams:
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple)) else None
    if stops is None or not all(isinstance(s, str) and s for s in stops) or len(stops) > 16:
        raise RequestError("stop must be a text or a list of at most 16 texts, none empty", "stop")
    longest = _number(body, "max_completion_tokens", int, 1, 2**31)
    return CallParams(
        max_tokens=longest if longest is not None else _number(body, "max_tokens", int, 1, 2**31),
        temperature=_number(body, "temperature", float, 0, 100),
        top_p=_number(body, "top_p", float, 1e-6, 1),
        top_k=_number(body, "top_k", int, 0, 2**31),
        seed=_number(body, "seed", int, -(2**63), 2**63 - 1),
        stop=stops,
    )


def _adapter(body: dict[str, Any], session: Session | None, names: list[str]) -> str | None:
    """A session decides the adapter; elsewhere the model name does: the base by its own name, the adapter by the other."""
    if session is not None:
        return None
    name = body.get("model")
    if name is None or name == names[0]:
        return DEFAULT_ADAPTER
    if name not in names:
        raise RequestError(
            f"the model {name!r} does not exist; served are {', '.join(names)}", "model", "model_not_found", 404
        )
    return BASE


def _chat_choice(output: ModelOutput, model: ChatModel) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": output.content, "refusal": None}}


def _text_choice(output: ModelOutput, model: ChatModel) -> dict[str, Any]:
    return {"text": output.text}


def _logprobs(output: ModelOutput, model: ChatModel, chat: bool) -> dict[str, Any]:
    texts = [model.backend.tokenizer.decode([token]) for token in output.completion_ids]
    if not chat:
        return {"tokens": texts, "token_logprobs": output.logprobs}
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, output.logprobs, strict=True)
        ]
    }


def _reply(
    body: dict[str, Any], call: str, outputs: Sequence[ModelOutput], kind: str, choice_of: Callable[..., Any], model: ChatModel
) -> Response:
    """One JSON answer, or the same as server-sent events."""
    choices = []
    for i, output in enumerate(outputs):
        choice = {"index": i, "finish_reason": output.finish_reason, "logprobs": None} | choice_of(output, model)
        if body.get("logprobs"):
            choice["logprobs"] = _logprobs(output, model, kind == "chat.completion")
        if body.get("return_token_ids"):
            choice |= {"prompt_token_ids": output.prompt_ids, "token_ids": output.completion_ids}
        choices.append(choice)
    prompt, sampled = outputs[0].prompt_length, sum(output.completion_length for output in outputs)
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    head = {"id": call, "created": int(time.time()), "model": body.get("model") or model.backend.model_name}
    if not body.get("stream"):
        return JSONResponse(head | {"object": kind, "choices": choices, "usage": usage})
    return StreamingResponse(_events(head, kind, choices, usage, body), media_type="text/event-stream")


async def _events(
    head: dict[str, Any], kind: str, choices: list[dict[str, Any]], usage: dict[str, int], body: dict[str, Any]
) -> AsyncIterator[str]:
    is_chat = kind == "chat.completion"
    frame = head | {"object": f"{kind}.chunk" if is_chat else kind}
    for choice in choices:
        final = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": None}
        chunk = {**choice, "finish_reason": None}
        if is_chat:
            message = chunk.pop("message")
            chunk["delta"] = {"role": "assistant", "content": message["content"]}
            final["delta"] = {}
        else:
            final["text"] = ""
        for part in (chunk, final):
            yield f"data: {json.dumps(frame | {'choices': [part]})}\n\n"
    if (body.get("stream_options") or {}).get("include_usage"):
        yield f"data: {json.dumps(frame | {'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"
