"""One training step is what an independent float64 computation says, whatever the micro-batches; what was not trained stays as it was."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, random_adapter, with_peft

from rllm.backends.base import BASE, AdamParams, Datum, LossSpec
from rllm.backends.local.learner import Learner

PPO = LossSpec("ppo_clip", clip_low=0.2, clip_high=0.28)
CROSS_ENTROPY = LossSpec("cross_entropy")
CASES = Path(__file__).parents[2] / "reference" / "cases.json"


def rows(temperature=0.8, n=6, seed=0, adapter="default"):
    """Random rows with two sampled stretches each; sampler log-probabilities far enough off that some tokens are clipped."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i in range(n):
        length = 8 + 5 * i
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        mask = [0] * 3 + [1] * 2 + [0] + [1] * (length - 6)
        noise = (torch.randn(length, generator=generator) - 4.5).tolist()
        advantage = (-1.0) ** i * (0.5 + i)
        data.append(
            Datum(
                ids,
                mask,
                [advantage * m for m in mask],
                [x * m for x, m in zip(noise, mask, strict=True)],
                temperature=temperature,
                adapter=adapter,
            )
        )
    return data


def reference_loss(model, data):
    """PPO with asymmetric clipping, mean over all trained tokens, written out token by token in float64."""
    total, count = torch.zeros((), dtype=torch.float64), sum(sum(d.mask) for d in data)
    for d in data:
        logits = model(input_ids=torch.tensor([d.ids])).logits[0] / d.temperature
        logprobs = torch.log_softmax(logits, -1)
        for t, trained in enumerate(d.mask):
            if trained:
                ratio = torch.exp(logprobs[t - 1, d.ids[t]] - d.logprobs[t])
                a = d.advantages[t]
                total = total - torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) / count
    return total


def relative(ours, expected):
    return ((ours.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("micro_batch_tokens", [16, 100, 10_000])
def test_loss_and_gradients_of_every_a_and_b_equal_a_float64_reference(make, kind, micro_batch_tokens):
    model, decoder, _ = make(kind)
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter}, micro_batch_tokens)
    # Sampler log-probabilities near the model's own, so that ratios lie on both sides of both bounds.
    data = rows()
    for datum, values in zip(data, learner.logprobs(data), strict=True):
        shift = torch.randn(len(values), generator=torch.Generator().manual_seed(1)) * 0.3
        datum.logprobs = [(v + s) * m for v, s, m in zip(values, shift.tolist(), datum.mask, strict=True)]
    metrics = learner.forward_backward(data, PPO)

    reference = with_peft(model.double(), adapter)
    loss = reference_loss(reference, data)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert 0 < metrics["clip_fraction"] < 1
    named = dict(reference.named_parameters())
    for name in adapter.modules_adapted:
        for letter, ours in zip("AB", adapter.matrices(name), strict=True):
            expected = named[f"base_model.model.{name}.lora_{letter}.default.weight"].grad
            assert relative(ours.grad, expected) < 1e-5, (name, letter)


def test_full_finetuning_gradients_equal_a_float64_reference(make):
    model, decoder, _ = make("qwen3")
    learner = Learner(decoder, {})
    data = rows()
    metrics = learner.forward_backward(data, PPO)
    model.double()
    loss = reference_loss(model, data)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative(decoder.embed.grad, model.model.embed_tokens.weight.grad) < 1e-5
    layer = model.model.layers[1].self_attn
    expected = torch.cat([layer.q_proj.weight.grad, layer.k_proj.weight.grad, layer.v_proj.weight.grad])
    assert relative(decoder.layers[1].qkv.weight.grad, expected) < 1e-5
    assert relative(decoder.layers[1].qk_norm.grad[0], layer.q_norm.weight.grad) < 1e-5


def test_logprobs_are_those_of_transformers_at_the_rows_temperature(make):
    model, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter}, 64)
    data = rows(temperature=0.6)
    base = learner.logprobs(data, BASE)
    for datum, values in zip(data, base, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([datum.ids])).logits[0] / 0.6
        expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(datum.ids[1:])[:, None])[:, 0]
        assert values[0] == 0.0 and torch.tensor(values[1:]).sub(expected).abs().max() < 1e-5
    assert learner.logprobs(data) != base


def test_logits_in_chunks_change_nothing(make, monkeypatch):
    from rllm.backends.local import learner as module

    def gradients():
        _, decoder, _ = make("qwen3")
        adapter = random_adapter(decoder)
        metrics = Learner(decoder, {"default": adapter}).forward_backward(rows(), PPO)
        return metrics, [p.grad for p in adapter.parameters()]

    metrics, whole = gradients()
    monkeypatch.setattr(module, "LOGIT_ELEMENTS", 7 * VOCAB)
    chunked_metrics, chunked = gradients()
    assert chunked_metrics == pytest.approx(metrics, rel=1e-5)
    assert all(relative(a, b.double()) < 1e-5 for a, b in zip(chunked, whole, strict=True))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("lora", [True, False])
def test_a_model_too_large_for_its_memory_trains_in_smaller_micro_batches(make, monkeypatch, kind, lora):
    from rllm.backends.local import learner as module

    _, decoder, _ = make(kind)
    adapters = {"default": random_adapter(decoder)} if lora else {}
    assert Learner(decoder, adapters).micro_batch_tokens == 2048
    monkeypatch.setattr(module, "CPU_ACTIVATION_BYTES", 300_000)
    learner = Learner(decoder, adapters)
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    for p in learner.trainable():  # weights are there anyhow
        keep(p)
    length = learner.micro_batch_tokens
    before = sum(kept.values())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.forward_backward([Datum([5] * length, [0] * (length - 1) + [1], [1.0] * length, [0.0] * length)], PPO)
    frozen = 0 if not lora else sum(p.untyped_storage().nbytes() for p in decoder.parameters())
    assert 100_000 < sum(kept.values()) - before - frozen < 400_000


def test_adamw_step_equals_torch_and_clips_by_the_global_norm(make):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter})
    learner.forward_backward(rows(), PPO)
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in adapter.parameters()))
    copies = [torch.nn.Parameter(p.detach().double().clone()) for p in adapter.parameters()]
    for copy, p in zip(copies, adapter.parameters(), strict=True):
        copy.grad = p.grad.double() * min(1.0, 0.01 / norm)
    torch.optim.AdamW(copies, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    metrics = learner.optim_step(AdamParams(1e-2, weight_decay=0.1, grad_clip=0.01))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert all((p.double() - c).abs().max() < 1e-6 for p, c in zip(adapter.parameters(), copies, strict=True))
    assert all(p.grad is None for p in adapter.parameters())


def test_the_gradient_norm_reported_is_that_before_clipping(make, monkeypatch):
    (case,) = [c for c in json.loads(CASES.read_text()) if c["kind"] == "grad_clip"]
    _, decoder, _ = make("qwen3")
    learner = Learner(decoder, {"default": random_adapter(decoder)})
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor(case["input"]["grads"])
    monkeypatch.setattr(learner, "trainable", lambda: [parameter])
    seen = []
    params = AdamParams(1e-2, grad_clip=case["input"]["max_norm"])
    monkeypatch.setattr(learner._optimizer(params), "step", lambda: seen.append(parameter.grad.clone()))
    assert learner.optim_step(params)["grad_norm"] == pytest.approx(case["expected"]["reported_norm"])
    assert seen[0].tolist() == pytest.approx(case["expected"]["clipped"], abs=case["tolerance"])


def test_discarded_gradients_leave_nothing_to_step_with(make):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter})
    learner.forward_backward(rows(), PPO)
    before = [p.clone() for p in adapter.parameters()]
    learner.discard_gradients()
    assert learner.optim_step(AdamParams(1e-2)) == {"grad_norm": 0.0}
    assert all(torch.equal(p, b) for p, b in zip(adapter.parameters(), before, strict=True))


def test_after_one_step_every_b_has_moved_and_the_base_has_not(make):
    _, decoder, _ = make("qwen3")
    before = {name: tensor.clone() for name, tensor in decoder.hf_tensors()}
    adapter = random_adapter(decoder, scale=0.0)
    learner = Learner(decoder, {"default": adapter})
    learner.forward_backward(rows(), PPO)
    learner.optim_step(AdamParams(1e-2))
    assert all(adapter.matrices(name)[1].abs().max() > 0 for name in adapter.modules_adapted)
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.hf_tensors())


def test_an_adapter_without_rows_in_a_step_stays_byte_identical(make):
    _, decoder, _ = make("qwen3")
    solver, judge = random_adapter(decoder), random_adapter(decoder)
    learner = Learner(decoder, {"solver": solver, "judge": judge})
    both = rows(adapter="solver") + rows(adapter="judge", seed=1)
    learner.forward_backward(both, PPO)
    learner.optim_step(AdamParams(1e-2, weight_decay=0.1))
    before = [p.clone() for p in judge.parameters()]
    learner.forward_backward(rows(adapter="solver"), PPO)
    learner.optim_step(AdamParams(1e-2, weight_decay=0.1))
    assert all(torch.equal(p, b) for p, b in zip(judge.parameters(), before, strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing(make):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter})
    data = rows()
    data[0].advantages = [math.inf * m if m else 0.0 for m in data[0].mask]
    learner.forward_backward(data, PPO)
    before = [p.clone() for p in adapter.parameters()]
    assert not math.isfinite(learner.optim_step(AdamParams(1e-2))["grad_norm"])
    assert all(torch.equal(p, b) for p, b in zip(adapter.parameters(), before, strict=True))


def test_rows_without_a_trained_token_change_nothing(make):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter})
    empty = Datum([1, 2, 3], [0, 0, 0], [0.0] * 3, [0.0] * 3)
    assert learner.forward_backward([empty], PPO) == {"loss": 0.0, "tokens": 0.0}
    plain = learner.forward_backward(rows(), PPO)
    gradients = [p.grad.clone() for p in adapter.parameters()]
    for p in adapter.parameters():
        p.grad = None
    assert learner.forward_backward([empty, *rows(), empty], PPO) == pytest.approx(plain, rel=1e-6)
    assert all(relative(p.grad, g.double()) < 1e-6 for p, g in zip(adapter.parameters(), gradients, strict=True))


def test_cross_entropy_is_the_mean_negative_logprob(make):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter})
    data = [Datum(d.ids, d.mask, [float(m) for m in d.mask], [0.0] * len(d.ids)) for d in rows()]
    values = [
        v for d, row in zip(data, learner.logprobs(data), strict=True) for v, m in zip(row, d.mask, strict=True) if m
    ]
    assert learner.forward_backward(data, CROSS_ENTROPY)["loss"] == pytest.approx(-sum(values) / len(values), rel=1e-5)
