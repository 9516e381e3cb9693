"""The CUDA path against the plain one, in float32, with Triton's interpreter on the CPU (or on a GPU where there is one).

Triton comes with torch for CUDA; without it these tests are skipped. Run them on a CPU with
    pip install triton && TRITON_INTERPRET=1 pytest tests/backends/local/cuda
"""

import os
import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is asked for with TRITON_INTERPRET=1", allow_module_level=True)

from rllm.backends.base import AdamParams, Datum, LossSpec, SamplingParams
from rllm.backends.local.cuda import graphs, head, train
from rllm.backends.local.cuda.bank import AdapterBank
from rllm.backends.local.cuda.engine import CudaEngine
from rllm.backends.local.engine import Engine
from rllm.backends.local.learner import Learner
from rllm.backends.local.model import Decoder, DecoderConfig, PackedCausal
from rllm.lora.adapter import LoraAdapter

VOCAB = 700


def decoder(qk_norm=True, qkv_bias=False, layers=1):
    config = DecoderConfig(VOCAB, 96, layers, 6, 2, 32, 160, 1e-6, 512, True, qk_norm, qkv_bias)
    torch.manual_seed(0)
    model = Decoder(config, 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32))
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = noise * 0.2 if parameter.dim() > 1 else 1.0 + noise * 0.1
    return model


def adapter_on(model, rank=4, leave_out=("lm_head",), seed=0, **settings):
    names = [name for name in model.linear_shapes() if not any(part in name for part in leave_out)]
    adapter = LoraAdapter(model.linear_shapes(), names, model.block_layout(), rank=rank, alpha=8, seed=seed, **settings)
    for b in adapter.b.values():
        b.data = torch.randn_like(b) * 0.1
    return adapter


def attended(q, k, v, q_bounds, k_bounds, causal):
    """(out, log of the sums [heads, N]) as flash attention gives them: nothing at tokens outside the bounds."""
    out, lse = torch.full_like(q, float("nan")), torch.full((q.shape[1], len(q)), float("nan"))
    group = q.shape[1] // k.shape[1]
    ranges = zip(*(pairwise(bounds.tolist()) for bounds in (q_bounds, k_bounds)), strict=True)
    for (start, end), (first, last) in ranges:
        keys, values = (t[first:last].repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
        lse[:, start:end] = scores.logsumexp(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, lse


@pytest.fixture
def plain_attention(monkeypatch):
    """Attention by torch's operators: flash and cuDNN need the device."""

    def flash(q, k, v, q_bounds, k_bounds, longest_q, longest_k, causal):
        assert max(b - a for a, b in pairwise(q_bounds.tolist())) <= longest_q
        assert max(b - a for a, b in pairwise(k_bounds.tolist())) <= longest_k
        return *attended(q, k, v, q_bounds, k_bounds, causal), torch.zeros(1), torch.zeros(1)

    def flash_backward(grad, q, k, v, out, lse, state, unused, q_bounds, k_bounds, longest_q, longest_k, causal):
        """From `lse` and `out` alone, as the kernels do, so that they may be those of more keys."""
        dq, dk, dv = (torch.full_like(t, float("nan")) for t in (q, k, v))
        group = q.shape[1] // k.shape[1]
        ranges = zip(*(pairwise(bounds.tolist()) for bounds in (q_bounds, k_bounds)), strict=True)
        for (start, end), (first, last) in ranges:
            keys, values = (t[first:last].repeat_interleave(group, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * q.shape[-1] ** -0.5
            p = (scores - lse[:, start:end, None]).exp()
            p = p.tril() if causal else p
            g = grad[start:end]
            delta = (g * out[start:end]).sum(-1).T[..., None]
            ds = p * (torch.einsum("qhd,khd->hqk", g, values) - delta) * q.shape[-1] ** -0.5
            dq[start:end] = torch.einsum("hqk,khd->qhd", ds, keys)
            dk[first:last] = torch.einsum("hqk,qhd->khd", ds, q[start:end]).unflatten(1, (-1, group)).sum(2)
            dv[first:last] = torch.einsum("hqk,qhd->khd", p, g).unflatten(1, (-1, group)).sum(2)
        return dq, dk, dv

    monkeypatch.setattr(train, "flash", flash)
    monkeypatch.setattr(train, "flash_backward", flash_backward)
    monkeypatch.setattr(train, "cudnn", lambda q, k, v, layout: flash(q, k, v, *_all_alike(layout)))
    monkeypatch.setattr(train, "cudnn_backward", lambda *known, layout: flash_backward(*known, *_all_alike(layout)))


def _all_alike(layout):
    return layout.bounds, layout.bounds, layout.longest, layout.longest, True


def relative(a, b):
    return ((a - b).abs().max() / (a.abs().max() + 1e-9)).item()


@pytest.mark.parametrize(("qk_norm", "qkv_bias"), [(True, False), (False, True)])
@pytest.mark.parametrize("full", [False, True])
def test_a_fused_layer_has_the_values_and_gradients_of_the_plain_one(plain_attention, qk_norm, qkv_bias, full):
    model = decoder(qk_norm, qkv_bias)
    adapter = adapter_on(model)
    if full:
        model.full_finetuning()
    layout, layer = PackedCausal([5, 17, 9]), model.layers[0]
    x, grad = torch.randn(31, 96, requires_grad=True), torch.randn(31, 96)
    matrices, weights = list(adapter.parameters()), {p: torch.zeros_like(p) for p in layer.parameters()}

    def pairs():
        return None if full else adapter.pairs(torch.float32)

    y = layer(x, *model._rotary(layout.positions), layout, pairs())
    expected = torch.autograd.grad((y * grad).sum(), [x, *(weights if full else matrices)])
    ours = train.fused_layer(layer, x, model.rotary_tables(), layout, pairs(), weights if full else None)
    found = list(torch.autograd.grad((ours * grad).sum(), [x, *([] if full else matrices)]))
    found += weights.values() if full else []
    assert relative(y, ours) < 1e-5
    assert max(relative(a, b) for a, b in zip(expected, found, strict=True)) < 1e-5


def test_gradients_added_up_over_passes_are_those_of_autograd(plain_attention):
    model = decoder()
    adapter = adapter_on(model, leave_out=("lm_head", "v_proj"), rank_pattern={"o_proj": 6})
    layout, layer = PackedCausal([5, 17, 9]), model.layers[0]
    x, grad = torch.randn(31, 96), torch.randn(31, 96)
    pairs, finish = adapter.accumulating(torch.float32)
    for _ in range(2):
        (train.fused_layer(layer, x, model.rotary_tables(), layout, pairs) * grad).sum().backward()
    finish()
    found = [parameter.grad.clone() for parameter in adapter.parameters()]
    for parameter in adapter.parameters():
        parameter.grad = None
    plain = layer(x, *model._rotary(layout.positions), layout, adapter.pairs(torch.float32))
    (2 * (plain * grad).sum()).backward()
    assert max(relative(p.grad, f) for p, f in zip(adapter.parameters(), found, strict=True)) < 1e-5


def rows_of(lengths, names, seed=0):
    numbers, rows = random.Random(seed), []
    for i, length in enumerate(lengths):
        row = Datum([numbers.randrange(VOCAB) for _ in range(length)], [0] * 3 + [1] * (length - 3))
        row.logprobs, row.advantages = [-6.0] * length, [(-1.0) ** i] * length
        row.adapter = names[i % len(names)]
        rows.append(row)
    return rows


@pytest.mark.parametrize("kind", ["one", "two", "full"])
@pytest.mark.parametrize("lengths", [(12, 12, 12, 12), (5, 17, 9, 31, 8, 20)])
def test_the_learner_gives_the_same_gradients_step_after_step_on_both_paths(
    monkeypatch, plain_attention, kind, lengths
):
    """Products with the low-rank term riding along, passes of fixed shape, sums over micro-batches; adapters change and take turns, and
    the sampler moves the weights in between."""
    monkeypatch.setattr(graphs, "TOKEN_STEP", 16)
    monkeypatch.setattr(graphs, "LEAST_LENGTH", 8)
    learners, found = [], []
    for fused in (False, True):
        model = decoder(layers=2)
        model.fused = fused
        adapters = {
            "one": lambda m: {"default": adapter_on(m, 4)},
            "two": lambda m: {"default": adapter_on(m, 4), "b": adapter_on(m, 12, ("lm_head", "v_proj"), 1)},
            "full": lambda m: {},
        }[kind](model)
        learners.append(Learner(model, adapters, micro_batch_tokens=24))
    for step in range(4):
        if step == 2 and kind != "full":
            bank = AdapterBank(learners[1].model)
            held = {name: a.snapshot(torch.float32) for name, a in learners[1].adapters.items()}
            bank.ensure(held, list(held), [])
            assert all(bank.equals(name, pairs) for name, pairs in held.items())
        found = []
        for learner in learners:
            metrics = learner.forward_backward(
                rows_of(lengths, [*learner.adapters] or ["default"], step), LossSpec(clip_low=9, clip_high=9)
            )
            learner._gradients_to_masters()
            found.append((metrics["loss"], [p.grad.clone() for p in learner.trainable()]))
            learner.optim_step(AdamParams(lr=1e-3, eps=1e-3))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
        assert max(relative(a, b) for a, b in zip(found[0][1], found[1][1], strict=True)) < 1e-4
    assert any(learners[1]._layers._graphs)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("most", [1000, 70])
def test_prompts_that_rows_share_are_passed_once_and_give_the_same_gradients(monkeypatch, plain_attention, kind, most):
    """Rows of three prompts and one alone, some without a token after the first that is trained, in one pass and in several."""
    monkeypatch.setattr(graphs, "TOKEN_STEP", 16)
    monkeypatch.setattr(graphs, "LEAST_LENGTH", 8)
    numbers = random.Random(3)
    prompts = [[numbers.randrange(VOCAB) for _ in range(length)] for length in (12, 20, 9, 30)]
    rows = []
    for i, (owner, tail) in enumerate([(0, 5), (1, 9), (0, 1), (2, 4), (1, 14), (0, 7), (1, 3), (3, 6), (2, 11)]):
        ids = prompts[owner] + [numbers.randrange(VOCAB) for _ in range(tail)]
        mask = [0] * len(prompts[owner]) + [1] * tail
        if tail > 8:  # a second turn
            mask[-6:-3] = [0] * 3
        rows.append(Datum(ids, mask, [(-1.0) ** i * m for m in mask], [-6.0 * m for m in mask]))
    passed, found = [], []
    forward = train.layer_forward
    monkeypatch.setattr(
        train, "layer_forward", lambda layer, x, *rest: passed.append(len(x)) or forward(layer, x, *rest)
    )
    monkeypatch.setattr(graphs, "layer_forward", train.layer_forward)
    for fused, shares in ((False, False), (True, False), (True, True)):
        model = decoder(layers=2)
        model.fused = fused
        learner = Learner(model, {} if kind == "full" else {"default": adapter_on(model)}, micro_batch_tokens=most)
        learner.shares_prompts = shares
        passed.clear()
        for _ in range(3):  # the third in fixed shapes
            metrics = learner.forward_backward(rows, LossSpec(clip_low=9, clip_high=9))
        learner._gradients_to_masters()
        found.append((metrics["loss"], [p.grad.clone() for p in learner.trainable()], sum(passed[:2]), learner))
        scores = learner.logprobs(rows, trained_only=True)
        for row, values in zip(rows, scores, strict=True):
            alone = learner.logprobs([row], trained_only=True)[0]
            assert values == pytest.approx(alone, abs=1e-4)
    for other in found[1:]:
        assert other[0] == pytest.approx(found[0][0], rel=1e-4)
        assert max(relative(a, b) for a, b in zip(found[0][1], other[1], strict=True)) < 1e-4
    if most == 1000:
        assert found[2][2] < 0.7 * found[1][2]
    assert any(key[0].groups for key in found[2][3]._layers._graphs)


def test_two_learners_over_one_model_take_turns_around_its_weights(plain_attention):
    found = []
    for fused in (False, True):
        model = decoder(layers=2)
        model.fused = fused
        learners = [Learner(model, {"default": adapter_on(model, 4, seed=seed)}) for seed in (0, 1)]
        for step in range(2):
            for learner in learners:
                learner.forward_backward(rows_of((9, 14), ["default"], step), LossSpec(clip_low=9, clip_high=9))
        found.append([p.grad.clone() for learner in learners for p in learner.trainable()])
    assert max(relative(a, b) for a, b in zip(*found, strict=True)) < 1e-4


@pytest.mark.parametrize("full", [False, True])
def test_the_output_head_gives_logprobs_entropies_and_gradients_in_chunks(monkeypatch, full):
    monkeypatch.setattr(head, "HEAD_ROWS", 5)
    monkeypatch.setattr(head, "LOGPROB_BLOCK", 256)
    model = decoder()
    model.embed.requires_grad_(full)
    hidden, targets = torch.randn(13, 96, requires_grad=True), torch.randint(0, VOCAB, (13,))
    temperatures, grad = torch.rand(13) + 0.5, torch.randn(13)
    trained = [hidden, *([model.embed] if full else [])]
    plain = F.log_softmax(F.linear(hidden, model.embed) / temperatures[:, None], -1)
    expected = plain.gather(1, targets[:, None]).squeeze(1)
    logprobs, entropies = head.token_logprobs(model, hidden, targets, temperatures)
    assert (logprobs - expected).abs().max() < 1e-5
    assert (entropies + (plain.exp() * plain).sum(-1)).abs().max() < 1e-5
    reference = torch.autograd.grad((expected * grad).sum(), trained)
    found = torch.autograd.grad((logprobs * grad).sum(), trained)
    assert max(relative(a, b) for a, b in zip(reference, found, strict=True)) < 1e-5


def test_the_sampler_draws_what_the_plain_one_draws_for_every_adapter_of_a_mixed_batch(plain_attention):
    numbers = random.Random(0)
    prompts = [[numbers.randrange(VOCAB) for _ in range(length)] for length in (5, 64, 70)]
    found = []
    for kind in (Engine, CudaEngine):
        model = decoder(layers=2)
        adapters = {
            "a": adapter_on(model, 4),
            "b": adapter_on(model, 20, seed=1),
            "c": adapter_on(model, leave_out=("k_proj",)),
        }
        published = {name: adapter.snapshot(torch.float32) for name, adapter in adapters.items()}
        engine = kind(model, eos_ids=[], max_batch=24, max_model_len=100)
        engine.publish(published, 1)
        futures = [
            engine.submit(prompt, SamplingParams(4 + i, 0.0), name)
            for i, prompt in enumerate(prompts)
            for name in ("base", "a", "b", "c", "a")
        ]
        found.append([future.result() for future in futures])
        assert all(engine.holds(name, pairs) for name, pairs in published.items())
        other = adapter_on(model, 4, seed=9).snapshot(torch.float32)
        assert not engine.holds("a", other)
        engine.publish({"a": other}, 2)
        assert engine.holds("a", other) and engine.submit(prompts[0], SamplingParams(2), "a").result().versions == [
            2,
            2,
        ]
        engine.close()
    for plain, ours in zip(*found, strict=True):
        assert ours.ids == plain.ids and ours.versions == plain.versions
        assert max(abs(a - b) for a, b in zip(ours.logprobs, plain.logprobs, strict=True)) < 1e-4
