"""The gateway as a running thing: its port, its thread, its end."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import httpx
import pytest

from rllm.errors import UserError
from rllm.gateway.server import Gateway


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def gateway_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rllm-gateway"]


@pytest.fixture
def backend(backend: Any) -> Any:
    """A backend of this test's own: the shared gateway keeps running over the other."""
    return type(backend)(backend.tokenizer)


def test_a_port_in_use_is_an_error_that_names_port_and_key(backend: Any) -> None:
    before = gateway_threads()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"gateway.port={port}: cannot listen .* 0 for any free one"):
            Gateway(backend, port=port).start()
    assert gateway_threads() == before


def test_stop_leaves_no_thread_port_or_call_even_while_one_is_sampling(backend: Any) -> None:
    before = gateway_threads()
    backend.delay = lambda _: 30.0
    gateway = Gateway(backend)
    gateway.start()
    failures: list[Exception] = []

    def call() -> None:
        try:
            httpx.post(f"{gateway.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        except httpx.HTTPError as error:
            failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while not backend.asked:
        time.sleep(0.005)
    started = time.monotonic()
    gateway.stop()
    caller.join(5)
    assert time.monotonic() - started < 5 and not caller.is_alive()
    assert backend.cancelled == 1 and len(failures) <= 1 and gateway_threads() == before
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", gateway.port))


def test_a_client_does_not_wait_for_the_body_behind_the_head_of_an_answer(gateway: Gateway) -> None:
    """Nagle's algorithm on the server's side would cost 40 ms in each of these calls."""
    took = []
    with httpx.Client(base_url=gateway.url) as client:
        for _ in range(20):
            started = time.perf_counter()
            client.post("/v1/chat/completions", json={})
            took.append(time.perf_counter() - started)
    assert min(took[1:]) < 0.03


def test_it_listens_on_ipv6_and_its_url_says_so(backend: Any) -> None:
    try:
        with socket.socket(socket.AF_INET6) as there:
            there.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with Gateway(backend, host="::1") as gateway:
        assert gateway.url == f"http://[::1]:{gateway.port}"
        assert httpx.get(f"{gateway.url}/healthz").status_code == 200


def test_it_can_be_started_again_on_the_same_port(backend: Any) -> None:
    with Gateway(backend) as first:
        assert httpx.get(f"{first.url}/healthz").json() == {"status": "ok"}
    with Gateway(backend, port=first.port) as second:
        assert httpx.get(f"{second.url}/healthz").status_code == 200


def test_a_flow_is_told_the_url_model_and_settings_of_its_session(gateway: Gateway) -> None:
    session = gateway.open_session("t_0-abc", is_validation=True, sampling={"temperature": 0.6})
    config = gateway.agent_config(session, {"target": 6})
    assert config.base_url == f"{gateway.url}/s/t_0-abc/v1"
    assert config.url_for("one") == f"{gateway.url}/s/t_0-abc/t/one/v1"
    assert (config.model, config.session_uid, config.is_validation) == ("echo", "t_0-abc", True)
    assert (config.sampling_params, config.metadata) == ({"temperature": 0.6}, {"target": 6})


def test_a_prompt_far_too_long_is_refused_without_tokenizing_it(
    gateway: Gateway, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[str] = []
    monkeypatch.setattr(gateway.model.renderer, "tokenize", tokenized.append)
    text = "a b " * 10**6
    for path, body in (("completions", {"prompt": text}), ("chat/completions", {"messages": ask(text)})):
        error = httpx.post(f"{gateway.url}/v1/{path}", json=body, timeout=60).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "4000000 characters, too many for the tokens that fit; at most 2048 are allowed" in error["message"]
    assert not tokenized and not backend.asked


def test_a_long_prompt_is_tokenized_while_other_calls_go_on(gateway: Gateway, backend: Any) -> None:
    renderer: Any = gateway.model.renderer
    began, go_on = threading.Event(), threading.Event()
    text = "b" * 100_000
    known = renderer.text, renderer.most_characters
    try:
        renderer.most_characters = 10**9

        def slow(messages: Any, *more: Any) -> str:
            if messages[0]["content"] == text:
                began.set()
                assert go_on.wait(20), "the other call was not answered"
            return known[0](messages, *more)

        renderer.text = slow
        url = f"{gateway.url}/v1/chat/completions"
        answers: list[httpx.Response] = []
        long = threading.Thread(
            target=lambda: answers.append(httpx.post(url, json={"messages": ask(text)}, timeout=60))
        )
        long.start()
        assert began.wait(20)
        assert httpx.post(url, json={"messages": ask("hello")}, timeout=10).status_code == 200
        go_on.set()
        long.join(30)
        assert "tokens; at most 2048 are allowed" in answers[0].json()["error"]["message"]
    finally:
        del renderer.text
        renderer.most_characters = known[1]
