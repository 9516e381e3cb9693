"""Sampling by the SDK: what is told of tokens is what training computes, and every parameter does what it says."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from float64_model import Float64Model
from tinker_server import Served, datum

PROMPT = [30, 31, 32, 33, 34, 35]


@pytest.fixture
def sampler(training: Any) -> Any:
    """Of the trained adapter."""
    return training.save_weights_and_get_sampling_client().result(timeout=30)


def prompt_of(sdk: Any, ids: list[int] | None = None) -> Any:
    return sdk.ModelInput.from_ints(PROMPT if ids is None else ids)


def sample(sdk: Any, sampler: Any, n: int = 1, prompt: list[int] | None = None, **params: Any) -> Any:
    return sampler.sample(prompt_of(sdk, prompt), n, sdk.SamplingParams(**{"max_tokens": 8, **params})).result(
        timeout=60
    )


def test_sampled_logprobs_are_those_that_training_computes(sdk: Any, training: Any, sampler: Any) -> None:
    got = sample(sdk, sampler, 6, max_tokens=24, seed=1)
    rows = [datum(sdk, [*PROMPT, *s.tokens], weights=[1.0] * (len(PROMPT) + len(s.tokens) - 1)) for s in got.sequences]
    trained = training.forward(rows, "cross_entropy").result(timeout=60).loss_fn_outputs
    for sequence, out in zip(got.sequences, trained, strict=True):
        recomputed = out["logprobs"].to_numpy()[len(PROMPT) - 1 :]
        assert np.abs(np.array(sequence.logprobs) - recomputed).max() < 1e-4


def test_logprobs_of_a_prompt_are_those_of_float64(sdk: Any, served: Served, training: Any, sampler: Any) -> None:
    ids = list(range(100, 130))
    got = sampler.compute_logprobs(prompt_of(sdk, ids)).result(timeout=60)
    reference = Float64Model(served.service.runs[training.model_id])
    wanted = reference.logprobs(ids[:-1], torch.tensor(ids[1:])).detach().numpy()
    assert got[0] is None and len(got) == 30
    assert np.abs(np.array(got[1:]) - wanted).max() < 1e-4


def test_a_sampler_keeps_the_weights_it_was_made_with(sdk: Any, training: Any, sampler: Any) -> None:
    before = sampler.compute_logprobs(prompt_of(sdk)).result(timeout=60)
    training.forward_backward([datum(sdk, PROMPT, weights=[1.0] * 5)], "cross_entropy")
    training.optim_step(sdk.AdamParams(learning_rate=1e-2)).result(timeout=60)
    newer = training.save_weights_and_get_sampling_client().result(timeout=30)
    assert sampler.compute_logprobs(prompt_of(sdk)).result(timeout=60) == before
    assert newer.compute_logprobs(prompt_of(sdk)).result(timeout=60) != before


def test_inflight_samplers_take_each_newer_save(sdk: Any, training: Any) -> None:
    first = training.save_weights_and_get_sampling_client(kind="inflight").result(timeout=30)
    before = first.compute_logprobs(prompt_of(sdk)).result(timeout=60)
    training.forward_backward([datum(sdk, PROMPT, weights=[1.0] * 5)], "cross_entropy")
    training.optim_step(sdk.AdamParams(learning_rate=1e-2)).result(timeout=60)
    second = training.save_weights_and_get_sampling_client(kind="inflight").result(timeout=30)
    after = first.compute_logprobs(prompt_of(sdk)).result(timeout=60)
    assert after != before and after == second.compute_logprobs(prompt_of(sdk)).result(timeout=60)


def test_a_seed_repeats_a_sample_and_completions_of_one_request_differ(sdk: Any, sampler: Any) -> None:
    one, again, other = (sample(sdk, sampler, seed=seed, max_tokens=16).sequences[0].tokens for seed in (7, 7, 8))
    assert one == again != other
    four = [s.tokens for s in sample(sdk, sampler, 4, seed=7, max_tokens=16).sequences]
    assert four[0] == one and len({tuple(tokens) for tokens in four}) == 4
    free = [sample(sdk, sampler, max_tokens=16).sequences[0].tokens for _ in range(2)]
    assert free[0] != free[1]


def test_stops_end_a_completion_and_an_empty_list_takes_even_the_end_of_turn_away(
    sdk: Any, client: Any, served: Served
) -> None:
    base = client.create_sampling_client(base_model="default").result(timeout=30)
    tokenizer = served.service.backend.tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 2?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    plain = sample(sdk, base, prompt=ids, max_tokens=200, temperature=0.0).sequences[0]
    assert (plain.stop_reason, plain.tokens[-1]) == ("stop", 2)
    endless = sample(sdk, base, prompt=ids, max_tokens=len(plain.tokens) + 5, temperature=0.0, stop=[]).sequences[0]
    assert endless.stop_reason == "length"
    assert endless.tokens[: len(plain.tokens)] == plain.tokens
    token = plain.tokens[2]
    until = plain.tokens.index(token) + 1
    by_id = sample(sdk, base, prompt=ids, max_tokens=200, temperature=0.0, stop=[token]).sequences[0]
    assert (by_id.stop_reason, by_id.tokens) == ("stop", plain.tokens[:until])
    word = tokenizer.decode(plain.tokens[:3])[-2:]
    by_text = sample(sdk, base, prompt=ids, max_tokens=200, temperature=0.0, stop=word).sequences[0]
    assert by_text.stop_reason == "stop" and word in tokenizer.decode(by_text.tokens)
    assert word not in tokenizer.decode(by_text.tokens[:-1])


def test_temperature_top_k_and_top_p_shape_what_is_sampled(sdk: Any, sampler: Any) -> None:
    greedy = {tuple(s.tokens) for s in sample(sdk, sampler, 4, temperature=0.0).sequences}
    assert len(greedy) == 1
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        assert {tuple(s.tokens) for s in sample(sdk, sampler, 4, **cut).sequences} == greedy
    hot = sample(sdk, sampler, 2, temperature=2.0, seed=3, max_tokens=2)
    told = sampler.sample(
        prompt_of(sdk), 1, sdk.SamplingParams(max_tokens=2, temperature=2.0, seed=3), topk_sample_logprobs=640
    ).result(timeout=60)
    chances = dict(told.sequences[0].topk_logprobs[0])
    assert hot.sequences[0].logprobs[0] == pytest.approx(chances[hot.sequences[0].tokens[0]], abs=1e-4)
    assert sum(math.exp(value) for value in chances.values()) == pytest.approx(1.0, abs=1e-4)


def test_the_likeliest_tokens_are_told_for_prompt_and_completion(sdk: Any, sampler: Any) -> None:
    got = sampler.sample(
        prompt_of(sdk),
        2,
        sdk.SamplingParams(max_tokens=5, seed=2),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=640,
    ).result(timeout=60)
    assert got.topk_prompt_logprobs[0] is None and [len(row) for row in got.topk_prompt_logprobs[1:]] == [3] * 5
    for row, own in zip(got.topk_prompt_logprobs[1:], got.prompt_logprobs[1:], strict=True):
        values = [value for _, value in row]
        assert values == sorted(values, reverse=True) and values[0] >= own - 1e-5
    for sequence in got.sequences:
        for token, value, row in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert dict(row)[token] == pytest.approx(value, abs=1e-4)


def test_given_ids_are_scored_at_each_place_of_the_prompt(sdk: Any, sampler: Any) -> None:
    every = dict(
        enumerate(
            sampler.sample(prompt_of(sdk), 1, sdk.SamplingParams(max_tokens=1), topk_prompt_logprobs=640)
            .result(timeout=60)
            .topk_prompt_logprobs
        )
    )
    ids = torch.full((5, 2), -1, dtype=torch.int64)
    ids[1, 0], ids[4, 1] = 7, 9
    for tensor in (sdk.TensorData.from_torch(ids), sdk.TensorData.from_torch_sparse(ids, pad_value=-1)):
        told = sampler.sample(
            prompt_of(sdk), 1, sdk.SamplingParams(max_tokens=1), target_prompt_logprobs=tensor
        ).result(timeout=60)
        values = told.target_prompt_logprobs.to_torch()
        assert values.shape == (5, 2)
        assert values[1, 0].item() == pytest.approx(dict(every[2])[7], abs=1e-5)
        assert values[4, 1].item() == pytest.approx(dict(every[5])[9], abs=1e-5)
        assert values.count_nonzero() == 2


def test_alternatives_are_drawn_at_each_place_of_the_prompt(sdk: Any, sampler: Any) -> None:
    told = sampler.sample(
        prompt_of(sdk), 1, sdk.SamplingParams(max_tokens=1, seed=1), topk_prompt_logprobs=640, prompt_alt_tokens_k=200
    ).result(timeout=60)
    tokens, logprobs = (part.to_torch() for part in (told.prompt_alt_tokens.tokens, told.prompt_alt_tokens.logprobs))
    assert tokens.shape == (5, 200)
    for place in range(5):
        chances = dict(told.topk_prompt_logprobs[place + 1])
        assert np.allclose([chances[t] for t in tokens[place].tolist()], logprobs[place], atol=1e-5)
        best = max(chances, key=chances.__getitem__)
        share = (tokens[place] == best).float().mean().item()
        assert share == pytest.approx(math.exp(chances[best]), abs=0.15)


def test_only_the_last_tokens_of_a_prompt_are_scored_where_so_asked(sdk: Any, sampler: Any) -> None:
    whole = sampler.compute_logprobs(prompt_of(sdk)).result(timeout=60)
    last = sampler.compute_logprobs(prompt_of(sdk), prompt_logprobs_last_n=2).result(timeout=60)
    assert last[:4] == [None] * 4 and last[4:] == pytest.approx(whole[4:], abs=1e-5)


def test_many_samplers_of_many_adapters_are_sampled_at_once_each_as_if_alone(
    sdk: Any, served: Served, client: Any
) -> None:
    samplers = [client.create_sampling_client(base_model="default").result(timeout=30)]
    for rank in (1, 3, 8):
        made = client.create_lora_training_client("default", rank=rank, seed=rank).result(timeout=30)
        made.forward_backward([datum(sdk, range(20, 40), weights=[1.0] * 19)], "cross_entropy")
        made.optim_step(sdk.AdamParams(learning_rate=1e-2))
        samplers.append(made.save_weights_and_get_sampling_client().result(timeout=60))
    alone = [sample(sdk, one, seed=5, max_tokens=20).sequences[0] for one in samplers]
    together = [one.sample(prompt_of(sdk), 1, sdk.SamplingParams(max_tokens=20, seed=5)) for one in samplers * 5]
    for i, future in enumerate(together):
        got, wanted = future.result(timeout=60).sequences[0], alone[i % 4]
        assert got.tokens == wanted.tokens
        assert np.allclose(got.logprobs, wanted.logprobs, atol=1e-4)
    assert len({tuple(one.tokens) for one in alone}) > 1


def test_adapters_used_least_lately_make_room_and_come_back_from_disk(
    sdk: Any, served: Served, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = client.create_lora_training_client("default", rank=4, seed=1).result(timeout=30)
    pool, samplers = served.service.pool, []
    monkeypatch.setattr(pool, "most_bytes", 1)
    for _ in range(3):
        training.forward_backward([datum(sdk, range(20, 40), weights=[1.0] * 19)], "cross_entropy")
        training.optim_step(sdk.AdamParams(learning_rate=1e-2))
        samplers.append(training.save_weights_and_get_sampling_client().result(timeout=60))
    asked = [one.compute_logprobs(prompt_of(sdk)).result(timeout=60) for one in samplers]
    assert len(pool.paths()) == 1 and set(served.service.backend.engine.adapters) >= set(pool.paths())
    assert [one.compute_logprobs(prompt_of(sdk)).result(timeout=60) for one in samplers] == asked
    assert asked[0] != asked[1] != asked[2]


def test_a_crowd_is_told_to_come_back_and_is_served_in_the_end(
    sdk: Any, served: Served, sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.service.sampler.slots, "most_waiting", 4)
    monkeypatch.setattr(served.service.sampler.slots, "free", 2)
    refused = served.http.post(
        "/asample",
        json={"prompt": {"chunks": [{"tokens": PROMPT}]}, "base_model": "default", "num_samples": 100},
    )
    assert refused.status_code == 429 and "try again" in refused.json()["error"]
    futures = [sampler.sample(prompt_of(sdk), 1, sdk.SamplingParams(max_tokens=4, stop=[])) for _ in range(24)]
    with ThreadPoolExecutor(24) as threads:
        assert all(len(f.sequences[0].tokens) == 4 for f in threads.map(lambda f: f.result(timeout=60), futures))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt": {"chunks": [{"tokens": []}]}}, "0 tokens"),
        ({"prompt": {"chunks": [{"tokens": [640]}]}}, "outside of the vocabulary of 640"),
        ({"prompt": {"chunks": [{"tokens": [1] * 1024}]}}, "--set model.max_model_len"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "kind image"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"sampling_params": {"stop": ["", "x"]}}, "stop string is empty"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p: not known"),
        ({"num_samples": 0}, "num_samples"),
        ({"base_model": "gpt"}, "'gpt' is not served"),
        ({"base_model": None, "model_path": "tinker://a/weights"}, "no checkpoint path"),
        ({"base_model": None, "model_path": "tinker://a/weights/../../x"}, "no checkpoint path"),
        ({"base_model": None, "sampling_session_id": "nobody"}, "no sampling session"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 9}, "prompt_logprobs_last_n"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "a row for each token but the first"),
    ],
)
def test_what_cannot_be_sampled_is_refused(served: Served, change: dict[str, Any], told: str) -> None:
    body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "base_model": "default", "sampling_params": {}, **change}
    answer = served.http.post("/asample", json=body)
    assert 400 <= answer.status_code < 500 and told in answer.json()["error"], answer.text
