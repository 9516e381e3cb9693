"""The OpenAI-compatible routes: chat completions, completions, models, with and without a session in the path.

Knows HTTP and OpenAI's shapes; how an answer comes about is `chat.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rllm.gateway.chat import ChatModel
from rllm.gateway.recorder import Session
from rllm.gateway.requests import (
    ReplyForm,
    RequestError,
    call_params,
    check_names,
    plain_messages,
    plain_prompt,
    reply_form,
)
from rllm.types import ModelOutput, new_id

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]
# What nginx answers for a caller that hung up; nobody reads it.
CLIENT_GONE = 499


def create_app(model: ChatModel, find_session: Callable[[str], Session | None], models: Mapping[str, str]) -> FastAPI:
    """The ASGI app. `find_session` gives the open session of a uid, or None; `models` the adapter of each name that is served."""
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
        messages, params, form = plain_messages(body.get("messages")), call_params(body), reply_form(body, chat=True)
        adapter = _adapter(body, session, models)
        call, names = _call_ids("chatcmpl", form.n)
        outputs = await _while_connected(
            request, [model.chat(messages, params, session, trajectory, name, adapter) for name in names]
        )
        return _reply(body, form, call, outputs, model, chat=True)

    async def completions(request: Request) -> Response:
        session, trajectory = session_of(request)
        body = await _body(request)
        prompt = plain_prompt(body.get("prompt"), len(model.backend.tokenizer))
        ids = model.tokenize(prompt) if isinstance(prompt, str) else prompt
        params, form = call_params(body), reply_form(body, chat=False)
        adapter = _adapter(body, session, models)
        call, names = _call_ids("cmpl", form.n)
        outputs = await _while_connected(
            request, [model.complete(list(ids), params, session, trajectory, name, adapter) for name in names]
        )
        return _reply(body, form, call, outputs, model, chat=False)

    async def list_models(request: Request) -> Response:
        session, _ = session_of(request)
        roles = sorted(session.roles) if session else []
        names = [*models, *(f"{next(iter(models))}:{role}" for role in roles)]
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "rllm"} for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    for prefix in ("/v1", "/s/{session}/v1", "/s/{session}/t/{trajectory}/v1"):
        app.add_route(f"{prefix}/chat/completions", _answering(chat), methods=["POST"])
        app.add_route(f"{prefix}/completions", _answering(completions), methods=["POST"])
        app.add_route(f"{prefix}/models", _answering(list_models), methods=["GET"])
    app.add_route("/healthz", health, methods=["GET"])

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        return _error(f"{error.detail}: {request.method} {request.url.path}", error.status_code, code="not_found")

    return app


def _answering(handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """`handler` with every failure told in OpenAI's error shape."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            return _error(str(error), error.status, error.param, error.code)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except asyncio.CancelledError:  # only the end of the server cancels a call
            return _error("the gateway is stopping", 503, kind="server_error")
        except Exception as error:
            logger.error("the model failed to answer: %s: %s", type(error).__name__, error)
            return _error(f"{type(error).__name__}: {error}", 500, kind="server_error")

    return answer


async def _while_connected(request: Request, calls: list[Coroutine[Any, Any, ModelOutput]]) -> list[ModelOutput]:
    """The results of `calls`, which are cancelled as soon as the caller hangs up: nobody waits for those tokens."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    answered = asyncio.gather(*tasks, return_exceptions=True)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((answered, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise ClientDisconnect
        outputs: list[ModelOutput] = []
        for result in answered.result():
            if isinstance(result, BaseException):
                raise result
            outputs.append(result)
        return outputs
    finally:
        for task in (*tasks, gone):
            task.cancel()


def _error(
    message: str, status: int, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> JSONResponse:
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    # A call that ran out of time is not tried again by the client: OpenAI's would do so for any 5xx.
    return JSONResponse(body, status_code=status, headers={"x-should-retry": "false"} if status == 504 else None)


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    check_names(body)
    return body


def _call_ids(kind: str, n: int) -> tuple[str, list[str]]:
    """(id of the response, ids its calls are recorded under): the same one where n is 1."""
    call = f"{kind}-{new_id()}"
    return call, [call] if n == 1 else [f"{call}-{i}" for i in range(n)]


def _adapter(body: dict[str, Any], session: Session | None, models: Mapping[str, str]) -> str:
    """The adapter of the model that is asked for. Inside a session any model name will do, as agents bring their own; ``role`` and
    ``model:role`` mean the adapter of that role."""
    name = body.get("model") or next(iter(models))
    if session is None:
        if name not in models:
            raise RequestError(
                f"the model {name!r} does not exist; served are {', '.join(models)}", "model", "model_not_found", 404
            )
        return models[name]
    role = str(name).removeprefix(f"{next(iter(models))}:")
    try:
        return session.adapter_of(role if role in session.roles else None)
    except LookupError as error:
        raise RequestError(str(error.args[0]), "model", "model_not_found", 404) from error


def _reply(
    body: dict[str, Any], form: ReplyForm, call: str, outputs: list[ModelOutput], model: ChatModel, *, chat: bool
) -> Response:
    """One JSON answer, or the same as server-sent events."""
    choices = []
    for i, output in enumerate(outputs):
        choice: dict[str, Any] = {"index": i, "finish_reason": output.finish_reason, "logprobs": None}
        if chat:
            choice["message"] = {"role": "assistant", "content": output.content, "refusal": None}
        else:
            choice["text"] = output.content
        if form.logprobs:
            choice["logprobs"] = _logprobs(output, model, chat)
        if form.token_ids:
            choice |= {"prompt_token_ids": output.prompt_ids, "token_ids": output.completion_ids}
        choices.append(choice)
    prompt, sampled = outputs[0].prompt_length, sum(output.completion_length for output in outputs)
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    kind = "chat.completion" if chat else "text_completion"
    head = {"id": call, "created": int(time.time()), "model": body.get("model") or model.backend.model_name}
    if not form.stream:
        return JSONResponse(head | {"object": kind, "choices": choices, "usage": usage})
    frame = head | {"object": f"{kind}.chunk" if chat else kind}
    return StreamingResponse(
        _events(frame, choices, usage if form.stream_usage else None), media_type="text/event-stream"
    )


def _logprobs(output: ModelOutput, model: ChatModel, chat: bool) -> dict[str, Any]:
    texts = model.token_texts(output.completion_ids)
    if not chat:
        return {"tokens": texts, "token_logprobs": output.logprobs, "top_logprobs": None, "text_offset": None}
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, output.logprobs, strict=True)
        ]
    }


async def _events(
    frame: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, int] | None
) -> AsyncIterator[str]:
    """Two events a choice: all of its text, then why it ended."""
    for choice in choices:
        text: dict[str, Any] = {**choice, "finish_reason": None}
        end: dict[str, Any] = {"index": choice["index"], "finish_reason": choice["finish_reason"], "logprobs": None}
        if "message" in text:
            text["delta"], end["delta"] = text.pop("message"), {}
        else:
            end["text"] = ""
        for part in (text, end):
            yield f"data: {json.dumps(frame | {'choices': [part]})}\n\n"
    if usage is not None:
        yield f"data: {json.dumps(frame | {'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"
