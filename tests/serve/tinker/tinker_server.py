"""A real server over the packaged model, the unmodified SDK as its client, and a float64 model that shares no code with either."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

os.environ["TINKER_TELEMETRY"] = "0"
KEY = "tml-test-key"


@pytest.fixture(scope="session")
def backend() -> Iterator[Any]:
    from rllm.backends.local.backend import LocalBackend
    from rllm.config.load import load_config

    made = LocalBackend.create(load_config(overrides=["model.dtype=float32"], training=False).config)
    yield made
    made.close()


class Served:
    """A running server and its insides."""

    def __init__(self, backend: Any, folder: Path, **settings: Any):
        from rllm.serve.server import ChatBackend, CheckpointModels, ModelServer, served_models
        from rllm.serve.tinker.service import TinkerService
        from rllm.serve.tinker.store import Store

        self.service = TinkerService(backend, Store(folder), name="default", **settings)
        models = CheckpointModels(served_models("default", []), self.service)
        self.server = ModelServer(
            ChatBackend(self.service), "127.0.0.1", 0, models=models, service=self.service, key=KEY
        )
        self.server.start()
        self.url = self.server.url
        self.http = httpx.Client(base_url=f"{self.url}/api/v1", headers={"X-API-Key": KEY}, timeout=60)

    def close(self) -> None:
        self.http.close()
        self.server.stop()
        self.service.close()

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """A JSON request that must be answered well."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    def result(self, reply: dict[str, Any]) -> dict[str, Any]:
        return self.post("/retrieve_future", {"request_id": reply["request_id"]})

    def session(self) -> str:
        return self.post("/create_session", {"tags": [], "user_metadata": None, "sdk_version": "test"})["session_id"]

    def model(self, rank: int = 4, **lora: Any) -> str:
        """A new run in a new session."""
        body = {"session_id": self.session(), "model_seq_id": 0, "base_model": "default"}
        told = self.result(self.post("/create_model", {**body, "lora_config": {"rank": rank, **lora}}))
        return told["model_id"]


@pytest.fixture(scope="module")
def served(backend: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = Served(backend, tmp_path_factory.mktemp("state"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def sdk() -> Any:
    """The official SDK."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("tinker", reason="the tinker SDK is not installed; it comes with the dev extra")


@pytest.fixture(scope="module", autouse=True)
def no_session_left() -> Iterator[None]:
    """A session that nobody ends is kept alive by the SDK for as long as the process lives, in a thread of its own."""
    yield
    if "tinker" not in sys.modules:
        return
    from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton as sdk_thread

    loop, end = sdk_thread.loop_if_started(), time.monotonic() + 5
    while loop is not None and (left := [t for t in asyncio.all_tasks(loop) if "_session_heartbeat" in repr(t)]):
        assert time.monotonic() < end, f"sessions that were not ended: {left}"
        time.sleep(0.05)


def drop(client: Any) -> None:
    """End the session of a client whose server is gone: the SDK gives it up when its end is cancelled."""
    ending = client.close("errored").future()
    with contextlib.suppress(TimeoutError):
        ending.result(timeout=0.2)
    ending.cancel()


@pytest.fixture(scope="module")
def client(sdk: Any, served: Served) -> Iterator[Any]:
    made = sdk.ServiceClient(base_url=served.url, api_key=KEY)
    yield made
    made.close("success").result(timeout=20)


@pytest.fixture
def training(client: Any, sdk: Any) -> Any:
    """A training client whose adapter already has an effect."""
    made = client.create_lora_training_client("default", rank=4, seed=3).result(timeout=30)
    warm = datum(sdk, range(20, 40), weights=[1.0] * 19)
    made.forward_backward([warm], "cross_entropy")
    made.optim_step(sdk.AdamParams(learning_rate=1e-2)).result(timeout=30)
    return made


def datum(sdk: Any, tokens: Any, **inputs: Any) -> Any:
    """One row: read all but the last token, predict all but the first."""
    ids = list(tokens)
    return sdk.Datum(
        model_input=sdk.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **inputs}
    )
