"""A gateway to somebody else's OpenAI endpoint: calls are passed on as they are, and recorded by session without token ids.

Knows HTTP and OpenAI's shapes; nothing of backends. For evaluation only: what has no token ids cannot be trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from rllm.gateway import responses
from rllm.gateway.endpoint import ATTEMPTS, TRANSIENT, key_header, served_model, wait_of
from rllm.gateway.errors import RequestError
from rllm.gateway.messages import tool_call
from rllm.gateway.recorder import Call, Session
from rllm.gateway.thread import AppThread
from rllm.types import AgentConfig, Message, ModelOutput, TerminationEvent, TerminationReason, new_id


class RemoteGateway(AppThread):
    """Serves sessions like `Gateway` does, from the endpoint at `base_url` (up to and with ``/v1``). The flow never sees the API key."""

    roles: tuple[str, ...] = ()

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
        path, raw = request.path_params["path"], await request.body()
        try:
            body = json.loads(raw) if raw else None
        except (ValueError, RecursionError) as error:
            return _error(400, f"the body is not valid JSON: {error}")
        trajectory = request.path_params.get("trajectory") or request.headers.get("x-rllm-trajectory")
        record = _Record(session, trajectory, body) if isinstance(body, dict) else None
        if record is not None:
            self._complete(record.body, session)
        sending = asyncio.ensure_future(self._send(request.method, path, record.body if record else None))
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                return Response(status_code=499)  # the caller hung up
            answer = sending.result()
        except httpx.TimeoutException:
            return _error(504, f"no answer within {self.call_timeout_s:g} s (rollout.call_timeout_s)")
        except httpx.HTTPError as error:
            return _error(502, f"{self.base_url} does not answer: {type(error).__name__}: {error}")
        finally:
            gone.cancel()
            sending.cancel()
        kind = answer.headers.get("content-type", "application/json")
        if kind.startswith("text/event-stream"):
            return StreamingResponse(_streamed(answer, record), answer.status_code, media_type=kind)
        content = await answer.aread()
        if record is not None and answer.status_code == 200:
            with contextlib.suppress(ValueError):
                record.take(json.loads(content))
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

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """The endpoint's answer, its body still to be read. What may pass by itself is tried again, after as long as it asks for."""
        assert self._client is not None
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            wait = wait_of(attempt, None)
            try:
                request = self._client.build_request(method, f"{self.base_url}/{path}", json=body)
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
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(f"{url}/chat/completions", json={"messages": messages} | sampling)
        data = answer.json()
        if answer.status_code != 200:
            error = data.get("error") or {}
            if error.get("code") == "context_length_exceeded":
                raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED)
            raise RuntimeError(
                f"the endpoint answered with status {answer.status_code}: {error.get('message') or data}"
            )
        return self.session.recorded()[str(data["id"])].output


@dataclass
class _Record:
    """One call on its way: what was asked, and what came back so far."""

    session: Session
    trajectory: str | None
    body: dict[str, Any]
    order: int = field(init=False)

    def __post_init__(self) -> None:
        self.order = self.session.next_order()

    def take(self, data: Any) -> None:
        """Record the choices of a whole answer. What is no chat, text completion or response is none of ours."""
        if not isinstance(data, dict):
            return
        if data.get("object") == "response":
            self._take_response(data)
            return
        choices: list[Any] = data.get("choices") or []
        for i, choice in enumerate(choices):
            message = choice.get("message") or {}
            call = str(data.get("id") or new_id())
            self._record(
                call if len(choices) == 1 else f"{call}-{i}",
                str(message.get("content") or choice.get("text") or ""),
                str(choice.get("finish_reason") or "stop"),
                str(message.get("reasoning_content") or ""),
                message.get("tool_calls") or [],
            )

    def take_events(self, events: list[Any]) -> None:
        """Record a streamed answer from its events, as far as it came."""
        told: dict[int, _Told] = {}
        call = ""
        for event in events:
            if event.get("type") in ("response.completed", "response.incomplete"):
                self._take_response(event.get("response") or {})
            call = call or str(event.get("id") or "")
            for choice in event.get("choices") or ():
                told.setdefault(int(choice.get("index") or 0), _Told()).add(choice)
        for i, one in told.items():
            name = (call or new_id()) if len(told) == 1 else f"{call}-{i}"
            self._record(name, one.text, one.reason or "stop", one.reasoning, list(one.calls.values()))

    def _take_response(self, data: Mapping[str, Any]) -> None:
        """Record an answer of the Responses API."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for item in data.get("output") or ():
            parts = item.get("content") or ()
            if item.get("type") == "function_call":
                calls.append(tool_call(str(item.get("call_id") or ""), item.get("name"), item.get("arguments")))
            elif item.get("type") == "reasoning":
                thoughts += [str(part.get("text") or "") for part in (*parts, *(item.get("summary") or ()))]
            else:
                texts += [str(part.get("text") or "") for part in parts]
        cut = data.get("status") == "incomplete"
        reason = "length" if cut else "tool_calls" if calls else "stop"
        self._record(str(data.get("id") or new_id()), "".join(texts), reason, "".join(thoughts), calls)

    def _record(self, call: str, text: str, reason: str, reasoning: str, tool_calls: list[Any]) -> None:
        output = ModelOutput(
            id=call,
            text=text,
            content=text,
            prompt_ids=[],
            completion_ids=[],
            logprobs=[],
            versions=[],
            finish_reason=reason,
            temperature=float(self.body.get("temperature") or 0.0),
            reasoning=reasoning,
            tool_calls=tool_calls,
            adapter="",
        )
        messages: list[Message] = list(self.body.get("messages") or ())
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
        delta = choice.get("delta") or {}
        self.text += str(delta.get("content") or choice.get("text") or "")
        self.reasoning += str(delta.get("reasoning_content") or "")
        self.reason = choice.get("finish_reason") or self.reason
        for part in delta.get("tool_calls") or ():
            function = part.get("function") or {}
            call = self.calls.setdefault(int(part.get("index") or 0), tool_call("", "", ""))
            call["id"] = part.get("id") or call["id"]
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""


async def _streamed(answer: httpx.Response, record: _Record | None) -> AsyncIterator[bytes]:
    """The endpoint's events as they come; recorded at their end."""
    text = b""
    try:
        async for part in answer.aiter_raw():
            text += part
            yield part
    finally:
        await answer.aclose()
        events = []
        for line in text.split(b"\n"):
            with contextlib.suppress(ValueError):
                events.append(json.loads(line.removeprefix(b"data:")) if line.startswith(b"data:") else None)
        if record is not None and answer.status_code == 200:
            record.take_events([event for event in events if isinstance(event, dict)])


def _error(status: int, message: str) -> JSONResponse:
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    return JSONResponse(body, status_code=status, headers={"x-should-retry": "false"})
