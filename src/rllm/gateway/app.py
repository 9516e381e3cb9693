"""The OpenAI-compatible routes: chat completions, completions, responses, models, with and without a session in the path.

Knows HTTP; how an answer comes about is `chat.py`'s, how it is told `replies.py`'s and `responses.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rllm.errors import UserError
from rllm.gateway import responses
from rllm.gateway.chat import ChatModel, Prompt
from rllm.gateway.errors import RequestError, error_body
from rllm.gateway.events import CLIENT_GONE, event, event_stream, while_connected
from rllm.gateway.messages import plain_messages, plain_text, plain_tools
from rllm.gateway.recorder import Session
from rllm.gateway.replies import Reply
from rllm.gateway.requests import call_params, check_names, flag, plain_prompt, reply_form, template_settings
from rllm.gateway.scoring import ScoreForm, score_form, with_prompt
from rllm.tools.json_text import strict_json
from rllm.types import new_id

logger = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
MAX_BODY_BYTES = 64 * 2**20
LITTLE_BYTES = 64 * 2**10


class Routes:
    """The handlers. `find_session` gives the open session of a uid, or None; `models` the adapter of each name that is served."""

    def __init__(
        self, model: ChatModel, find_session: Callable[[str], Session | None], models: Mapping[str, str]
    ) -> None:
        self.model, self.find_session, self.models = model, find_session, models

    async def chat(self, request: Request) -> Response:
        session, trajectory = self._session_of(request)
        body, size = await _body(request)
        check_names(body, chat=True)

        def prompt() -> Prompt:
            tools = plain_tools(body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls"))
            settings = template_settings(body.get("chat_template_kwargs"))
            return self.model.chat_prompt(plain_messages(body.get("messages")), session, trajectory, tools, settings)

        return await self._answer(request, body, session, trajectory, await _apart(size, prompt), chat=True)

    async def completions(self, request: Request) -> Response:
        session, trajectory = self._session_of(request)
        body, size = await _body(request)
        check_names(body, chat=False)
        scoring, body = score_form(body)

        def prompt() -> Prompt:
            given = plain_prompt(body.get("prompt"), len(self.model.backend.tokenizer))
            return self.model.text_prompt(given, session, trajectory)

        if scoring is not None:
            given = plain_prompt(body.get("prompt"), len(self.model.backend.tokenizer))
            read = await _apart(size, prompt)
            return await self._scored(request, body, session, trajectory, read, scoring, given)
        return await self._answer(request, body, session, trajectory, await _apart(size, prompt), chat=False)

    async def _scored(
        self,
        request: Request,
        body: dict[str, Any],
        session: Session | None,
        trajectory: str | None,
        prompt: Prompt,
        scoring: ScoreForm,
        given: str | list[int],
    ) -> Response:
        """A completion, or none, with what the model says of the prompt."""
        params, form = call_params(body), reply_form(body, False)
        adapter, name = self._adapter(body, session)
        call, ids = _call_ids("cmpl", form.n)
        named = [(one, adapter, i) for i, one in enumerate(ids)]
        if scoring.generate:
            calls = [self.model.prepare(prompt, params, session, trajectory, *one) for one in named]
            outputs = await while_connected(request, [self.model.answer(one) for one in calls])
        else:
            outputs = [self.model.nothing_sampled(prompt, one, adapter) for one in ids]
        asked = [self.model.score(prompt.ids, adapter)] if scoring.scores else []
        scored = await while_connected(request, asked)
        text = given if isinstance(given, str) else self.model.text_of(given)
        answer = Reply(call, name, form, False, self.model).whole(outputs)
        texts = self.model.token_texts
        return _json(with_prompt(answer, scoring, text, prompt.ids, scored[0] if scored else None, texts))

    async def respond(self, request: Request) -> Response:
        session, trajectory = self._session_of(request)
        body, size = await _body(request)
        responses.check_names(body)
        stream = flag(body, "stream")

        def make() -> Prompt:
            tools, settings = responses.tool_use(body), template_settings(body.get("chat_template_kwargs"))
            return self.model.chat_prompt(responses.as_messages(body), session, trajectory, tools, settings)

        params = call_params(body, "max_output_tokens")
        adapter, name = self._adapter(body, session)
        call = self.model.prepare(await _apart(size, make), params, session, trajectory, f"resp_{new_id()}", adapter)
        reply = responses.ResponseReply.to(body, call.call_id, name, call.apart)
        if stream:
            return await event_stream(request, reply.events(self.model.stream(call)), _error_event)
        [output] = await while_connected(request, [self.model.answer(call)])
        return _json(reply.whole(output))

    async def list_models(self, request: Request) -> Response:
        session, _ = self._session_of(request)
        roles = sorted(session.roles) if session else []
        names = [*self.models, *(f"{next(iter(self.models))}:{role}" for role in roles)]
        models = {name: {"id": name, "object": "model", "created": 0, "owned_by": "rllm"} for name in names}
        wanted = request.path_params.get("model")
        if wanted is None:
            return _json({"object": "list", "data": list(models.values())})
        if wanted not in models:
            raise _no_model(wanted, names)
        return _json(models[wanted])

    async def _answer(
        self,
        request: Request,
        body: dict[str, Any],
        session: Session | None,
        trajectory: str | None,
        prompt: Prompt,
        *,
        chat: bool,
    ) -> Response:
        params, form = call_params(body), reply_form(body, chat)
        adapter, name = self._adapter(body, session)
        call, ids = _call_ids("chatcmpl" if chat else "cmpl", form.n)
        named = [(one, adapter, i) for i, one in enumerate(ids)]
        calls = [self.model.prepare(prompt, params, session, trajectory, *one) for one in named]
        reply = Reply(call, name, form, chat, self.model, calls[0].apart)
        if form.stream:
            events = reply.events([self.model.stream(one) for one in calls])
            return await event_stream(request, events, _error_event)
        return _json(reply.whole(await while_connected(request, [self.model.answer(one) for one in calls])))

    def _session_of(self, request: Request) -> tuple[Session | None, str | None]:
        uid = request.path_params.get("session")
        if uid is None:
            return None, None
        session = self.find_session(uid)
        if session is None:
            raise RequestError(f"no open session {uid!r}; its episode has ended", code="session_not_found", status=404)
        return session, request.path_params.get("trajectory") or request.headers.get("x-rllm-trajectory")

    def _adapter(self, body: dict[str, Any], session: Session | None) -> tuple[str, str]:
        """(adapter, name) of the model that is asked for. Inside a session any model name will do, as agents bring their own;
        ``role`` and ``model:role`` mean the adapter of that role."""
        first = next(iter(self.models))
        given = body.get("model")
        name = plain_text(given, "model", "model") if given is not None else ""
        if session is None:
            if (name or first) not in self.models:
                raise _no_model(name, self.models)
            return self.models[name or first], name or first
        role = name.removeprefix(f"{first}:")
        try:
            return session.adapter_of(role if role in session.roles else None), name or first
        except LookupError as error:
            raise RequestError(str(error.args[0]), "model", "model_not_found", 404) from error


def _no_model(name: str, served: Iterable[str]) -> RequestError:
    return RequestError(
        f"the model {name!r} does not exist; served are {', '.join(served)}", "model", "model_not_found", 404
    )


def create_app(model: ChatModel, find_session: Callable[[str], Session | None], models: Mapping[str, str]) -> FastAPI:
    """The ASGI app; see `Routes`."""
    app = FastAPI(title="rllm gateway", docs_url=None, redoc_url=None, openapi_url=None)
    routes = Routes(model, find_session, models)

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    for prefix in ("/v1", "/s/{session}/v1", "/s/{session}/t/{trajectory}/v1"):
        app.add_route(f"{prefix}/chat/completions", _answering(routes.chat), methods=["POST"])
        app.add_route(f"{prefix}/completions", _answering(routes.completions), methods=["POST"])
        app.add_route(f"{prefix}/responses", _answering(routes.respond), methods=["POST"])
        for path in ("/models", "/models/{model:path}"):
            app.add_route(prefix + path, _answering(routes.list_models), methods=["GET"])
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
            _log(error)
            return _error(f"{type(error).__name__}: {error}", 500, kind="server_error")

    return answer


def _error(
    message: str, status: int, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> Response:
    # A call that ran out of time is not tried again by the client: OpenAI's would do so for any 5xx.
    headers = {"x-should-retry": "false"} if status == 504 else None
    return _json(error_body(message, kind, param, code), status, headers)


def _error_event(error: Exception) -> str:
    """How a stream tells that it will not come to its end."""
    _log(error)
    message = f"{type(error).__name__}: {error}"
    return event(error_body(message, "server_error"), "error")


def _log(error: Exception) -> None:
    text = f"the model failed to answer: {type(error).__name__}: {error}"
    # A reason that is the same for every call, such as a server that is gone, is said once.
    _log_once(text) if isinstance(error, UserError) else logger.error("%s", text)


@lru_cache(maxsize=64)
def _log_once(text: str) -> None:
    logger.error("%s", text)


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII: whatever a message quotes can be sent.
    return Response(json.dumps(data), status, headers, media_type="application/json")


async def _apart(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread if it has to do with more than a little: nobody else's call shall wait for it."""
    return await asyncio.to_thread(work) if size > LITTLE_BYTES else work()


async def _body(request: Request) -> tuple[dict[str, Any], int]:
    """The JSON object of a request, and its size in bytes."""
    told = request.headers.get("content-length", "")
    size = int(told) if told.isdecimal() else 0
    parts: list[bytes] = []
    if size <= MAX_BODY_BYTES:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                break
            parts.append(part)
    if size > MAX_BODY_BYTES:
        raise RequestError(f"the body has {size} bytes or more; at most {MAX_BODY_BYTES} are read", status=413)
    raw = b"".join(parts)
    try:
        body = await _apart(size, lambda: strict_json(raw))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body, size


def _call_ids(kind: str, n: int) -> tuple[str, list[str]]:
    """(id of the response, ids its calls are recorded under): the same one where n is 1."""
    call = f"{kind}-{new_id()}"
    return call, [call] if n == 1 else [f"{call}-{i}" for i in range(n)]
