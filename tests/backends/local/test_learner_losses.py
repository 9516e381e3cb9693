"""Every loss, term and weight reaches the gradients of the weights as an independent float64 computation says, in any micro-batches."""

import math

import pytest
import torch
from tiny_models import VOCAB, random_adapter, with_peft

from rllm.backends.base import BASE, Datum, LossSpec
from rllm.backends.local.learner import Learner

MICRO_BATCHES = [16, 100, 10_000]
EVERYTHING = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 1.5, "norm": 20.0}


def rows(learner, n=6, seed=0):
    """Ragged rows of two roles with holes in the mask; old, reference and sampler log-probabilities around the policy's own"""
    g = torch.Generator().manual_seed(seed)
    data = []
    for i in range(n):
        length = 8 + 5 * i
        ids = torch.randint(0, VOCAB, (length,), generator=g).tolist()
        mask = [0] * 3 + [1] * 2 + [0] + [1] * (length - 6)
        advantage = (-1.0) ** i * (0.5 + i)
        weights = torch.rand(length, generator=g).tolist()
        role = "judge" if i % 3 == 2 else "solver"
        data.append(Datum(ids, mask, [advantage * m for m in mask], weights=weights, temperature=0.8, role=role))
    for datum, values in zip(data, learner.logprobs(data), strict=True):
        for field, spread in (("logprobs", 0.1), ("old_logprobs", 0.4), ("ref_logprobs", 0.5)):
            noise = torch.randn(len(values), generator=g) * spread
            setattr(datum, field, [(v + s) * m for v, s, m in zip(values, noise.tolist(), datum.mask, strict=True)])
    return data


def token_loss(spec, logp, d, at):
    """[n] of the trained tokens `at` of one row, from the papers' formulas"""
    old, a = torch.tensor(d.old_logprobs).double()[at], torch.tensor(d.advantages).double()[at]
    ratio = torch.exp(logp - old)
    if spec.name == "gspo":
        ratio = torch.exp((logp - old).mean()).expand_as(logp)
    if spec.name == "importance_sampling":
        return -ratio * a
    if spec.name == "reinforce":
        return -logp * a
    if spec.name == "cispo":
        return -ratio.detach().clamp(1 - spec.clip_low, 1 + spec.clip_high) * a * logp
    if spec.name == "dro":
        return -(logp * a - 0.025 * (logp - old) ** 2)
    loss = -torch.minimum(ratio * a, ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * a)
    return torch.where((a < 0) & (loss > -spec.clip_c * a), -spec.clip_c * a, loss)


def reference_loss(model, data, spec_of):
    counts = [sum(d.mask) for d in data]
    total = torch.zeros((), dtype=torch.float64)
    for d, n in zip(data, counts, strict=True):
        spec = spec_of(d.role)
        at = torch.tensor(d.mask).nonzero().squeeze(1)
        every = torch.log_softmax(model(input_ids=torch.tensor([d.ids])).logits[0] / d.temperature, -1)[at - 1]
        logp = every.gather(1, torch.tensor(d.ids)[at][:, None])[:, 0]
        weight = {
            "token-mean": 1 / sum(counts),
            "seq-mean-token-sum": 1 / len(data),
            "seq-mean-token-mean": 1 / (len(data) * n),
            "seq-mean-token-sum-norm": 1 / (len(data) * 20.0),
        }[spec.aggregation]
        gap = logp - torch.tensor(d.ref_logprobs).double()[at]
        kl = {"k2": gap**2 / 2, "k3": torch.exp(-gap) - 1 + gap}[spec.kl_estimator]
        entropy = -(every.exp() * every).sum(-1)
        policy = token_loss(spec, logp, d, at)
        if spec.name != "gspo":  # gspo's ratio is of the whole row, so weights that differ would need their own formula
            policy = policy * torch.tensor(d.weights).double()[at]
        total = total + weight * (policy + spec.kl_beta * kl - spec.entropy_coeff * entropy).sum()
    return total


def assert_same_gradients(learner, adapter, model, data, loss, spec_of):
    metrics = learner.forward_backward(data, loss)
    reference = with_peft(model.double(), adapter)
    expected = reference_loss(reference, data, spec_of)
    expected.backward()
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    named = dict(reference.named_parameters())
    for name in adapter.modules_adapted:
        for letter, ours in zip("AB", adapter.matrices(name), strict=True):
            theirs = named[f"base_model.model.{name}.lora_{letter}.default.weight"].grad
            assert ((ours.grad.double() - theirs).norm() / theirs.norm()).item() < 2e-5, (name, letter)
    return metrics


@pytest.mark.parametrize("micro_batch_tokens", MICRO_BATCHES)
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "importance_sampling", "dro", "reinforce"])
def test_every_loss_with_all_terms_on_has_the_reference_gradient(make, name, micro_batch_tokens):
    model, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter}, micro_batch_tokens)
    data = rows(learner)
    if name == "gspo":
        for d in data:
            d.weights = []
    spec = LossSpec(name, kl_beta=0.3, kl_estimator="k3", entropy_coeff=0.2, **EVERYTHING)
    metrics = assert_same_gradients(learner, adapter, model, data, spec, lambda role: spec)
    assert metrics["kl_ref"] > 0 and metrics["entropy"] > 0 and metrics["sampler_kl"] > 0


@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("micro_batch_tokens", MICRO_BATCHES)
def test_every_aggregation_is_over_the_whole_step(make, aggregation, micro_batch_tokens):
    model, decoder, _ = make("llama")
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter}, micro_batch_tokens)
    spec = LossSpec(aggregation=aggregation, kl_beta=0.1, kl_estimator="k2", **EVERYTHING)
    assert_same_gradients(learner, adapter, model, rows(learner), spec, lambda role: spec)


@pytest.mark.parametrize("micro_batch_tokens", MICRO_BATCHES)
def test_each_role_has_its_own_loss_and_all_rows_share_the_denominators(make, micro_batch_tokens):
    model, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder)
    learner = Learner(decoder, {"default": adapter}, micro_batch_tokens)
    specs = {
        "": LossSpec("ppo_clip", aggregation="seq-mean-token-mean", **EVERYTHING),
        "judge": LossSpec("reinforce", entropy_coeff=0.1),
    }
    data = rows(learner)
    assert_same_gradients(learner, adapter, model, data, specs, lambda role: specs.get(role, specs[""]))


def test_one_loss_for_every_role_is_that_loss(make):
    def step(loss):
        _, decoder, _ = make("qwen3")
        adapter = random_adapter(decoder)
        learner = Learner(decoder, {"default": adapter})
        return learner.forward_backward(rows(learner), loss), [p.grad.clone() for p in adapter.parameters()]

    metrics, gradients = step(LossSpec())
    by_role, same = step({"": LossSpec(), "judge": LossSpec()})
    assert by_role == pytest.approx(metrics, rel=1e-4)
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(same, gradients, strict=True))


def test_the_entropy_bonus_also_reaches_chunked_logits(make, monkeypatch):
    from rllm.backends.local import learner as module

    def gradients():
        _, decoder, _ = make("qwen3")
        adapter = random_adapter(decoder)
        learner = Learner(decoder, {"default": adapter})
        learner.forward_backward(rows(learner), LossSpec("cross_entropy", entropy_coeff=0.5))
        return [p.grad for p in adapter.parameters()]

    whole = gradients()
    monkeypatch.setattr(module, "LOGIT_ELEMENTS", 7 * VOCAB)
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(gradients(), whole, strict=True))


def test_without_old_logprobs_the_ratio_is_to_the_sampler(make):
    def step(**replaced):
        _, decoder, _ = make("qwen3")
        adapter = random_adapter(decoder)
        learner = Learner(decoder, {"default": adapter})
        data = rows(learner)
        for datum in data:
            datum.old_logprobs = {"nothing": [], "sampler": list(datum.logprobs)}[replaced["old"]]
        return learner.forward_backward(data, LossSpec()), [p.grad for p in adapter.parameters()]

    (metrics, gradients), (expected, same) = step(old="nothing"), step(old="sampler")
    assert metrics == pytest.approx(expected)
    assert metrics["ppo_kl_k3"] == metrics["sampler_kl"] > 0
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


def test_metrics_are_those_of_the_tokens(make):
    _, decoder, _ = make("qwen3")
    learner = Learner(decoder, {"default": random_adapter(decoder)}, 40)
    data = rows(learner)
    own = learner.logprobs(data, trained_only=True)
    metrics = learner.forward_backward(data, LossSpec(kl_beta=0.1, kl_estimator="k2"))

    def at(field):
        return torch.tensor(
            [v for d in data for v, m in zip(getattr(d, field), d.mask, strict=True) if m], dtype=torch.float64
        )

    logp = torch.tensor(
        [v for d, values in zip(data, own, strict=True) for v, m in zip(values, d.mask, strict=True) if m]
    )
    old, ref, sampler = at("old_logprobs"), at("ref_logprobs"), at("logprobs")
    ratio, gap = (logp - old).exp(), logp - ref
    clipped = torch.where(at("advantages") > 0, ratio > 1.2, ratio < 0.8)
    expected = {
        "tokens": len(logp),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ess": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
        "clip_fraction": clipped.double().mean(),
        "ppo_kl": (old - logp).mean(),
        "ppo_kl_k3": (ratio - 1 - (logp - old)).mean(),
        "kl_ref_k1": gap.mean(),
        "kl_ref": (torch.exp(-gap) - 1 + gap).mean(),
        "sampler_kl": ((logp - sampler).exp() - 1 - (logp - sampler)).mean(),
        "sampler_gap_max": (logp - sampler).abs().max(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-4, abs=1e-6
    )
    assert 0 < metrics["clip_fraction"] < 1


def test_kl_of_a_fresh_adapter_to_the_base_is_exactly_0_and_after_a_change_it_is_not(make):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder, scale=0.0)
    learner = Learner(decoder, {"default": adapter})
    data = rows(learner)
    for datum, values in zip(data, learner.logprobs(data, BASE, trained_only=True), strict=True):
        datum.ref_logprobs = values
    spec = LossSpec(kl_beta=0.1)
    metrics = learner.forward_backward(data, spec)
    assert metrics["kl_ref"] == metrics["kl_ref_k1"] == 0.0
    with torch.no_grad():
        next(b for _, b in map(adapter.matrices, adapter.modules_adapted)).add_(0.1)
    assert learner.forward_backward(data, spec)["kl_ref"] > 0


def test_a_kl_term_without_a_reference_and_lists_of_the_wrong_length_are_errors(make):
    _, decoder, _ = make("qwen3")
    learner = Learner(decoder, {"default": random_adapter(decoder)})
    data = rows(learner)
    data[0].ref_logprobs = []
    with pytest.raises(ValueError, match=r"ref_logprobs: 0 values in a row of 8 tokens"):
        learner.forward_backward(data, LossSpec(kl_beta=0.1))
    data[0].weights = [1.0]
    with pytest.raises(ValueError, match=r"weights: 1 values in a row of 8 tokens"):
        learner.forward_backward(data, LossSpec())


def test_weights_of_0_leave_a_token_without_gradient_and_missing_ones_count_1(make):
    def gradients(change):
        _, decoder, _ = make("qwen3")
        adapter = random_adapter(decoder)
        learner = Learner(decoder, {"default": adapter})
        data = rows(learner)
        for i, datum in enumerate(data):
            change(i, datum)
        metrics = learner.forward_backward(data, LossSpec("reinforce"))
        assert math.isfinite(metrics["loss"])
        return [p.grad for p in adapter.parameters()]

    def zero_weights(i, datum):
        datum.weights = [0.0] * len(datum.ids) if i % 2 else []

    def zero_advantages(i, datum):
        datum.weights = [1.0] * len(datum.ids)
        datum.advantages = [0.0] * len(datum.ids) if i % 2 else datum.advantages

    for a, b in zip(gradients(zero_weights), gradients(zero_advantages), strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm() and b.norm() > 0
