"""A gateway in front of a foreign endpoint: what it passes on, and that no answer or question, however odd, makes it fail."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from rllm.gateway.recorder import Session
from rllm.gateway.remote import RemoteGateway

FINE = {"id": "c1", "choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]}


class Foreign(BaseHTTPRequestHandler):
    """Answers every POST with `answer` (bytes, or what JSON is made of) and keeps what it was sent."""

    protocol_version = "HTTP/1.1"
    answer: Any = FINE
    kind = "application/json"
    pause_s = 0.0
    seen: tuple[tuple[str, bytes], ...] = ()

    def do_GET(self) -> None:
        Foreign.seen += ((self.path, b""),)
        self._send({"data": [{"id": "big"}]}, "application/json")

    def do_POST(self) -> None:
        Foreign.seen += ((self.path, self.rfile.read(int(self.headers["content-length"]))),)
        self._send(Foreign.answer, Foreign.kind)

    def _send(self, data: Any, kind: str) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:1])
        self.wfile.flush()
        time.sleep(Foreign.pause_s)
        self.wfile.write(body[1:])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def remote() -> Iterator[RemoteGateway]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with RemoteGateway(f"http://127.0.0.1:{server.server_address[1]}/v1", call_timeout_s=1.5) as gateway:
        yield gateway
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def session(remote: RemoteGateway) -> Iterator[Session]:
    Foreign.answer, Foreign.kind, Foreign.pause_s, Foreign.seen = FINE, "application/json", 0.0, ()
    session = remote.open_session("s", sampling={"temperature": 0.5})
    yield session
    remote.close_session(session)


@pytest.fixture
def http(remote: RemoteGateway, session: Session) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{remote.url}/s/s/v1", timeout=30) as client:
        yield client


HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    "body", [b'{"temperature": NaN}', b'{"temperature": -Infinity}', b"{", b"[" * 100_000, b"\xff"]
)
def test_a_body_that_is_no_json_is_refused_here(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/chat/completions", content=body)
    assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]["message"]
    assert not Foreign.seen


@pytest.mark.parametrize(
    "body", [b"[1, 2]", b'"text"', b"null", b'{"messages": [{"role": "user", "content": "\\ud800"}]}']
)
def test_what_only_the_endpoint_can_judge_reaches_it(http: httpx.Client, body: bytes) -> None:
    assert http.post("/chat/completions", content=body).json() == FINE
    [(_, sent)] = Foreign.seen
    if body.startswith(b"{"):
        assert json.loads(sent) == json.loads(body) | {"model": "big", "temperature": 0.5}
    else:
        assert sent == body


def test_the_query_and_odd_paths_are_passed_on(http: httpx.Client) -> None:
    http.post("/chat/completions?api-version=2024-10-21&x=%20", json=HELLO)
    http.get("/models/a%3Fb c")
    assert [path for path, _ in Foreign.seen] == [
        "/v1/chat/completions?api-version=2024-10-21&x=%20",
        "/v1/models/a%3Fb%20c",
    ]


MESSAGES: list[Any] = [
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "user"}],
    ["hello"],
    "hello",
    7,
    {"role": "user"},
]


@pytest.mark.parametrize("messages", MESSAGES)
def test_messages_in_any_form_are_recorded_if_the_endpoint_takes_them(
    http: httpx.Client, session: Session, messages: Any
) -> None:
    assert http.post("/chat/completions", json={"messages": messages}).status_code == 200
    assert session.recorded()["c1"].output.content == "yes"


ODD: list[Any] = [
    {"choices": [None]},
    {"choices": {"a": 1}},
    {"choices": 7},
    {"choices": [{"message": "yes"}]},
    {"choices": [{"message": {"content": ["yes"], "tool_calls": {"a": 1}}}]},
    {"choices": [{"message": {"tool_calls": [None, 3, {"function": None}]}}]},
    {"object": "response", "output": [None, {"content": "yes"}, {"content": [None]}]},
    {"object": "response", "output": 7},
    {"object": "response", "output": [{"type": "function_call"}, {"type": "reasoning", "summary": [1]}]},
    [1],
    None,
    b"no json",
    b'{"choices": [{"message": {"content": "\\ud800"}}]}',
]


@pytest.mark.parametrize("answer", ODD)
def test_an_answer_in_any_form_is_passed_on(http: httpx.Client, answer: Any) -> None:
    Foreign.answer = answer
    given = http.post("/chat/completions", json=HELLO)
    assert given.status_code == 200
    assert given.content == (answer if isinstance(answer, bytes) else json.dumps(answer).encode())


@pytest.mark.parametrize(
    "answer", [*ODD, {"choices": [{"index": "x", "delta": {"content": "a"}}]}, {"choices": [{"delta": 3}]}]
)
def test_odd_events_are_passed_on(http: httpx.Client, answer: Any) -> None:
    text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    if isinstance(answer, dict) and answer.get("object") == "response":
        text = json.dumps({"type": "response.completed", "response": answer}).encode()
    Foreign.answer, Foreign.kind = b"data: " + text + b"\n\ndata: [DONE]\n\n", "text/event-stream"
    given = http.post("/chat/completions", json=HELLO | {"stream": True})
    assert given.content == Foreign.answer


def test_an_answer_that_trickles_in_is_ended_at_the_limit(http: httpx.Client) -> None:
    Foreign.pause_s = 5.0
    started = time.monotonic()
    answer = http.post("/chat/completions", json=HELLO)
    assert answer.json()["error"]["code"] == "call_timeout"
    assert answer.status_code == 504 and "1.5 s (rollout.call_timeout_s)" in answer.json()["error"]["message"]
    assert time.monotonic() - started < 4


def test_a_workflow_is_told_what_the_endpoint_said_that_is_no_answer(remote: RemoteGateway, session: Session) -> None:
    engine = remote.engine(session)
    for answer in (b"no json", {"choices": []}, {"id": "c1", "choices": [None]}):
        Foreign.answer = answer
        with pytest.raises(RuntimeError, match="the endpoint's answer is no chat completion"):
            asyncio.run(engine.get_model_response(HELLO["messages"]))  # pyright: ignore[reportArgumentType]
