"""Who is let in, what the OpenAI side offers of trained adapters, and that nonsense is refused and never breaks anything."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tinker_server import KEY, Served, datum

from rllm.errors import ConfigError
from rllm.serve.server import check_key, chosen_apis
from rllm.serve.tinker import proto


def test_without_the_key_nobody_gets_in_but_for_a_sign_of_life(served: Served) -> None:
    for path, body in (("/api/v1/create_session", {}), ("/v1/chat/completions", {})):
        for headers in ({}, {"X-API-Key": "tml-other"}, {"Authorization": "Bearer nope"}):
            answer = httpx.post(served.url + path, json=body, headers=headers)
            assert answer.status_code == 401 and "API key" in answer.text
    assert httpx.get(f"{served.url}/api/v1/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "key", "told"),
    [
        ("0.0.0.0", None, "clients must have a key"),
        ("::", None, "clients must have a key"),
        ("myhost", None, "clients must have a key"),
        ("0.0.0.0", "secret-enough", 'must begin with "tml-"'),
        ("127.0.0.1", "tml-x", "at least 8"),
    ],
)
def test_a_server_that_others_reach_needs_a_key_that_clients_can_send(host: str, key: str | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_key(host, key, tinker=True)
    for good, own in (("127.0.0.1", None), ("::1", None), ("localhost", None), ("0.0.0.0", "tml-long-enough")):
        check_key(good, own, tinker=True)


def test_an_api_that_is_not_there_is_an_error() -> None:
    assert chosen_apis("openai, tinker") == {"openai", "tinker"}
    with pytest.raises(ConfigError, match="'grpc' is not one of tinker, openai"):
        chosen_apis("tinker,grpc")


def test_saved_adapters_are_chatted_with_by_name(sdk: Any, client: Any, served: Served, training: Any) -> None:
    path = training.save_weights_for_sampler("poet").result(timeout=60).path
    chat = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY)
    names = [model.id for model in chat.models.list()]
    assert names[0] == "default" and {"default:poet", path} <= set(names)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 2"}], "max_tokens": 20, "temperature": 0.0}

    def answer(model: str) -> str:
        return chat.chat.completions.create(model=model, **asked).choices[0].message.content or ""

    assert answer("default:poet") == answer(path) != answer("default")
    pieces = chat.chat.completions.create(model="default:poet", stream=True, **asked)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert streamed == answer("default:poet")
    for _ in range(3):  # names follow what is saved
        training.forward_backward([datum(sdk, range(60, 90), weights=[1.0] * 29)], "cross_entropy")
        training.optim_step(sdk.AdamParams(learning_rate=1e-2))
    newer = training.save_weights_for_sampler("poet-2").result(timeout=60).path
    assert answer("default:poet-2") == answer(newer)
    sdk.RestClient(base_url=served.url, api_key=KEY).delete_checkpoint_from_tinker_path(path).result(timeout=20)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        answer("default:poet")


def test_a_session_lives_by_its_heartbeat(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model, session = served.model(), served.session()
    told = served.http.post("/session_heartbeat", json={"session_id": session})
    assert (told.status_code, told.json()) == (200, {"type": "session_heartbeat"})
    assert served.http.post("/session_heartbeat", json={"session_id": "no"}).status_code == 404
    store = served.service.store
    store._write("update sessions set seen = 5 where id = ?", session)
    assert store.silent_sessions(time.time() - 600) == [session]
    served.post("/session_heartbeat", {"session_id": session})
    assert store.silent_sessions(time.time() - 600) == [] and model in served.service.runs


def test_a_clone_of_a_sampler_gets_a_number_of_its_own(served: Served) -> None:
    body = {"session_id": served.session(), "sampling_session_seq_id": 0, "base_model": "default"}
    sampler = served.post("/create_sampling_session", body)["sampling_session_id"]
    numbers = [served.post("/join_sampling_session", {"sampling_session_id": sampler})["client_counter"] for _ in "ab"]
    assert numbers == [1, 2]


def test_a_cancelled_sample_stops(served: Served) -> None:
    body = {
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "base_model": "default",
        "sampling_params": {"max_tokens": 1000, "stop": []},
        "num_samples": 64,
    }
    reply = served.post("/asample", body)
    assert served.http.post("/cancel_future", json={"request_id": reply["request_id"]}).status_code == 204
    assert "cancelled" in served.result(reply)["error"]
    deadline = time.monotonic() + 10
    while served.service.backend.engine._running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not served.service.backend.engine._running
    slots = served.service.sampler.slots
    assert slots.free == 2 * served.service.backend.engine.max_batch and not slots._held


VALUES: list[Any] = [
    *(None, True, 0, -1, 2**70, 1.5, 1e308, "", "x", "tinker://a/weights/b", "../../etc/passwd", "\x00", "é" * 300),
    *([], [None], [1, "a"], [[[]]], {}, {"a": {}}, {"chunks": [{}]}, {"chunks": [{"tokens": [1, -2]}]}),
]


def good_bodies(model: str, session: str) -> dict[str, dict[str, Any]]:
    """One body for every route that would be taken as it is."""
    tensor = {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]}
    targets = {"data": [2, 3], "dtype": "int64", "shape": [2], "sparse_crow_indices": None}
    row = {
        "model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "loss_fn_inputs": {"target_tokens": targets, "weights": tensor},
    }
    given = {"data": [row], "loss_fn": "cross_entropy", "loss_fn_config": {}}
    sampling = {"max_tokens": 2, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": None, "seed": 1}
    return {
        "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session,
            "model_seq_id": 10**6,
            "base_model": "default",
            "lora_config": {"rank": 1},
        },
        "get_info": {"model_id": model},
        "forward_backward": {"forward_backward_input": given, "model_id": model},
        "forward": {"forward_input": given, "model_id": model},
        "optim_step": {"model_id": model, "adam_params": {"learning_rate": 0.0, "beta1": 0.9, "eps": 1e-8}},
        "save_weights": {"model_id": model, "path": "fuzz", "overwrite": True, "ttl_seconds": 9},
        "save_weights_for_sampler": {"model_id": model, "path": "fuzz", "kind": "snapshot"},
        "save_weights_external": {"model_id": model, "path": "fuzz"},
        "load_weights": {"model_id": model, "path": "tinker://a/weights/b", "optimizer": True},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1, "base_model": "default"},
        "join_sampling_session": {"sampling_session_id": "x"},
        "asample": {
            "prompt": row["model_input"],
            "base_model": "default",
            "sampling_params": sampling,
            "num_samples": 1,
            "topk_prompt_logprobs": 1,
            "target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]},
        },
        "retrieve_future": {"request_id": "x"},
        "cancel_future": {"request_id": "x"},
        "weights_info": {"tinker_path": "tinker://a/weights/b"},
        "unload_model": {"model_id": "nobody"},
        f"sessions/{session[:-1]}/finish": {"reason": {"type": "success"}},
        "telemetry": {"events": []},
        "client/config": {"sdk_version": "0"},
    }


def broken(rng: random.Random, value: Any) -> Any:
    """`value` with one thing in it changed, taken away or put in."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        changed, key = dict(value), rng.choice(list(value))
        how = rng.random()
        if how < 0.15:
            del changed[key]
        elif how < 0.25:
            changed[rng.choice(["extra", "", "data", "model_id", "type"])] = rng.choice(VALUES)
        else:
            changed[key] = broken(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        changed = list(value)
        changed[rng.randrange(len(value))] = broken(rng, rng.choice(value))
        return changed
    return rng.choice(VALUES)


def broken_bytes(rng: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        how, at = rng.random(), rng.randrange(len(changed) + 1)
        if how < 0.5 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif how < 0.75:
            changed[at:at] = rng.randbytes(rng.randint(1, 9))
        else:
            del changed[at : at + rng.randint(1, 20)]
    return bytes(changed)


def good_proto(model: str) -> bytes:
    message = proto.ForwardBackwardRequest(model_id=model, loss_fn="ppo")
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.5
    for _ in range(2):
        row = message.data.add()
        row.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
        for key, kind in (("target_tokens", "<i8"), ("logprobs", "<f4"), ("advantages", "<f4")):
            tensor = row.loss_fn_inputs[key]
            tensor.dense, tensor.dtype = np.ones(3, kind).tobytes(), proto.INT64 if kind == "<i8" else proto.FLOAT32
            tensor.shape.append(3)
    return message.SerializeToString()


def test_two_thousand_malformed_requests_are_refused_and_break_nothing(served: Served) -> None:
    rng = random.Random(4)
    model = served.model(rank=1)
    bodies, raw = good_bodies(model, served.session()), good_proto(model)
    refused = accepted = 0
    for i in range(2000):
        if i % 2:
            path, headers = "forward_backward", {"content-type": "application/x-protobuf"}
            if rng.random() < 0.05:
                headers["content-encoding"] = rng.choice(["zstd", "gzip", "x"])
            content = broken_bytes(rng, raw)
        else:
            path, headers = rng.choice(list(bodies)), {"content-type": "application/json"}
            content = json.dumps(broken(rng, bodies[path])).encode()
            if rng.random() < 0.1:
                content = broken_bytes(rng, content)
        answer = served.http.post(f"/{path}", content=content, headers=headers)
        assert answer.status_code < 500, (path, content, answer.text)
        if answer.status_code >= 400:
            refused += 1
            assert answer.json()["error"] and answer.json()["category"] == "user", (path, content)
        else:
            accepted += 1
    assert refused > 1000 and accepted > 50
    fine = served.model(rank=1)
    told = served.result(served.post("/optim_step", {"model_id": fine, "adam_params": {}}))
    assert told["metrics"]["unclipped_grad_l2:mean"] == 0.0


@pytest.mark.parametrize(
    "path",
    [
        "training_runs?limit=x",
        "training_runs?offset=-1",
        "training_runs/nobody",
        "training_runs/nobody/checkpoints",
        "training_runs/../../etc/checkpoints",
        "sessions/nobody",
        "samplers/nobody",
        "training_runs/a/checkpoints/weights/..%2F..%2Fx/archive",
        "training_runs/a/checkpoints/other/x/external_weights_urls",
        "files/a/weights/b/c?expires=1&signature=2",
        "nothing/here",
    ],
)
def test_what_is_not_there_is_told_so(served: Served, path: str) -> None:
    answer = served.http.get(f"/{path}")
    assert 400 <= answer.status_code < 500 and answer.json()
