"""The sampler on the plain path draws what the model says, whoever else is in the batch: joining, leaving, windows, states."""

import copy
import threading

import pytest
import torch
from tiny_models import VOCAB, random_adapter, with_peft

from rllm.backends.base import BASE, Datum, LossSpec, SamplingParams
from rllm.backends.local.learner import Learner
from rllm.backends.local.plain.engine import PlainEngine

# Batches of keys and values, of windows, of ALiBi; a cache for each row; none.
KINDS = ["gpt2", "gpt_neox", "gemma2", "phi3", "qwen3_moe", "opt", "bloom", "mamba", "rwkv"]


@pytest.fixture
def engine_of():
    engines = []

    def _engine(model, **settings):
        engine = PlainEngine(model, **({"eos_ids": [], "max_batch": 8, "max_model_len": 128} | settings))
        engines.append(engine)
        return engine

    yield _engine
    for engine in engines:
        engine.close()


def prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def results(futures):
    return [future.result(timeout=60) for future in futures]


def generate(model, prompt, n, kind):
    """Greedy, by transformers; RWKV, whose state its `generate` does not carry on here, token by token."""
    ids = torch.tensor([prompt])
    if kind == "rwkv":
        for _ in range(n):
            with torch.no_grad():
                ids = torch.cat((ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
        return ids[0, len(prompt) :].tolist()
    settings = {"do_sample": False, "max_new_tokens": n, "min_new_tokens": n, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers_generate_as_requests_join_and_leave(make_plain, engine_of, kind):
    model, plain, _ = make_plain(kind)
    engine = engine_of(plain, max_batch=4)
    limits = [20, 3, 15, 1, 18, 6]
    asked = prompts([5, 12, 1, 30, 2, 16])
    futures = [engine.submit(p, SamplingParams(n, temperature=0.0)) for p, n in zip(asked, limits, strict=True)]
    for prompt, limit, answer in zip(asked, limits, results(futures), strict=True):
        assert answer.ids == generate(model, prompt, limit, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_the_trainers_and_a_seed_gives_its_tokens_alone_and_in_a_crowd(
    make_plain, engine_of, kind
):
    _, plain, _ = make_plain(kind)
    adapter = random_adapter(plain)
    engine = engine_of(plain, max_batch=6)
    engine.publish({"default": adapter.snapshot(torch.float32)}, 1)
    asked = [*prompts([4, 4, 19, 1, 11, 25], seed=3)]
    asked[1] = asked[0]  # two of one group
    params = [SamplingParams(10 + i, temperature=0.9, seed=i) for i in range(len(asked))]
    mixed = ["default", "default", BASE, "default", BASE, "default"]
    crowd = results([engine.submit(p, s, a) for p, s, a in zip(asked, params, mixed, strict=True)])
    learner = Learner(plain, {"default": adapter})
    for prompt, setting, name, answer in zip(asked, params, mixed, crowd, strict=True):
        row = Datum([*prompt, *answer.ids], [0] * len(prompt) + [1] * len(answer.ids), temperature=0.9)
        row.adapter = name
        expected = learner.logprobs([row], name)[0][len(prompt) :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        alone = engine.submit(prompt, setting, name).result(timeout=60)
        assert alone.ids == answer.ids
        assert alone.logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    assert crowd[0].ids != crowd[1].ids


def test_a_late_request_does_not_wait_for_the_rows_under_way_and_changes_none_of_them(make_plain, engine_of):
    model, plain, _ = make_plain("gemma2")
    engine = engine_of(plain)
    long, short, longer = prompts([20, 3, 40], seed=5)
    underway = threading.Event()
    seen = []

    def heard(token, _):
        seen.append(token)
        if len(seen) == 30:
            underway.set()

    first = engine.submit(long, SamplingParams(80, temperature=0.0), on_token=heard)
    assert underway.wait(30)
    late = [engine.submit(p, SamplingParams(4, temperature=0.0)) for p in (short, longer)]
    answers = results(late)
    assert not first.done() or len(seen) >= 80
    for prompt, answer in zip((short, longer), answers, strict=True):
        assert answer.ids == generate(model, prompt, 4, "gemma2")
    assert first.result(timeout=60).ids == generate(model, long, 80, "gemma2")


def test_a_cancelled_row_frees_its_place_and_a_dropped_adapter_fails_its_rows(make_plain, engine_of):
    _, plain, _ = make_plain("gpt2")
    engine = engine_of(plain, max_batch=2)
    pairs = random_adapter(plain).snapshot(torch.float32)
    engine.publish({"a": pairs}, 1)
    one, two, three = prompts([5, 9, 7])
    begun = threading.Event()
    cancelled = engine.submit(one, SamplingParams(120, temperature=0.0), on_token=lambda *_: begun.set())
    kept = engine.submit(two, SamplingParams(100, temperature=0.0), "a")
    assert begun.wait(30)
    cancelled.cancel()
    assert len(engine.submit(three, SamplingParams(3)).result(timeout=60).ids) == 3
    engine.publish({}, 2)
    if not kept.done() or kept.exception() is not None:
        with pytest.raises(ValueError, match="unknown adapter 'a'"):
            kept.result(timeout=60)
    assert len(engine.submit(three, SamplingParams(3)).result(timeout=60).ids) == 3


def test_a_new_adapter_is_sampled_from_the_next_token_on(make_plain, engine_of):
    model, plain, _ = make_plain("olmo2")
    engine = engine_of(plain)
    (prompt,) = prompts([8])
    before = engine.submit(prompt, SamplingParams(12, temperature=0.0)).result(timeout=60)
    adapter = random_adapter(plain)
    engine.publish({"default": adapter.snapshot(torch.float32)}, 5)
    after = engine.submit(prompt, SamplingParams(12, temperature=0.0), "default").result(timeout=60)
    assert after.versions == [5] * 12 and before.ids != after.ids
    assert before.ids == generate(model, prompt, 12, "olmo2")
    assert after.ids == generate(with_peft(copy.deepcopy(model), adapter), prompt, 12, "olmo2")


def test_stop_strings_ends_of_turn_and_memory_are_heeded(make_plain, engine_of):
    _, plain, _ = make_plain("gpt2")
    (prompt,) = prompts([8])
    tokens = engine_of(plain).submit(prompt, SamplingParams(12, temperature=0.0)).result(timeout=60).ids
    ended = engine_of(plain, eos_ids=[tokens[3]])
    answer = ended.submit(prompt, SamplingParams(12, temperature=0.0)).result(timeout=60)
    assert answer.ids == tokens[: tokens.index(tokens[3]) + 1] and answer.finish_reason == "stop"
    told = engine_of(plain, decode=lambda ids: "".join(chr(40 + i) for i in ids))
    text = "".join(chr(40 + i) for i in tokens[2:4])
    answer = told.submit(prompt, SamplingParams(12, temperature=0.0, stop=[text])).result(timeout=60)
    assert answer.finish_reason == "stop" and answer.ids == tokens[: len(answer.ids)] and len(answer.ids) <= 4
    # Room for one row at a time: all are answered, none beside another.
    narrow = engine_of(plain, kv_bytes=plain.traits.cache_bytes * 30)
    answers = results([narrow.submit(prompt, SamplingParams(12, temperature=0.0)) for _ in range(3)])
    assert [a.ids for a in answers] == [tokens] * 3
    assert narrow.stats()["decode_steps"] == 3 * 11


def test_one_prompt_is_read_once_for_a_group(make_plain, engine_of):
    _, plain, _ = make_plain("phi3")
    engine = engine_of(plain)
    (prompt,) = prompts([9])
    # Asked for between two tokens, so that all are waiting when the sampler looks.
    engine._command(lambda: [engine.submit(prompt, SamplingParams(3, seed=i)) for i in range(4)])
    engine.submit(prompt, SamplingParams(3, seed=9)).result(timeout=60)
    stats = engine.stats()
    assert stats["prefill_tokens"] <= 2 * 9 and stats["prefix_hits"] >= 3


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "qwen3_moe"])
def test_sampling_and_training_at_the_same_time_give_what_each_gives_alone(make_plain, engine_of, kind):
    _, plain, _ = make_plain(kind)
    sampled, trained = random_adapter(plain), random_adapter(plain, scale=0.1)
    engine = engine_of(plain)
    engine.publish({"default": sampled.snapshot(torch.float32)}, 1)
    asked = prompts([9, 20, 4], seed=7)
    rows = prompts([12, 30], seed=8)
    data = [Datum(p, [int(t > 0) for t in range(len(p))], [1.0] * len(p), [0.0] * len(p)) for p in rows]

    def sample():
        return [engine.submit(p, SamplingParams(30, seed=i), "default") for i, p in enumerate(asked)]

    def gradients():
        trained.zero_grad()
        Learner(plain, {"default": trained}).forward_backward(data, LossSpec("cross_entropy"))
        return [p.grad.clone() for p in trained.parameters()]

    alone, expected = [answer.ids for answer in results(sample())], gradients()
    futures, rounds = sample(), 0
    while rounds < 3 or not all(future.done() for future in futures):
        torch.testing.assert_close(gradients(), expected, atol=1e-6, rtol=1e-5)
        rounds += 1
    assert [answer.ids for answer in results(futures)] == alone


@pytest.mark.parametrize("kind", ["phi3", "gemma2"])
def test_the_room_of_a_long_row_is_given_back_when_it_leaves(make_plain, engine_of, kind):
    _, plain, _ = make_plain(kind)
    engine = engine_of(plain)
    long, short = prompts([60, 4], seed=9)
    lengths = []

    def heard(*_):
        (batch,) = engine._batches
        lengths.append(
            (len(batch.requests), batch.mask.shape[1], [layer.keys.shape[-2] for layer in batch.cache.layers])
        )

    # Asked for between two tokens, so that both begin together.
    asked = []
    engine._command(
        lambda: asked.extend(
            (engine.submit(long, SamplingParams(3)), engine.submit(short, SamplingParams(8), on_token=heard))
        )
    )
    results(asked)
    # The cache lacks the token that is handed over: after the first, one row of 4, 5, ... tokens is left of two of 60.
    assert lengths[0][:2] == (2, 60) and lengths[-1][:2] == (1, 4 + 7)
    assert lengths[-1][2] == [11] * len(lengths[-1][2])
