"""Whatever bytes arrive, the answer is a refusal in OpenAI's shape or a completion: never a 500, never a hang, and the engine goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm.backends.local.backend import LocalBackend
from rllm.config.load import load_config
from rllm.gateway.server import Gateway

GOOD: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
}
NAMES = [
    "model", "messages", "prompt", "input", "instructions", "n", "stream", "stream_options", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "seed", "stop", "tools", "tool_choice",
    "parallel_tool_calls", "response_format", "return_token_ids", "chat_template_kwargs", "separate_reasoning", "metadata", "user", "presence_penalty",
    "logit_bias", "echo", "suffix", "text", "reasoning", "store", "include", "temprature", "\ud800",
]  # fmt: skip
TEXT = st.one_of(
    st.text(max_size=20), st.sampled_from(["<|im_end|>", "\ud800", "\x00", "🙂", "user", "assistant", "tool", "system"])
)
SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 8), st.floats(), st.sampled_from([1e-9, 1e308, 10**30, -(2**63)]), TEXT
)
JSON = st.recursive(
    SCALAR, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)), max_leaves=6
)
PART = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["text", "input_text", "image_url", 5]), "text": JSON}
)
FUNCTION = st.fixed_dictionaries(
    {}, optional={"name": st.one_of(st.just("f"), JSON), "arguments": JSON, "parameters": JSON, "description": JSON}
)
CALL = st.fixed_dictionaries(
    {}, optional={"id": JSON, "type": st.just("function"), "function": st.one_of(FUNCTION, JSON)}
)
MESSAGE = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {"role": st.one_of(st.sampled_from(["user", "assistant", "system", "tool", "developer"]), JSON)},
        optional={
            "content": st.one_of(TEXT, st.lists(PART, max_size=3), JSON),
            "tool_calls": st.one_of(st.lists(CALL, max_size=2), JSON),
            "tool_call_id": JSON,
            "reasoning_content": JSON,
            "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]),
            "name": JSON,
            "arguments": JSON,
            "call_id": JSON,
            "output": JSON,
            "summary": JSON,
        },
    ),
)
TOOL = st.one_of(
    JSON, st.fixed_dictionaries({"type": st.just("function")}, optional={"function": FUNCTION, "name": JSON})
)
VALUE = st.one_of(JSON, st.lists(MESSAGE, max_size=4), st.lists(TOOL, max_size=3))
BODY = st.one_of(
    st.binary(max_size=40),
    JSON.map(json.dumps),
    st.tuples(st.sampled_from([True, True, True, False]), st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=4)),
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    config = load_config(base=None, training=False).config
    backend = LocalBackend.create(config)
    with (
        Gateway(backend, default_max_tokens=4, models={"default": "default"}) as gateway,
        httpx.Client(base_url=gateway.url, timeout=30) as client,
    ):
        gateway.open_session("s")
        yield client
    backend.close()


def send(http: httpx.Client, prefix: str, path: str, body: Any) -> None:
    if isinstance(body, tuple):
        good, changes = body
        whole = (GOOD[path] if good else {}) | changes
        content: Any = json.dumps(whole)
    else:
        content = body
    response = http.post(f"{prefix}/{path}", content=content)
    assert response.status_code in (200, 400, 404), (response.status_code, response.text[:300], content)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in response.text or '"error": null' in response.text, response.text[:300]


def check(http: httpx.Client, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(st.sampled_from(["/v1", "/s/s/v1"]), st.sampled_from(sorted(GOOD)), BODY)
    def any_body(prefix: str, path: str, body: Any) -> None:
        send(http, prefix, path, body)

    any_body()
    for path, body in GOOD.items():
        assert http.post(f"/v1/{path}", json=body).status_code == 200


def test_100_malformed_bodies_are_refused_or_answered(http: httpx.Client) -> None:
    check(http, 100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_5000_malformed_bodies_are_refused_or_answered(http: httpx.Client) -> None:
    check(http, 5000)


def test_a_body_that_says_it_is_too_large_is_refused_unread(http: httpx.Client) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\nx")
        answer = b""
        while b"at most" not in answer and (part := raw.recv(65536)):
            answer += part
    assert b" 413 " in answer and b"at most" in answer


def test_a_body_that_turns_out_too_large_is_refused(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.gateway.app.MAX_BODY_BYTES", 100)
    response = http.post("/v1/completions", content=(b"x" * 30 for _ in range(10)))
    assert response.status_code == 413 and "at most 100" in response.json()["error"]["message"]
