"""A server that is dead, wrong, or dies; a key, model or rank that it refuses: one line, soon, with what to do."""

from __future__ import annotations

import asyncio
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker_client import rows, settings, tinker_backend
from tinker_server import KEY, Served

from rllm.backends.base import BASE, AdamParams, Datum, LossSpec, SamplingParams
from rllm.backends.tinker import connection
from rllm.backends.tinker.backend import TinkerBackend
from rllm.backends.tinker.connection import Pulse, Server
from rllm.backends.tinker.losses import HOSTED_LOSSES, native
from rllm.backends.tinker.start import check_alpha
from rllm.config.load import load_config
from rllm.config.schema import LoraConfig, LoraSettings
from rllm.errors import ConfigError, ModelError, RunError
from rllm.trainer import create_backend

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def odd_server() -> Iterator[Callable[[dict[str, tuple[int, bytes]]], str]]:
    """``odd_server({path: (status, body)})`` -> address of a server that answers so, 404 elsewhere."""
    running: list[http.server.ThreadingHTTPServer] = []

    def start(answers: dict[str, tuple[int, bytes]]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                status, body = answers.get(self.path, (404, b"<html>not found</html>"))
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None: ...

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def refused(url: str, *overrides: str) -> str:
    """What a config with this address is refused with; soon, and in one line."""
    began = time.monotonic()
    with pytest.raises(ConfigError) as found:
        create_backend(load_config(overrides=["backend=tinker", f"tinker.base_url={url}", *overrides]).config)
    assert time.monotonic() - began < 15 and "\n" not in str(found.value)
    return str(found.value)


def test_a_dead_server_is_told_with_exit_code_2_and_no_traceback() -> None:
    url, began = f"http://127.0.0.1:{free_port()}", time.monotonic()
    flow = ROOT / "examples" / "solver_judge" / "solver_judge_flow.py"
    arguments = ["train", str(flow), "backend=tinker", f"tinker.base_url={url}"]
    done = subprocess.run(
        [sys.executable, "-c", "from rllm.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        timeout=120,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and time.monotonic() - began < 60
    assert f"tinker.base_url={url}: nothing answers there" in done.stderr and "rllm serve" in done.stderr


def test_a_server_that_takes_calls_and_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ASK_S", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert "no answer within 0.5 s" in refused(f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_a_server_of_something_else_is_told_from_a_tinker_server(odd_server: Any) -> None:
    assert "no Tinker server (GET /api/v1/healthz: 404)" in refused(odd_server({}))
    healthy = {"/api/v1/healthz": (200, b'{"status": "ok"}')}
    assert "client/config: 404" in refused(odd_server(healthy))
    config = "/api/v1/client/config"
    assert "does not know this SDK" in refused(odd_server(healthy | {config: (200, b"hello")}))
    assert "version is too old" in refused(odd_server(healthy | {config: (400, b'{"error": "version is too old"}')}))


def test_a_server_that_makes_no_session_is_given_up_at_once_when_its_time_is_over(
    odd_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK goes on trying for minutes, and holds the lock meanwhile that its end would need."""
    monkeypatch.setattr(connection, "START_S", 2.0)
    doors = {"/api/v1/healthz": (200, b"{}"), "/api/v1/client/config": (200, b"{}")}
    url = odd_server(doors | {"/api/v1/create_session": (503, b'{"error": "full"}')})
    began = time.monotonic()
    assert "model.path=default" in (told := refused(url)) and "did not do it within 2 s" in told
    assert time.monotonic() - began < 8


def test_a_wrong_key_and_none_at_all_are_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong-key")
    assert "refuses the API key in $TINKER_API_KEY" in refused(served.url)
    monkeypatch.setenv("MY_KEY", "sk-1234")
    assert "tinker.api_key_env=MY_KEY: the key in it must begin with tml-" in refused(
        served.url, "tinker.api_key_env=MY_KEY"
    )
    monkeypatch.delenv("TINKER_API_KEY")
    assert "is not set, and http://tinker.invalid wants an API key" in refused("http://tinker.invalid")


def test_a_server_that_wants_its_key_at_every_door_is_no_other_kind_of_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            asked.append(self.path)
            self.send_response(200 if self.headers.get("X-API-Key") == "tml-right" else 401)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    assert "refuses the API key in $TINKER_API_KEY" in refused(url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-right")
    found = connection.find_server(settings(url=url).tinker, "0.38.0")
    assert (found.url, found.about) == (url, None) and asked[-2:] == ["/api/v1/healthz", "/api/v1/client/config"]
    monkeypatch.setattr(connection, "PULSE_S", 0.05)
    pulse = Pulse(found, 5.0)
    with pulse.watching():
        count = len(asked)
        while len(asked) < count + 2:
            time.sleep(0.05)
    assert pulse.silent_since is None
    pulse.close()
    server.shutdown()
    server.server_close()


def test_a_project_is_refused_where_there_are_none(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    assert "tinker.project=p-1: " in (told := refused(served.url, "tinker.project=p-1")) and "no projects" in told


def test_the_model_alone_is_sampled_whatever_alpha_the_service_has(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `rllm eval` does with the hosted service; what trains is refused there."""
    monkeypatch.setattr(connection, "find_server", lambda *_: Server(served.url, KEY))
    backend = tinker_backend(monkeypatch, served.url)
    told = asyncio.run(backend.sample([20, 21], SamplingParams(max_tokens=3, ignore_eos=True), BASE))
    assert len(told.ids) == 3
    with pytest.raises(ConfigError, match=r"^lora\.alpha=8: the hosted service takes no alpha"):
        backend.describe()
    backend.close()


def test_with_a_kl_the_longest_row_leaves_room_to_ask_the_reference(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = served.service.backend.max_model_len
    wide = ("data.max_prompt_length=100000", "algorithm.kl_beta=0.1")
    backend = tinker_backend(monkeypatch, served.url, *wide)
    assert backend.max_model_len == able - 1
    row = Datum([i % 500 + 5 for i in range(able - 1)], [0] * (able - 9) + [1] * 8)
    assert len(backend.logprobs([row], BASE)[0]) == able - 1
    backend.close()
    long = refused(served.url, f"model.max_model_len={able}", *wide)
    assert f"model.max_model_len={able}: " in long and f"at most {able - 1} tokens with a KL" in long


def test_an_adapter_whose_gradient_is_not_finite_does_not_hide_the_step_of_another(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tinker_backend(monkeypatch, served.url, "lora.per_role={solver: {}, judge: {}}")
    data = rows(adapters=("solver", "judge"))
    for row in data:
        if row.adapter == "judge":
            row.advantages = [1e38 * m for m in row.mask]
            row.logprobs = [-24.0 * m for m in row.mask]  # ratios that are finite and gradients that are not
    for _ in range(2):
        told = backend.train_step(data, LossSpec("importance_sampling"), AdamParams(lr=1e-3))
        assert told["nonfinite_adapters"] == 1.0 and 0 < told["grad_norm"] < float("inf")
    with pytest.raises(RunError, match="3 steps in a row had a gradient of the adapter judge that is not finite"):
        backend.train_step(data, LossSpec("importance_sampling"), AdamParams(lr=1e-3))
    backend.close()


def test_an_unknown_model_and_too_high_a_rank_are_told_in_the_servers_words(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    assert "model.path=Qwen/Qwen9" in (told := refused(served.url, "model.path=Qwen/Qwen9")) and "'default'" in told
    long = refused(served.url, "model.max_model_len=100000")
    assert "model.max_model_len=100000: default on http://127.0.0.1" in long and "can do at most" in long
    backend = tinker_backend(monkeypatch, served.url, "lora.rank=513", "data.max_prompt_length=100000")
    assert backend.max_model_len == served.service.backend.max_model_len
    with pytest.raises(ConfigError, match=r"lora_config\.rank: 513; this server takes 1 to 512"):
        backend.describe()
    backend.close()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("tinker.base_url=127.0.0.1:8000", "must begin with http"),
        ("tinker.base_url=http://127.0.0.1:8000/v1", "without /v1"),
        ("tinker.ttl_seconds=60", "3600"),
        ("tinker.patience_s=1", "5"),
    ],
)
def test_settings_that_cannot_be_are_told_by_their_key(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as found:
        load_config(overrides=["backend=tinker", override])
    assert override.partition("=")[0] in str(found.value)


def test_a_setting_of_the_server_without_the_backend_is_an_error() -> None:
    for setting in ("base_url=http://x", "ttl_seconds=3600", "api_key_env=KEY", "patience_s=9.0", "project=p"):
        with pytest.raises(ConfigError, match=rf"tinker\.{setting}: nothing of it is used .*set backend=tinker"):
            load_config(overrides=[f"tinker.{setting}"])
    resolved = load_config(overrides=["backend=tinker", "tinker_base_url=http://127.0.0.1:1"])
    assert resolved.config.tinker.base_url == "http://127.0.0.1:1"


def test_another_alpha_than_the_hosted_services_is_an_error_that_names_the_scale() -> None:
    hosted, ours = Server("https://x", "tml-x"), Server("http://x", "tml-x", {"lora_alpha": 32.0})
    with pytest.raises(
        ConfigError, match=r"lora\.alpha=16 \(the default\).*32 / 8 = 4 where 2 is asked for; set lora\.alpha=32"
    ):
        check_alpha(LoraConfig(), hosted)
    with pytest.raises(ConfigError, match=r"^lora\.per_role\.judge\.alpha=4: "):
        check_alpha(LoraConfig(alpha=32, per_role={"solver": LoraSettings(), "judge": LoraSettings(alpha=4)}), hosted)
    check_alpha(LoraConfig(alpha=32), hosted)
    check_alpha(LoraConfig(alpha=7), ours)


def test_the_hosted_service_gets_only_losses_whose_formula_is_published() -> None:
    """The others go through their gradient, as does what the service has no setting for."""
    plain = {
        "ppo_clip": "ppo",
        "cispo": "cispo",
        "reinforce": "cross_entropy",
        "importance_sampling": "importance_sampling",
        "gspo": "gspo",
    }
    for ours, theirs in plain.items():
        found = native(LossSpec(ours), HOSTED_LOSSES, on_policy=True)
        assert found is not None and found.name == theirs
    for spec in (LossSpec("dro"), LossSpec("ppo_clip", kl_beta=0.1), LossSpec("mine")):
        assert native(spec, HOSTED_LOSSES, on_policy=True) is None
    assert native(LossSpec("ppo_clip", clip_c=3.0), HOSTED_LOSSES, on_policy=False) is None
    found = native(LossSpec("ppo_clip", clip_low=0.25, clip_high=0.5), HOSTED_LOSSES, on_policy=True)
    assert found is not None and found.settings == {"clip_low_threshold": 0.75, "clip_high_threshold": 1.5}


def test_rows_sampled_at_another_temperature_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tinker_backend(monkeypatch, served.url)
    data = rows()
    data[0].temperature = 0.5
    with pytest.raises(RunError, match=r"temperature 0\.5: the tinker backend trains at temperature 1 only"):
        backend.forward_backward(data, LossSpec())
    backend.close()


def test_a_server_that_dies_in_the_middle_ends_the_run_and_says_how_to_go_on(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PULSE_S", 0.2)
    monkeypatch.setattr(connection, "ASK_S", 0.3)
    running = Served(backend, tmp_path / "serve")
    client = tinker_backend(monkeypatch, running.url)
    client.connection.pulse.patience_s = 1.0
    client.describe()
    began = time.monotonic()
    try:
        client.save_state(tmp_path / "run" / "state.newer")
    finally:
        running.close()
    data = [row for row in rows() if row.n_trained]
    with pytest.raises(RunError, match=r"has not answered for 1 s.*trainer\.resume=\S*run goes on from the last state"):
        client.train_step(data, LossSpec("reinforce"), AdamParams(lr=1e-3))
    with pytest.raises(RunError, match="has not answered"):
        client.export_adapter(tmp_path / "adapter")
    client.close()
    assert time.monotonic() - began < 15


def test_what_costs_more_there_or_does_nothing_is_noted() -> None:
    def notes(*overrides: str) -> str:
        return "\n".join(load_config(overrides=["backend=tinker", *overrides]).notes)

    assert "no KL term" in notes("algorithm.kl_beta=0.1")
    assert "no dual clip" in notes("algorithm.ppo_epochs=2") and "no dual clip" not in notes()
    assert "no dual clip" not in notes("algorithm.ppo_epochs=2", "algorithm.clip_ratio_c=0")
    assert "for each adapter by itself" in notes("lora.per_role={solver: {}, judge: {}}")
    assert "rollout.max_batch=7 has no effect" in notes("rollout.max_batch=7")


def test_a_server_that_was_started_anew_is_told_with_how_to_go_on(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Served(backend, tmp_path / "serve")
    client = tinker_backend(monkeypatch, running.url)
    client.describe()
    client.save_state(tmp_path / "run" / "state.newer")
    running.service.runs.clear()
    data = [row for row in rows() if row.n_trained]
    with pytest.raises(RunError, match=r"is not open.*trainer\.resume=\S*run goes on"):
        client.train_step(data, LossSpec("reinforce"), AdamParams(lr=1e-3))
    client.close()
    running.close()


def test_a_pulse_that_comes_back_is_no_end(odd_server: Any) -> None:
    pulse = Pulse(Server("http://127.0.0.1:1", KEY), 5.0)
    pulse.silent_since = time.monotonic() - 4.0
    assert not pulse.gone
    pulse.silent_since = time.monotonic() - 6.0
    assert pulse.gone
    pulse.close()


def test_a_broken_pointer_and_a_state_of_another_backend_are_told(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tinker_backend(monkeypatch, served.url)
    with pytest.raises(ModelError, match=r"tinker\.json cannot be read"):
        client.load_state(tmp_path)
    client.save_state(tmp_path / "state")
    pointer = tmp_path / "state" / "tinker.json"
    pointer.write_text(pointer.read_text().replace("state-000000", "state-999999"))
    with pytest.raises(RunError, match="there is no checkpoint"):
        client.load_state(tmp_path / "state")
    client.close()


def test_a_missing_sdk_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(ConfigError, match=r"pip install 'rllm\[tinker\]'"):
        TinkerBackend.create(settings(url="http://127.0.0.1:1"))


def test_the_tokenizer_may_be_named(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with pytest.raises(ModelError, match=f"tinker.tokenizer: the tokenizer of {tmp_path} cannot be read"):
        TinkerBackend.create(settings(f"tinker.tokenizer={tmp_path}", url=served.url))
