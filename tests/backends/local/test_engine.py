"""The sampler draws exactly what the model says: same greedy tokens, same log-probabilities, same distribution."""

import asyncio
import threading
import time

import pytest
import torch
from tiny_models import VOCAB, random_adapter, with_peft

from rllm.backends.base import BASE, SamplingParams
from rllm.backends.local.engine import Engine
from rllm.backends.local.sampling import BatchParams, sample, uniforms

GREEDY = SamplingParams(24, temperature=0.0)


@pytest.fixture
def engine_of():
    engines = []

    def _engine(decoder, **settings):
        engine = Engine(decoder, **({"eos_ids": [], "max_batch": 8, "max_model_len": 128} | settings))
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


def generate(model, prompt, n):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=n,
        min_new_tokens=n,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_greedy_tokens_equal_transformers_generate_as_requests_join_and_leave(make, engine_of, kind):
    model, decoder, _ = make(kind)
    engine = engine_of(decoder, max_batch=4)
    limits = [24, 3, 17, 9, 24, 1, 12, 20, 5]
    asked = prompts([5, 12, 1, 30, 7, 9, 2, 21, 16])
    futures = []
    for prompt, limit in zip(asked, limits, strict=True):  # more requests than places, joining while others run
        futures.append(engine.submit(prompt, SamplingParams(limit, temperature=0.0)))
        time.sleep(0.005)
    for prompt, limit, completion in zip(asked, limits, results(futures), strict=True):
        assert completion.ids == generate(model, prompt, limit)
        assert completion.finish_reason == "length"


def test_greedy_tokens_of_the_default_model_equal_transformers_generate(engine_of):
    from transformers import AutoModelForCausalLM

    from rllm.backends.local.loading import DEFAULT_MODEL, load_decoder, load_tokenizer

    tokenizer = load_tokenizer(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32).eval()
    engine = engine_of(load_decoder(DEFAULT_MODEL), max_model_len=256)
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in (
            "Using the numbers [5, 4, 7], make 6. Output the final answer within <answer>...</answer>.",
            "Hello",
            "Using the numbers [1, 2, 7], make 21.\nSolution 1: 1 * 2 + 7\nSolution 2: none\nCheck each solution.",
        )
    ]
    got = results([engine.submit(prompt, SamplingParams(40, temperature=0.0)) for prompt in asked])
    assert [c.ids for c in got] == [generate(model, prompt, 40) for prompt in asked]


@pytest.mark.parametrize(("kind", "temperature"), [("qwen3", 1.0), ("llama", 0.6)])
def test_sampled_logprobs_equal_a_fresh_teacher_forced_forward_with_the_adapter_on(make, engine_of, kind, temperature):
    model, decoder, _ = make(kind)
    adapter = random_adapter(decoder)
    engine = engine_of(decoder)
    engine.publish({"default": adapter.snapshot(torch.float32)}, 1)
    asked = prompts([5, 12, 1, 30, 7])
    params = SamplingParams(20, temperature=temperature, seed=5)
    got = results([engine.submit(prompt, params, "default") for prompt in asked])
    base = results([engine.submit(prompt, params, BASE) for prompt in asked])
    assert [c.ids for c in got] != [c.ids for c in base]
    peft_model = with_peft(model, adapter)
    for prompt, completion in zip(asked, got, strict=True):
        ids = torch.tensor([prompt + completion.ids])
        with torch.no_grad():
            logits = peft_model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert (expected - torch.tensor(completion.logprobs)).abs().max() < 1e-4


def test_adapters_and_base_mixed_in_one_batch_each_get_their_own(make, engine_of):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    engine = engine_of(decoder)
    engine.publish({"default": adapter.snapshot(torch.float32)}, 1)
    asked = prompts([8, 8, 8, 8], seed=2)
    names = ["default", BASE, "default", BASE]
    mixed = results([engine.submit(p, GREEDY, name) for p, name in zip(asked, names, strict=True)])
    alone = [engine.submit(p, GREEDY, name).result(60) for p, name in zip(asked, names, strict=True)]
    assert [c.ids for c in mixed] == [c.ids for c in alone]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_tokens_follow_the_softmax(make, engine_of, temperature):
    """Chi-square over 20,000 first tokens: the statistic stays below the 99.99 % quantile."""
    model, decoder, _ = make("qwen3")
    (prompt,) = prompts([6])
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)
    engine = engine_of(decoder, max_batch=512, seed=1)
    n = 20_000
    params = SamplingParams(1, temperature=temperature)
    tokens = torch.tensor([c.ids[0] for c in results([engine.submit(prompt, params) for _ in range(n)])])
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    often = expected * n >= 5  # the test needs cells that are not nearly empty: the rare ones are pooled
    observed = torch.cat((counts[often], counts[~often].sum()[None]))
    wanted = torch.cat((expected[often], expected[~often].sum()[None])) * n
    statistic = ((observed - wanted) ** 2 / wanted.clamp(min=1e-9))[wanted > 0].sum().item()
    degrees = int((wanted > 0).sum()) - 1
    quantile = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3  # Wilson-Hilferty
    assert statistic < quantile


def test_a_seed_gives_the_same_tokens_in_any_company(make, engine_of):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder)
    prompt, *others = prompts([9, 4, 17, 11])
    params = SamplingParams(16, seed=42)
    alone = engine.submit(prompt, params).result(60)
    crowd = [engine.submit(other, SamplingParams(30, seed=i)) for i, other in enumerate(others)]
    assert engine.submit(prompt, params).result(60).ids == alone.ids
    results(crowd)
    assert engine.submit(prompt, SamplingParams(16, seed=43)).result(60).ids != alone.ids


def test_a_prompt_that_many_ask_is_prefilled_once_per_policy_version(make, engine_of):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder, max_batch=4)
    (prompt,) = prompts([10])
    results([engine.submit(prompt, SamplingParams(4)) for _ in range(12)])
    assert engine.stats()["prefill_tokens"] == 10 and engine.stats()["prefix_hits"] == 11
    engine.publish({}, 1)
    results([engine.submit(prompt, SamplingParams(4)) for _ in range(3)])
    assert engine.stats()["prefill_tokens"] == 20


def test_every_token_carries_the_version_that_sampled_it(make, engine_of):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder)
    (prompt,) = prompts([4])
    future = engine.submit(prompt, SamplingParams(100))
    while engine.stats()["generated_tokens"] < 5:
        time.sleep(0.001)
    engine.publish({}, 1)
    versions = future.result(60).versions
    assert versions == sorted(versions) and set(versions) == {0, 1} and len(versions) == 100


def test_stop_tokens_and_stop_strings_end_a_completion_and_stay_in_it(make, engine_of):
    _, decoder, _ = make("qwen3")
    (prompt,) = prompts([4])
    plain = engine_of(decoder).submit(prompt, GREEDY).result(60).ids
    third = plain[2]
    first = plain.index(third) + 1
    by_token = engine_of(decoder, eos_ids=[third]).submit(prompt, GREEDY).result(60)
    assert (by_token.ids, by_token.finish_reason) == (plain[:first], "stop")
    spelled = engine_of(decoder, decode=lambda ids: "".join(f"<{i}>" for i in ids))
    by_text = spelled.submit(prompt, SamplingParams(24, temperature=0.0, stop=(f"<{third}>",))).result(60)
    assert (by_text.ids, by_text.finish_reason) == (plain[:first], "stop")


def test_length_never_exceeds_what_the_model_or_the_call_allows(make, engine_of):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder, max_model_len=20)
    (prompt,) = prompts([15])
    assert len(engine.submit(prompt, SamplingParams(100)).result(60).ids) == 5
    with pytest.raises(ValueError, match=r"20 tokens.*model length of 20"):
        engine.submit(prompt + prompt[:5], SamplingParams(10))
    assert len(engine.submit(prompt, SamplingParams(2)).result(60).ids) == 2


def test_what_cannot_be_sampled_is_refused_at_once(make, engine_of):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder)
    with pytest.raises(ValueError, match="unknown adapter 'nobody'; published are base"):
        engine.submit([1], GREEDY, "nobody")
    with pytest.raises(ValueError, match="empty"):
        engine.submit([], GREEDY)
    with pytest.raises(ValueError, match="outside the vocabulary of 96"):
        engine.submit([96], GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; allowed: 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e-30}, "temperature is 1e-30"),
        ({"top_p": 0.0}, "top_p is 0.0; allowed: above 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1; allowed: 0"),
        ({"stop": ("",)}, "a stop string is empty"),
        ({"stop": ("x",)}, "stop strings need an engine that can turn ids into text"),
    ],
)
def test_sampling_settings_without_meaning_are_refused_with_what_is_allowed(make, engine_of, settings, message):
    _, decoder, _ = make("qwen3")
    with pytest.raises(ValueError, match=message):
        engine_of(decoder).submit([1], SamplingParams(4, **settings))


def test_a_publish_that_cannot_be_taken_is_told_to_whoever_published_and_sampling_goes_on(make, engine_of, monkeypatch):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder)

    def full(adapters):
        raise OSError("no space left")

    monkeypatch.setattr(engine, "_adopt", full)
    told: list[str | None] = []
    publisher = threading.Thread(target=lambda: told.append(_error_of(lambda: engine.publish({}, 1))), daemon=True)
    publisher.start()
    publisher.join(20)
    assert told == ["no space left"]
    assert len(engine.submit([5, 6], SamplingParams(3)).result(timeout=20).ids) == 3


def _error_of(work):
    try:
        work()
    except OSError as error:
        return str(error)
    return None


def test_a_publish_that_drops_an_adapter_fails_its_requests_only(make, engine_of):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder).snapshot(torch.float32)
    engine = engine_of(decoder, max_batch=2)
    engine.publish({"default": adapter, "old": adapter}, 1)
    names = ["old", "default", "old", "default"]
    futures = [engine.submit([1, 2], SamplingParams(100, seed=1), name) for name in names]
    while engine.stats()["generated_tokens"] < 5:
        time.sleep(0.001)
    engine.publish({"default": adapter}, 2)
    for future, name in zip(futures, names, strict=True):
        if name == "old":
            with pytest.raises(ValueError, match="unknown adapter 'old'; published are base, default"):
                future.result(60)
        else:
            assert len(future.result(60).ids) == 100


def test_requests_wait_when_keys_and_values_would_outgrow_their_bound(make, engine_of):
    model, decoder, _ = make("qwen3")
    one_token = 2 * 3 * 2 * 16 * 4  # keys and values, layers, heads, head size, bytes
    engine = engine_of(decoder, kv_bytes=3 * 64 * one_token)
    seen = []
    reserve = engine._cache.reserve
    engine._cache.reserve = lambda slots, positions: (seen.append(slots), reserve(slots, positions))  # pyright: ignore
    asked = prompts([40, 4, 9, 30, 7, 12, 100])
    limits = [24, 60, 50, 8, 57, 3, 20]  # the last alone is more than a third of the bound
    pairs = list(zip(asked, limits, strict=True))
    futures = [engine.submit(prompt, SamplingParams(limit, temperature=0.0)) for prompt, limit in pairs]
    got = results(futures)
    assert [c.ids for c in got] == [generate(model, prompt, limit) for prompt, limit in pairs]
    assert max(seen) == 3
    assert engine._cache.k.nbytes + engine._cache.v.nbytes <= engine.kv_bytes


def test_a_request_beyond_the_bound_runs_alone(make, engine_of):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder, kv_bytes=1)
    got = results([engine.submit([1, 2, 3], SamplingParams(10)) for _ in range(3)])
    assert [len(c.ids) for c in got] == [10, 10, 10]


def test_a_model_that_gives_nan_fails_the_request_with_the_reason(make, engine_of):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder).snapshot(torch.float32)
    broken = random_adapter(decoder, scale=float("nan")).snapshot(torch.float32)
    engine = engine_of(decoder)
    engine.publish({"default": adapter, "broken": broken}, 3)
    bad, good = (engine.submit([1, 2], SamplingParams(8), name) for name in ("broken", "default"))
    with pytest.raises(FloatingPointError, match=r"not finite at position 2 \(adapter 'broken', policy version 3\)"):
        bad.result(60)
    assert len(good.result(60).ids) == 8


def test_a_failing_stop_string_check_fails_its_request_only(make, engine_of):
    _, decoder, _ = make("qwen3")

    def decode(ids):
        raise UnicodeError("cannot decode")

    engine = engine_of(decoder, decode=decode)
    bad, good = engine.submit([1], SamplingParams(8, stop=("x",))), engine.submit([1], SamplingParams(8))
    with pytest.raises(UnicodeError):
        bad.result(60)
    assert len(good.result(60).ids) == 8


def test_a_cancelled_request_frees_its_place(make, engine_of):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder, max_batch=1)
    (prompt,) = prompts([4])

    async def run():
        endless = asyncio.create_task(engine.sample(prompt, SamplingParams(120)))
        await asyncio.sleep(0.02)
        endless.cancel()
        return await asyncio.wait_for(engine.sample(prompt, SamplingParams(3)), 30)

    assert len(asyncio.run(run()).ids) == 3
    assert engine.stats()["generated_tokens"] < 120


def test_every_token_is_heard_in_the_callers_loop_before_the_result(make, engine_of):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder)
    asked = prompts([4, 9, 4, 17])

    async def run():
        heard = [[] for _ in asked]
        here = asyncio.get_running_loop()

        def listener(i):
            def hear(token, logprob):
                assert asyncio.get_running_loop() is here
                heard[i].append((token, logprob))

            return hear

        calls = [engine.sample(p, SamplingParams(12 + i, seed=i), BASE, listener(i)) for i, p in enumerate(asked)]
        return heard, await asyncio.gather(*calls), [list(tokens) for tokens in heard]

    heard, completions, at_the_end = asyncio.run(run())
    assert heard == at_the_end == [list(zip(c.ids, c.logprobs, strict=True)) for c in completions]
    silent = results([engine.submit(p, SamplingParams(12 + i, seed=i)) for i, p in enumerate(asked)])
    assert [c.ids for c in silent] == [c.ids for c in completions]


def test_a_listener_whose_loop_has_ended_does_not_disturb_the_others(make, engine_of):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder)
    (prompt,) = prompts([4])
    started = []

    async def leave():
        left = asyncio.ensure_future(engine.sample(prompt, SamplingParams(100), BASE, lambda *_: None))
        started.append(engine.submit(prompt, SamplingParams(100)))
        await asyncio.sleep(0.01)
        assert not left.done()

    asyncio.run(leave())
    assert len(started[0].result(60).ids) == 100


def test_closing_fails_what_was_not_finished_and_ends_the_thread(make):
    _, decoder, _ = make("qwen3")
    engine = Engine(decoder, eos_ids=[], max_batch=1, max_model_len=128)
    futures = [engine.submit([1, 2], SamplingParams(120)) for _ in range(4)]
    engine.close()
    assert any(isinstance(f.exception(5), RuntimeError) for f in futures)
    assert not engine._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([1], GREEDY)


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(make, engine_of, monkeypatch):
    _, decoder, _ = make("qwen3")
    engine = engine_of(decoder)
    (prompt,) = prompts([4])
    good = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        engine.submit(prompt, GREEDY).result(60)
    monkeypatch.setattr(decoder, "logits", good)
    assert len(engine.submit(prompt, GREEDY).result(60).ids) == 24


def batch(rows, **settings):
    return BatchParams.of([SamplingParams(1, **settings)] * rows, 4, torch.device("cpu"))


def test_top_k_and_top_p_cut_the_tail_and_report_the_full_logprob():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(1000, 1)
    u = torch.from_numpy(uniforms(0, 1000))
    ids, logprobs = sample(logits, batch(1000, top_k=2), u)
    assert set(ids.tolist()) == {0, 1}
    assert logprobs[ids == 1][0].item() == pytest.approx(torch.tensor(0.3).log().item())
    ids, _ = sample(logits, batch(1000, top_p=0.9), u)
    assert set(ids.tolist()) == {0, 1, 2}


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]]).repeat(3, 1)
    ids, _ = sample(logits, batch(3), torch.tensor([0.0, 0.5, 1.0 - 2.0**-53], dtype=torch.float64))
    assert ids.tolist() == [0, 2, 2]


@pytest.mark.parametrize("vocab", [300, 5000])
def test_the_smallest_and_largest_uniform_numbers_draw_possible_tokens_whatever_the_sums_round_to(vocab):
    logits = torch.randn(300, vocab, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, :200] = float("-inf")
    logits[:, -20:] = float("-inf")
    params = BatchParams.of([SamplingParams(1)] * 300, vocab, torch.device("cpu"))
    for u in (0.0, 1.0 - 2.0**-53):
        ids, logprobs = sample(logits, params, torch.full((300,), u, dtype=torch.float64))
        assert logprobs.isfinite().all() and ids.min() >= 200 and ids.max() < vocab - 20


def test_a_large_vocabulary_is_sampled_by_its_exact_cumulative_distribution():
    logits = torch.randn(64, 9000, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, 1000:3000] = float("-inf")
    u = torch.from_numpy(uniforms(5, 64))
    ids, _ = sample(logits, BatchParams.of([SamplingParams(1)] * 64, 9000, torch.device("cpu")), u)
    cdf = torch.softmax(logits.double(), -1).cumsum(-1)
    before = torch.where(ids > 0, cdf.gather(1, (ids - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    assert (before - 1e-6 <= u).all() and (u <= cdf.gather(1, ids[:, None])[:, 0] + 1e-6).all()


def test_a_copy_with_the_adapter_added_in_samples_as_the_products_do_and_follows_a_publish(
    make, engine_of, monkeypatch
):
    _, decoder, _ = make("qwen3")
    base = decoder.fingerprint()
    first, second = (random_adapter(decoder, scale=scale).snapshot(decoder.dtype) for scale in (0.2, 0.4))

    def sampled(merged_bytes):
        monkeypatch.setattr("rllm.backends.local.engine.MERGED_BYTES", merged_bytes)
        engine, found = engine_of(decoder), []
        for version, pairs in enumerate((first, second)):
            engine.publish({"default": pairs}, version)
            params = SamplingParams(16, temperature=1.0, seed=3)
            found += results([engine.submit(prompt, params, "default") for prompt in prompts([5, 9])])
        return found, len(engine._merged)

    (merged, copies), (products, none) = sampled(2**30), sampled(0)
    assert (copies, none) == (1, 0)
    for one, other in zip(merged, products, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert merged[0].logprobs != merged[2].logprobs
    assert decoder.fingerprint() == base
