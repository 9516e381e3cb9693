"""What takes minutes: other SDK versions, a server killed at random, many clients at once for long. Slow."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tinker_server import KEY, Served, datum

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SOAK_S = float(os.environ.get("RLLM_SOAK_S", "60"))

OLDER_CLIENT = """
import sys, tinker
from tinker import types
print(tinker.__version__)
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
training = service.create_lora_training_client("default", rank=4, seed=1)
training = training.result() if hasattr(training, "result") else training
ids = list(range(20, 40))
row = types.Datum(
    model_input=types.ModelInput.from_ints(ids[:-1]),
    loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * 19},
)
losses = []
for _ in range(5):
    future = training.forward_backward([row], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    losses.append(future.result().metrics["loss:sum"])
assert losses[-1] < losses[0], losses
forward = training.forward([row], "cross_entropy").result()
saved = training.save_state("matrix").result().path
sampler = training.save_weights_and_get_sampling_client()
sampler = sampler.result() if hasattr(sampler, "result") else sampler
prompt = types.ModelInput.from_ints(ids)
got = sampler.sample(prompt, num_samples=2, sampling_params=types.SamplingParams(max_tokens=6, stop=[])).result()
assert [len(s.tokens) for s in got.sequences] == [6, 6]
told = sampler.compute_logprobs(prompt).result()
want = forward.loss_fn_outputs[0]["logprobs"].data
assert max(abs(a - b) for a, b in zip(told[1:], want)) < 1e-4
again = service.create_training_client_from_state_with_optimizer(saved)
again = again.result() if hasattr(again, "result") else again
one, other = (t.forward_backward([row], "cross_entropy").result().metrics["loss:sum"] for t in (training, again))
assert one == other
def custom(data, logprobs):
    import torch
    return torch.stack([-lp.sum() for lp in logprobs]).sum(), {}
same = training.forward_backward_custom([row], custom).result().metrics["loss:sum"]
assert abs(same - one) < 1e-4 * abs(one)
print("fine")
"""


@pytest.mark.parametrize("version", ["0.24.1", "0.25.0", "0.29.1"])
def test_older_sdks_train_and_sample(served: Served, sdk: Any, version: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(tmp_path / "sdk"),
        f"tinker=={version}",
    ]
    if subprocess.run(command, capture_output=True, timeout=300, check=False).returncode:
        pytest.skip(f"tinker=={version} could not be fetched")
    path = os.pathsep.join([str(tmp_path / "sdk"), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "TINKER_TELEMETRY": "0"}
    done = subprocess.run(
        [sys.executable, "-c", OLDER_CLIENT, served.url, KEY], capture_output=True, text=True, timeout=300, env=env
    )
    assert done.stdout.split() == [version, "fine"], done.stderr[-3000:]


class Process:
    """`rllm serve` in a process of its own."""

    def __init__(self, state: Path):
        self.state, self.port = state, 0

    def start(self) -> None:
        command = [sys.executable, "-m", "rllm.cli", "serve", "--api", "tinker", "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--state", str(self.state)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://\S+:(\d+)", self.process.stdout.readline())
        assert found
        self.port, self.url = int(found[1]), found[0]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def test_a_server_killed_at_random_keeps_every_checkpoint_it_acknowledged(tmp_path: Path) -> None:
    rng, server = random.Random(3), Process(tmp_path / "state")
    kept: dict[str, float] = {}
    for life in range(20):
        server.start()
        http = httpx.Client(base_url=f"{server.url}/api/v1", timeout=60)

        def post(path: str, body: dict[str, Any], http: httpx.Client = http) -> dict[str, Any]:
            answer = http.post(f"/{path}", json=body)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            return http.post("/retrieve_future", json={"request_id": told["request_id"]}).json()

        session = http.post("/create_session", json={}).json()["session_id"]
        for number, path in enumerate(
            rng.sample(list(kept), min(3, len(kept)))
        ):  # all of them load and are what they were
            made = post(
                "load_weights", {"session_id": session, "model_seq_id": number, "path": path, "optimizer": True}
            )
            body = train_body(made["model_id"])
            assert post("forward", body)["metrics"]["loss:sum"] == pytest.approx(kept[path], rel=1e-6)
        told = {one["tinker_path"] for one in http.get("/checkpoints?limit=1000").json()["checkpoints"]}
        assert set(kept) <= told

        end = threading.Timer(rng.uniform(0.1, 1.2), server.kill)
        end.start()
        try:
            body = {"session_id": session, "model_seq_id": 9, "base_model": "default", "lora_config": {"rank": 4}}
            model = post("create_model", body)["model_id"]
            for save in range(1000):
                post("forward_backward", train_body(model))
                post("optim_step", {"model_id": model, "adam_params": {"learning_rate": 1e-2}})
                loss = post("forward", train_body(model))["metrics"]["loss:sum"]
                path = post("save_weights", {"model_id": model, "path": f"{life}-{save}", "overwrite": True})["path"]
                kept[path] = loss
        except (httpx.HTTPError, ValueError, KeyError):
            pass
        end.join()
        http.close()
    assert len(kept) > 20


def test_a_client_goes_on_sampling_when_its_killed_server_comes_back(sdk: Any, tmp_path: Path) -> None:
    server = Process(tmp_path / "state")
    server.start()
    client = sdk.ServiceClient(base_url=server.url, api_key=KEY)
    training = client.create_lora_training_client("default", rank=4, seed=1).result(timeout=60)
    training.forward_backward([_row(sdk, random.Random(1), 30)], "cross_entropy")
    training.optim_step(sdk.AdamParams(learning_rate=1e-2)).result(timeout=60)
    samplers = [training.save_weights_and_get_sampling_client().result(timeout=60)]
    path = training.save_weights_for_sampler("kept").result(timeout=60).path
    samplers.append(client.create_sampling_client(model_path=path).result(timeout=60))
    prompt, params = sdk.ModelInput.from_ints([5, 6, 7]), sdk.SamplingParams(max_tokens=400, stop=[], seed=3)
    wanted = samplers[0].sample(prompt, 1, params).result(timeout=60).sequences[0].tokens
    asked = [sampler.sample(prompt, 40, params) for sampler in samplers for _ in range(8)]
    time.sleep(0.5)
    server.kill()
    server.start()
    assert [future.result(timeout=120).sequences[0].tokens for future in asked] == [wanted] * 16
    with pytest.raises(Exception, match="of an earlier start of this server"):
        training.optim_step(sdk.AdamParams()).result(timeout=60)
    client.close("success").result(timeout=20)
    server.kill()


def train_body(model: str) -> dict[str, Any]:
    ids = list(range(40, 60))
    inputs = {"target_tokens": {"data": ids[1:], "dtype": "int64"}}
    data = [{"model_input": {"chunks": [{"tokens": ids[:-1]}]}, "loss_fn_inputs": inputs}]
    given = {"data": data, "loss_fn": "cross_entropy"}
    return {"forward_backward_input": given, "forward_input": given, "model_id": model}


def test_eight_clients_of_three_adapters_each_train_and_sample_fairly_for_long(
    sdk: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLLM_SOAK_S seconds (60 unless told). All send rows of the same lengths, so that equal shares of time are equal numbers of steps."""
    monkeypatch.setattr(served.service.pool, "most_bytes", 32 * 2**20)  # full from early on, so that growth is a leak
    steps, failures = [0] * 8, []
    stop = time.monotonic() + SOAK_S

    def live(number: int) -> None:
        rng = random.Random(number)
        try:
            client = sdk.ServiceClient(base_url=served.url, api_key=KEY)
            runs = [client.create_lora_training_client("default", rank=2**i, seed=i).result(60) for i in (1, 2, 3)]
            for training in itertools.cycle(runs):
                if time.monotonic() > stop:
                    break
                rows = [_row(sdk, rng, length) for length in (10, 25, 40, 60)]
                future = training.forward_backward(rows, "cross_entropy")
                training.optim_step(sdk.AdamParams(learning_rate=1e-4)).result(120)
                future.result(120)
                sampler = training.save_weights_and_get_sampling_client().result(120)
                params = sdk.SamplingParams(max_tokens=16, stop=[])
                got = sampler.sample(sdk.ModelInput.from_ints([rng.randrange(640)]), 4, params).result(120)
                assert [len(s.tokens) for s in got.sequences] == [16] * 4
                steps[number] += 1
            client.close("success").result(timeout=30)
        except Exception as error:
            failures.append(f"client {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=live, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(SOAK_S * 0.4)
    early = psutil.Process().memory_info().rss
    time.sleep(SOAK_S * 0.55)
    late = psutil.Process().memory_info().rss
    for thread in threads:
        thread.join(180)
    print(f"steps {steps}, MiB {early / 2**20:.0f} and {late / 2**20:.0f}")
    assert not failures and min(steps) > 0
    assert max(steps) / min(steps) <= 1.5, steps
    assert late < early * 1.25 + 64 * 2**20, (early, late)


def _row(sdk: Any, rng: random.Random, length: int) -> Any:
    start = rng.randrange(500)
    return datum(sdk, range(start, start + length), weights=[1.0] * (length - 1))
