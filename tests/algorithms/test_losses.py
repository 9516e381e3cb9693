"""Every loss and its gradient have the values of the formula; nothing irrelevant changes them, and nothing finite breaks them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.losses import LOSSES, Tokens, kl_terms, register_loss, token_loss, token_weights
from rllm.algorithms.spec import LossSpec, loss_of
from rllm.config import names
from rllm.config.load import load_config
from rllm.config.names import AGGREGATIONS
from rllm.errors import ConfigError

POLICY_LOSSES = sorted(LOSSES)
KL = ("k1", "k2", "k3", "k1+", "k3+")


def tokens(logprobs, old, advantages, rows=None):
    rows = torch.arange(len(logprobs)) if rows is None else torch.as_tensor(rows)
    return Tokens(logprobs, torch.as_tensor(old), torch.as_tensor(advantages), rows)


def random_tokens(seed, n_rows=4, spread=0.4):
    """float64 tokens of ragged rows, one advantage a row; ratios on both sides of the bounds, none right at a kink"""
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(n_rows), rng.integers(1, 6, n_rows))
    old = -rng.exponential(1.0, len(rows))
    logprobs = torch.tensor(old + rng.normal(size=len(rows)) * spread, requires_grad=True)
    return tokens(logprobs, old, rng.normal(size=n_rows)[rows], rows)


def grad_of(loss, logprobs):
    return torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)[0]


def test_on_policy_loss_and_gradient_are_minus_the_advantage():
    advantages = torch.tensor([0.5, -2.0])
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    for name in ("ppo_clip", "importance_sampling", "gspo"):
        loss, statistics = token_loss(LossSpec(name, clip_c=3.0), tokens(logprobs, logprobs.detach(), advantages))
        assert loss.tolist() == (-advantages).tolist() == grad_of(loss, logprobs).tolist(), name
        assert statistics["ratio"].tolist() == [1.0, 1.0]
        assert statistics.get("clip_fraction", torch.zeros(1)).sum() == 0


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_alone():
    logprobs = torch.tensor([5.0, 5.0, 2.0]).log().requires_grad_()
    given = tokens(logprobs, torch.zeros(3), torch.tensor([-1.0, 1.0, -1.0]))
    loss, statistics = token_loss(LossSpec(clip_high=0.28, clip_c=3.0), given)
    assert loss.tolist() == pytest.approx([3.0, -1.28, 2.0])
    assert grad_of(loss, logprobs).tolist() == pytest.approx([0.0, 0.0, 2.0])
    assert statistics["clip_fraction"].tolist() == [1, 1, 0] and statistics["clip_fraction_dual"].tolist() == [1, 0, 0]
    assert token_loss(LossSpec(clip_high=0.28), given)[0].tolist() == pytest.approx([5.0, -1.28, 2.0])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("clip_c", [0.0, 1.5])
def test_differentiable_losses_have_the_gradient_of_finite_differences(seed, clip_c):
    given = random_tokens(seed)

    for name in ("ppo_clip", "importance_sampling", "dro", "reinforce", "cross_entropy"):
        spec = LossSpec(name, 0.2, 0.28, clip_c, options={"beta": 0.3})

        def loss(logprobs, spec=spec):
            return token_loss(spec, tokens(logprobs, given.old, given.advantages, given.rows))[0]

        assert torch.autograd.gradcheck(loss, given.logprobs, eps=1e-7, atol=1e-5), name
    for estimator in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, e=estimator: kl_terms(x, given.old, e), given.logprobs, eps=1e-7)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
def test_gspo_is_the_sequence_objective_of_the_paper_in_value_and_gradient(seed, mode):
    """``-min(s A, clip(s) A)`` a row, with the whole gradient through ``s``: written out, and against finite differences."""
    given, low, high = random_tokens(seed), 0.1, 0.15
    counts = torch.bincount(given.rows).tolist()
    weights = token_weights(LossSpec(aggregation=mode), counts)

    def paper(logprobs):
        total = torch.zeros((), dtype=torch.float64)
        for row, (n, weight) in enumerate(zip(counts, weights, strict=True)):
            at = given.rows == row
            s = torch.exp((logprobs - given.old)[at].mean())
            a = given.advantages[at][0]
            total = total - weight * n * torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a)
        return total

    loss, _ = token_loss(LossSpec("gspo", low, high), given)
    ours = (torch.tensor(weights, dtype=torch.float64)[given.rows] * loss).sum()
    assert ours.item() == pytest.approx(paper(given.logprobs).item(), abs=1e-12)
    assert torch.autograd.gradcheck(paper, given.logprobs, eps=1e-7, atol=1e-5)
    torch.testing.assert_close(grad_of(ours, given.logprobs), grad_of(paper(given.logprobs), given.logprobs))


def test_cispo_bounds_weights_and_stops_no_gradient():
    logprobs = torch.tensor([2.0, 0.1, 1.1], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    loss, statistics = token_loss(LossSpec("cispo", 0.2, 0.28), tokens(logprobs, torch.zeros(3).double(), advantages))
    weights = torch.tensor([1.28, 0.8, 1.1], dtype=torch.float64)
    torch.testing.assert_close(loss, -weights * advantages * logprobs.detach(), check_dtype=False)
    torch.testing.assert_close(grad_of(loss, logprobs), -weights * advantages)
    assert statistics["clip_fraction"].tolist() == [1, 1, 0]


def test_dro_is_the_logprob_times_the_advantage_less_a_quadratic_term():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    given = tokens(logprobs, [-1.5, -1.0], [2.0, 3.0])
    loss, _ = token_loss(LossSpec("dro", options={"beta": 0.4}), given)
    assert loss.tolist() == pytest.approx([-(-1.0 * 2 - 0.2 * 0.25), -(-2.0 * 3 - 0.2 * 1.0)])
    assert token_loss(LossSpec("dro"), given)[0].tolist() == pytest.approx([2 + 0.025 * 0.25, 6 + 0.025])


TRL_SEEDS = range(50)


def trl_numbers(seed):
    """(per-token loss, mask, completion limit) as TRL's GRPO computes it, in float64 numpy; (spec and tokens of ours)"""
    rng = np.random.default_rng(seed)
    rows, width, low, high, delta, beta = 5, 7, 0.2, 0.28, 1.7, 0.1
    mask = np.arange(width) < rng.integers(1, width + 1, rows)[:, None]
    old = -rng.exponential(1.0, (rows, width))
    new, ref = old + rng.normal(size=old.shape) * 0.5, old + rng.normal(size=old.shape) * 0.5
    advantages = rng.normal(size=(rows, 1)) * np.ones((1, width))
    return rng, mask, old, new, ref, advantages, (low, high, delta, beta)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", TRL_SEEDS)
def test_losses_are_trls_with_their_kl_and_two_sided_clip_under_each_of_its_loss_types(seed, level):
    _, mask, old, new, ref, advantages, (low, high, delta, beta) = trl_numbers(seed)
    log_ratio = new - old
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1))[:, None] * np.ones_like(new)
    coef_1 = np.exp(log_ratio)
    coef_2 = np.clip(coef_1, 1 - low, 1 + high)
    capped = np.minimum(coef_1, delta)
    per_token = -np.minimum(capped * advantages, coef_2 * advantages)
    per_token = per_token + beta * (np.exp(ref - new) - (ref - new) - 1)
    limit = 20
    expected = {
        "seq-mean-token-mean": ((per_token * mask).sum(1) / mask.sum(1)).mean(),  # loss_type="grpo"
        "token-mean": (per_token * mask).sum() / mask.sum(),  # "bnpo", "dapo"
        "seq-mean-token-sum-norm": (per_token * mask).sum() / (len(mask) * limit),  # "dr_grpo"
    }
    at = torch.tensor(mask)
    rows = torch.arange(len(mask))[:, None].expand(at.shape)[at]
    logprobs = torch.tensor(new)[at]
    spec = LossSpec("ppo_clip" if level == "token" else "gspo", low, high, clip_c=delta)
    loss, _ = token_loss(spec, tokens(logprobs, torch.tensor(old)[at], torch.tensor(advantages)[at], rows))
    loss = loss + beta * kl_terms(logprobs, torch.tensor(ref)[at])
    for mode, value in expected.items():
        weights = token_weights(LossSpec(aggregation=mode, norm=limit), mask.sum(1).tolist())
        assert (torch.tensor(weights, dtype=torch.float64)[rows] * loss).sum().item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("seed", TRL_SEEDS)
def test_advantages_are_trls_but_for_the_epsilon_that_trl_adds(seed):
    from rllm.algorithms.advantages import RewardGroup, estimate

    rewards = np.random.default_rng(seed).normal(size=(3, 8))
    theirs = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    found = np.array(estimate("grpo", [RewardGroup(r.tolist(), [1] * 8) for r in rewards]))
    np.testing.assert_allclose(found, theirs * (1 + 1e-4 / rewards.std(1, ddof=1, keepdims=True)), rtol=1e-9)


@pytest.mark.parametrize("d", [0.5, -0.5, 0.0, 3.0])
def test_kl_estimators_have_the_value_and_the_gradient_that_they_promise(d):
    logprobs, reference = (
        torch.tensor([-1.0 + d], dtype=torch.float64, requires_grad=True),
        torch.tensor([-1.0]).double(),
    )
    values = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}
    slopes = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}
    for name in KL:
        term = kl_terms(logprobs, reference, name)
        assert term.item() == pytest.approx(values[name.strip("+")], abs=1e-12)
        assert grad_of(term, logprobs).item() == pytest.approx(slopes["k2" if "+" in name else name], abs=1e-12)


def test_in_the_mean_k1_has_no_gradient_k2_that_of_the_kl_and_k3_that_of_the_reverse_kl():
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, -0.5, 0.2], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    policy = logprobs.detach().exp()

    def mean_gradient(name):
        return grad_of(policy * kl_terms(logprobs, reference, name), logits)

    kl = grad_of(logprobs.exp() * (logprobs - reference), logits)
    reverse = grad_of(reference.exp() * (reference - logprobs), logits)
    torch.testing.assert_close(mean_gradient("k1"), torch.zeros(4).double())
    for name in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(mean_gradient(name), kl)
    torch.testing.assert_close(mean_gradient("k3"), reverse)


half = st.floats(-65504, 65504, width=16)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(st.lists(st.tuples(half, half, half, st.integers(0, 3)), min_size=1, max_size=12))
def test_no_finite_input_gives_nan_or_infinity(name, drawn):
    drawn = sorted(drawn, key=lambda token: token[3])
    _, rows = np.unique([token[3] for token in drawn], return_inverse=True)
    logprobs, old, advantages = (torch.tensor(column) for column in list(zip(*drawn, strict=True))[:3])
    logprobs.requires_grad_()
    loss, statistics = token_loss(LossSpec(name, 0.2, 0.28, 3.0), tokens(logprobs, old, advantages, rows))
    for estimator in KL:
        term = kl_terms(logprobs, old, estimator)
        assert torch.isfinite(term).all() and torch.isfinite(grad_of(term, logprobs)).all()
        assert estimator in ("k1", "k1+") or (term >= -1e-6).all()
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(values).all() and values.shape == loss.shape for values in statistics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_may_come_in_any_order_and_in_any_parts(name, seed):
    given = random_tokens(seed, n_rows=5)
    spec = LossSpec(name, 0.2, 0.28, 3.0)
    whole, _ = token_loss(spec, given)
    order = np.random.default_rng(seed).permutation(5)
    for part in (order[:2], order[2:]):
        at = torch.cat([torch.nonzero(given.rows == int(row)).squeeze(1) for row in part])
        _, rows = torch.unique_consecutive(given.rows[at], return_inverse=True)
        loss, _ = token_loss(spec, tokens(given.logprobs[at], given.old[at], given.advantages[at], rows))
        torch.testing.assert_close(loss, whole[at])
        torch.testing.assert_close(grad_of(loss, given.logprobs)[at], grad_of(whole, given.logprobs)[at])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=8), order=st.randoms())
def test_aggregation_forgets_empty_rows_and_the_order_of_rows(mode, counts, order):
    spec = LossSpec(aggregation=mode, norm=8.0)
    weights = token_weights(spec, counts)
    full = [n for n in counts if n]
    assert [w for w, n in zip(weights, counts, strict=True) if n] == token_weights(spec, full)
    assert all(w == 0.0 for w, n in zip(weights, counts, strict=True) if not n)
    places = order.sample(range(len(counts)), len(counts))
    assert token_weights(spec, [counts[i] for i in places]) == [weights[i] for i in places]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 4.0),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", 8.0),
        ("seq-mean-token-mean", 6.0),
        ("seq-mean-token-sum-norm", 1.0),
    ],
)
def test_aggregations_have_their_values(mode, expected):
    weights = token_weights(LossSpec(aggregation=mode, norm=8.0), [3, 0, 1])
    assert math.fsum(weights[0] * x for x in (1, 2, 3)) + weights[2] * 10 == pytest.approx(expected)
    assert token_weights(LossSpec(aggregation=mode, norm=8.0), [0, 0]) == [0.0, 0.0]


def test_unknown_names_and_a_missing_constant_are_refused_with_what_there_is():
    with pytest.raises(ConfigError, match=r"unknown loss 'pppo'.*ppo_clip"):
        token_loss(LossSpec("pppo"), tokens(torch.zeros(1), torch.zeros(1), torch.zeros(1)))
    with pytest.raises(ConfigError, match="token-mean"):
        token_weights(LossSpec(aggregation="tokenmean"), [1])
    with pytest.raises(ConfigError, match=r"loss_scale_factor=None: .*divides by it"):
        token_weights(LossSpec(aggregation="seq-mean-token-sum-norm"), [1])
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        kl_terms(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(KeyError, match="no loss for role 'judge'; there are losses for solver"):
        loss_of({"solver": LossSpec()}, "judge")


def test_a_users_loss_is_one_more_name_of_the_config():
    with pytest.raises(ConfigError, match="'ppo_clip' is built in"):
        register_loss("ppo_clip")
    with pytest.raises(ConfigError, match="unknown"):
        load_config(overrides=["algorithm.loss=hinge"])

    @register_loss("hinge")
    def hinge(spec, given):
        return (spec.options["margin"] - given.advantages * given.logprobs).clamp(min=0), {}

    try:
        overrides = ["algorithm.loss=hinge", "algorithm.loss_options.margin=2"]
        assert load_config(overrides=overrides).config.algorithm.loss_options == {"margin": 2.0}
        loss, _ = token_loss(LossSpec("hinge", options={"margin": 2}), tokens(torch.tensor([-1.0]), [0.0], [0.5]))
        assert loss.tolist() == [2.5]
        register_loss("hinge")(lambda spec, given: (given.logprobs.sum(), {}))
        with pytest.raises(ConfigError, match=r"'hinge': gave a tensor of shape \[\] for 2 tokens"):
            token_loss(LossSpec("hinge"), tokens(torch.zeros(2), torch.zeros(2), torch.zeros(2)))
    finally:
        for registry in (names.LOSSES, LOSSES):
            registry.pop("hinge", None)
