"""Importance weights and the KL in the reward: the reference cases, and float64 formulas written anew."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rllm.algorithms.correction import correct, effective_sample_size, importance_weights, kl_in_reward
from rllm.algorithms.spec import Datum

CASES = {case["id"]: case for case in json.loads((Path(__file__).parents[1] / "reference" / "cases.json").read_text())}


def case(name):
    return CASES[name]["input"], CASES[name]["expected"]


def test_token_weights_are_cut_at_the_cap_and_the_loss_is_that_of_the_case():
    given, expected = case("tis-token")
    weights = importance_weights(given["train_minus_rollout_logp"], level="token", mode="truncate", cap=given["cap"])
    assert weights == pytest.approx(expected["weights"], abs=1e-9)
    assert -np.mean(weights) == pytest.approx(expected["loss_token_mean_A1_ratio1"], abs=1e-9)


def test_masking_zeroes_what_is_outside_the_band_and_leaves_the_rest():
    given, expected = case("tis-icepop")
    limits = {"cap": given["high"], "floor": given["low"]}
    weights = importance_weights(given["train_minus_rollout_logp"], level="token", mode="mask", **limits)
    assert weights == pytest.approx(expected["weights"], abs=1e-9)


def test_the_weight_of_a_row_is_the_product_and_its_geometric_mean_is_not():
    given, expected = case("tis-seq")
    d, cap = given["train_minus_rollout_logp"], given["cap"]

    def first(level, mode, cap):
        weights = importance_weights(d, level=level, mode=mode, cap=cap)
        assert len(set(weights)) == 1
        return weights[0]

    assert first("sequence", "truncate", 1e9) == pytest.approx(expected["sequence_product"], abs=1e-8)
    assert first("sequence", "truncate", cap) == pytest.approx(expected["sequence_truncate"], abs=1e-8)
    assert first("sequence", "mask", cap) == pytest.approx(expected["sequence_mask"], abs=1e-8)
    assert first("geometric", "truncate", cap) == pytest.approx(expected["geometric_mean"], abs=1e-8)


def test_without_a_floor_masking_keeps_what_is_within_one_over_the_cap():
    d = [math.log(0.49), math.log(0.51), math.log(1.99), math.log(2.01)]
    weights = importance_weights(d, level="token", mode="mask", cap=2.0)
    assert [w > 0 for w in weights] == [False, True, True, False]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_absurd_differences_give_finite_weights(level):
    weights = importance_weights([1e4, -3e4, 700.0], level=level, mode="truncate", cap=1e30)
    assert all(math.isfinite(w) and w >= 0 for w in weights)


def test_the_effective_sample_size_is_kishs():
    given, expected = case("ess")
    ess = effective_sample_size(given["weights"])
    assert ess == pytest.approx(expected["ess"], abs=1e-9)
    assert ess / 3 == pytest.approx(expected["ess_fraction"], abs=1e-9)
    assert effective_sample_size([0.0, 0.0]) == 0.0


def row(old, sampled, prompt=2):
    pad = [0.0] * prompt
    mask = [0] * prompt + [1] * len(old)
    return Datum(list(range(len(mask))), mask, logprobs=pad + sampled, old_logprobs=pad + old)


def test_rows_are_weighed_at_their_trained_tokens_only_and_the_metrics_are_over_all_of_them():
    rng = np.random.default_rng(3)
    sampled = [rng.normal(-2, 1, n) for n in (3, 7)]
    old = [s + rng.normal(0, 0.8, len(s)) for s in sampled]
    rows = [row(o.tolist(), s.tolist()) for o, s in zip(old, sampled, strict=True)]
    metrics = correct(rows, level="token", mode="truncate", cap=1.5, floor=None)
    d = np.concatenate([o - s for o, s in zip(old, sampled, strict=True)])
    w = np.exp(d)
    assert [r.weights[:2] for r in rows] == [[0.0, 0.0]] * 2
    assert np.allclose([v for r in rows for v in r.weights[2:]], np.minimum(w, 1.5), atol=1e-12)
    assert metrics == pytest.approx(
        {
            "ess": w.sum() ** 2 / (w**2).sum() / len(w),
            "kl_k1": -d.mean(),
            "kl_k3": (w - 1 - d).mean(),
            "weight_mean": np.minimum(w, 1.5).mean(),
            "weight_max": 1.5,
            "truncated": (w > 1.5).mean(),
            "masked": 0.0,
        },
        abs=1e-12,
    )


def test_equal_policies_have_weight_one_everywhere_and_no_divergence():
    rows = [row([-1.0, -2.0], [-1.0, -2.0])]
    metrics = correct(rows, level="sequence", mode="mask", cap=2.0, floor=None)
    assert rows[0].weights == [0, 0, 1.0, 1.0]
    assert (metrics["ess"], metrics["kl_k1"], metrics["kl_k3"], metrics["masked"]) == (1.0, 0.0, 0.0, 0.0)


def test_the_kl_of_the_sampler_to_the_trainer_is_what_both_estimators_estimate():
    # Every token of a vocabulary of three, as often as the sampler draws it: the means are the exact divergence.
    sampler, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    tokens = np.repeat([0, 1, 2], [5, 3, 2])
    rows = [row(np.log(trainer)[tokens].tolist(), np.log(sampler)[tokens].tolist())]
    metrics = correct(rows, level="token", mode="truncate", cap=2.0, floor=None)
    exact = float((sampler * np.log(sampler / trainer)).sum())
    assert metrics["kl_k1"] == pytest.approx(exact, abs=1e-12) == metrics["kl_k3"]


def test_the_kl_is_taken_off_the_reward_of_every_token():
    rewards = kl_in_reward([0.0, 0.0, 1.0], [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5], beta=0.1)
    assert rewards == pytest.approx([-0.05, 0.1, 1.0], abs=1e-12)
    assert kl_in_reward([0.25], [-3.0], [-9.0], beta=0.0) == [0.25]
    with pytest.raises(ValueError, match="longer"):
        kl_in_reward([1.0], [-1.0, -1.0], [-1.0], beta=0.1)
