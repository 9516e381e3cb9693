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


def test_an_answer_does_not_wait_for_an_acknowledgement(gateway: Gateway) -> None:
    with httpx.Client(base_url=gateway.url) as client:
        client.post("/v1/nothing", json={})
        took = []
        for _ in range(9):
            started = time.perf_counter()
            client.post("/v1/nothing", json={})
            took.append(time.perf_counter() - started)
    assert sorted(took)[2] < 0.03, f"{took}: with Nagle's algorithm every answer takes 0.04 s"
