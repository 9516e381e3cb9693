"""`rllm serve` and the example client that talks to it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rllm.errors import UserError
from rllm.serve.server import serve

CLIENT = Path(__file__).parents[2] / "examples" / "chat_client.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def served(backend: Any) -> Iterator[str]:
    """The base URL of a server that runs as long as the test."""
    stop, ready, said = threading.Event(), threading.Event(), []

    def say(line: str) -> None:
        said.append(line)
        ready.set()

    port = free_port()
    thread = threading.Thread(target=serve, args=(backend, "127.0.0.1", port), kwargs={"say": say, "until": stop})
    thread.start()
    assert ready.wait(10)
    assert "adapter and echo" in said[0]
    yield f"http://127.0.0.1:{port}/v1"
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


def run_client(*args: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, CLIENT, *args], input=typed, capture_output=True, text=True, timeout=30)


def test_the_example_client_asks_the_adapter_by_default_and_the_base_by_name(served: str, backend: Any) -> None:
    backend.answer = lambda text: "by digits 42"
    one = run_client("--base-url", served, "1 + 1?")
    assert (one.returncode, one.stdout) == (0, "by digits 42\n"), one.stderr
    run_client("--base-url", served, "--model", "echo", "--temperature", "0.5", "--max-tokens", "3", "1 + 1?")
    assert [(asked[1].temperature, asked[1].max_tokens, asked[2]) for asked in backend.asked] == [
        (1.0, 512, "default"),
        (0.5, 3, "base"),
    ]


def test_the_example_client_keeps_the_history_of_a_chat(served: str, backend: Any) -> None:
    backend.answer = lambda text: "yes"
    done = run_client("--base-url", served, typed="first\nsecond\n\n")
    assert done.returncode == 0 and done.stdout.count("yes") == 2
    last = backend.tokenizer.decode(backend.asked[-1][0])
    assert [part in last for part in ("first", "yes", "second")] == [True] * 3


def test_the_example_client_says_what_is_wrong() -> None:
    done = run_client("--base-url", f"http://127.0.0.1:{free_port()}/v1", "hello")
    assert done.returncode == 1 and "nothing answers at" in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_an_error_before_anything_is_served(served: str, backend: Any) -> None:
    port = int(served.rpartition(":")[2].partition("/")[0])
    with pytest.raises(UserError, match=str(port)):
        serve(backend, port=port)
    assert httpx.get(f"{served}/models").status_code == 200
