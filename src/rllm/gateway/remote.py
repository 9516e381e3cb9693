"""A gateway to somebody else's OpenAI endpoint: calls are passed on as they are, and recorded by session without token ids.

Knows HTTP; how answers are read is `remote_record.py`'s. Nothing of backends. For evaluation only: what has no token ids cannot be trained.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from rllm.gateway.endpoint import ATTEMPTS, TRANSIENT, key_header, served_model, wait_of
from rllm.gateway.errors import CALL_TIMEOUT, error_body
from rllm.gateway.events import CLIENT_GONE
from rllm.gateway.recorder import Session
from rllm.gateway.remote_record import Record
from rllm.gateway.thread import AppThread
from rllm.tools.json_text import strict_json
from rllm.types import AgentConfig, Message, ModelOutput, TerminationEvent, TerminationReason

# Of an answer that is none, an error message quotes this much.
SHOWN_CHARACTERS = 300


class RemoteGateway(AppThread):
    """Serves sessions like `Gateway` does, from the endpoint at `base_url` (up to and with ``/v1``). The flow never sees the API key."""

    roles: tuple[str, ...] = ()
    token_limits = None

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        call_timeout_s: float | None = None,
        template: Mapping[str, Any] | None = None,
    ):
        """`model` None: the first that the endpoint lists. `template`: sent as ``chat_template_kwargs`` with chats that have none. An endpoint that does not answer or refuses the key is a `UserError`."""
        super().__init__("127.0.0.1", 0)
        self.base_url, self.call_timeout_s = base_url.rstrip("/"), call_timeout_s
        self.template = dict(template or {})
        self._headers = key_header(api_key)
        self.model_name = served_model(self.base_url, self._headers, model)
        self._sessions: dict[str, Session] = {}
        self._client: httpx.AsyncClient | None = None

    def open_session(
        self,
        uid: str,
        *,
        seed: int = 0,
        is_validation: bool = True,
        sampling: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> Session:
        """Begin recording under `uid`. `sampling` goes with every call that does not say otherwise."""
        if not is_validation:
            raise ValueError("an endpoint without token ids can be evaluated, not trained")
        session = Session(uid, seed, True, dict(sampling or {}), adapter)
        self._sessions[uid] = session
        return session

    def take_counts(self) -> dict[str, float]:
        """Nothing: a foreign endpoint tells no tokens, so there are no segments to count."""
        return {}

    def close_session(self, session: Session) -> None:
        self._sessions.pop(session.uid, None)

    def agent_config(self, session: Session, metadata: Mapping[str, Any] | None = None) -> AgentConfig:
        return AgentConfig(
            base_url=f"{self.url}/s/{session.uid}/v1",
            model=self.model_name,
            session_uid=session.uid,
            metadata=dict(metadata or {}),
            is_validation=True,
            sampling_params=dict(session.sampling),
        )

    def engine(self, session: Session) -> RemoteEngine:
        """The model as a workflow sees it."""
        return RemoteEngine(self.agent_config(session), session)

    def make_app(self) -> FastAPI:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(self.call_timeout_s, connect=30.0),
            limits=httpx.Limits(max_connections=None),
            headers=self._headers | {"accept-encoding": "identity"},
        )
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        for prefix in ("/s/{session}/v1", "/s/{session}/t/{trajectory}/v1"):
            app.add_route(prefix + "/{path:path}", self._pass_on, methods=["GET", "POST"])
        return app

    async def _pass_on(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["session"])
        if session is None:
            return _error(404, f"no open session {request.path_params['session']!r}; its episode has ended")
        try:
            raw = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        try:
            body = strict_json(raw) if raw else None
        except (ValueError, RecursionError) as error:
            return _error(400, f"the body is not valid JSON: {error}")
        record = None
        if isinstance(body, dict):
            trajectory = request.path_params.get("trajectory") or request.headers.get("x-rllm-trajectory")
            record = Record(session, trajectory, body)
            self._complete(body, session)
            raw = json.dumps(body).encode()  # ASCII: whatever a client sent can be sent on
        asked = _Asked(request.method, self._url_of(request), raw)
        sending = asyncio.ensure_future(self._answer(asked, record))
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            return sending.result() if sending.done() else Response(status_code=CLIENT_GONE)
        except (httpx.TimeoutException, TimeoutError) as error:
            if self.call_timeout_s is None:
                return _error(504, f"{self.base_url} does not answer: {type(error).__name__}")
            return _error(504, f"no answer within {self.call_timeout_s:g} s (rollout.call_timeout_s)", CALL_TIMEOUT)
        except httpx.HTTPError as error:
            return _error(502, f"{self.base_url} does not answer: {type(error).__name__}: {error}")
        finally:
            gone.cancel()
            sending.cancel()

    def _url_of(self, request: Request) -> str:
        query = f"?{request.url.query}" if request.url.query else ""
        return f"{self.base_url}/{quote(request.path_params['path'], safe='/:@')}{query}"

    async def _answer(self, asked: _Asked, record: Record | None) -> Response:
        """The endpoint's answer, recorded; the limit counts to its end, for a stream to its beginning and between its parts."""
        async with asyncio.timeout(self.call_timeout_s):
            answer = await self._send(asked)
            kind = answer.headers.get("content-type", "application/json")
            if kind.startswith("text/event-stream"):
                return StreamingResponse(_streamed(answer, record), answer.status_code, media_type=kind)
            try:
                content = await answer.aread()
            finally:
                await answer.aclose()
        if record is not None and answer.status_code == 200:
            record.take(content)
        return Response(content, answer.status_code, media_type=kind)

    def _complete(self, body: dict[str, Any], session: Session) -> None:
        """The session's settings where the call has none, and the endpoint's name of the model."""
        body["model"] = body.get("model") or self.model_name
        if self.template and "messages" in body and body.get("chat_template_kwargs") is None:
            body["chat_template_kwargs"] = self.template
        for name, value in session.sampling.items():
            if "input" in body and name == "max_tokens":  # the Responses API has a name of its own for it
                name = "max_output_tokens"
            is_length = name == "max_tokens" and body.get("max_completion_tokens") is not None
            is_off = name == "top_p" and value == 1.0
            if value is not None and body.get(name) is None and not is_length and not is_off:
                body[name] = value

    async def _send(self, asked: _Asked) -> httpx.Response:
        """The endpoint's answer, its body still to be read. What may pass by itself is tried again, after as long as it asks for."""
        assert self._client is not None
        kind = {"content-type": "application/json"} if asked.body else {}
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            wait = wait_of(attempt, None)
            try:
                request = self._client.build_request(asked.method, asked.url, content=asked.body or None, headers=kind)
                answer = await self._client.send(request, stream=True)
                if answer.status_code not in TRANSIENT or last or answer.headers.get("x-should-retry") == "false":
                    return answer
                wait = wait_of(attempt, answer)
                await answer.aclose()
            except httpx.ConnectError:
                if last:
                    raise
            await asyncio.sleep(wait)
        raise AssertionError("not reached")


class RemoteEngine:
    """The model as a workflow sees it: its calls go through the same record."""

    def __init__(self, config: AgentConfig, session: Session):
        self._config, self.session = config, session

    async def get_model_response(self, messages: list[Message], **sampling: Any) -> ModelOutput:
        """One answer. Keywords: trajectory (a uid the call belongs to), role (without effect: there are no adapters), and whatever
        the endpoint takes beside the messages."""
        trajectory = sampling.pop("trajectory", None)
        sampling.pop("role", None)
        url = self._config.url_for(trajectory) if trajectory else self._config.base_url
        body = json.dumps({"messages": messages} | sampling).encode()
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(f"{url}/chat/completions", content=body)
        try:
            data = answer.json()
        except ValueError:
            data = None
        if answer.status_code != 200:
            error = data.get("error") if isinstance(data, dict) else None
            told = error if isinstance(error, dict) else {}
            if told.get("code") == "context_length_exceeded":
                raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
            said = told.get("message") or answer.text[:SHOWN_CHARACTERS]
            raise RuntimeError(f"the endpoint answered with status {answer.status_code}: {said}")
        call = self.session.recorded().get(str(data.get("id"))) if isinstance(data, dict) else None
        if call is None:
            raise RuntimeError(f"the endpoint's answer is no chat completion: {answer.text[:SHOWN_CHARACTERS]}")
        return call.output


@dataclass(frozen=True)
class _Asked:
    """What is sent to the endpoint."""

    method: str
    url: str
    body: bytes


async def _streamed(answer: httpx.Response, record: Record | None) -> AsyncIterator[bytes]:
    """The endpoint's events as they come; recorded at their end."""
    text = b""
    try:
        async for part in answer.aiter_raw():
            text += part
            yield part
    finally:
        await answer.aclose()
        if record is not None and answer.status_code == 200:
            record.take_events(text)


def _error(status: int, message: str, code: str | None = None) -> JSONResponse:
    body = error_body(message, "server_error", None, code)
    return JSONResponse(body, status_code=status, headers={"x-should-retry": "false"})
