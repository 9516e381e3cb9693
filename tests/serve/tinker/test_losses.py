"""Tinker's losses against their formulas, written out token by token in Python's own floats, and their gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rllm.serve.tinker.losses import LOSSES, LossError, check_inputs, check_settings, row_loss

LP = [-0.5, -1.25, -0.1, -3.0, -2.0]
Q = [0.0, -1.0, -0.7, -1.5, -2.1]
A = [0.0, 1.5, -0.5, 2.0, -1.0]
Formula = Callable[[list[float]], float]


def clipped(ratios: list[float], low: float, high: float) -> float:
    return -sum(min(r * a, min(max(r, low), high) * a) for r, a in zip(ratios, A, strict=True))


def sequence_ratio(lp: list[float], places: list[int]) -> float:
    return math.exp(sum(lp[i] - Q[i] for i in places) / len(places))


VALUES: dict[str, Formula] = {
    "cross_entropy": lambda lp: -sum(w * v for w, v in zip(A, lp, strict=True)),
    "importance_sampling": lambda lp: -sum(math.exp(v - q) * a for v, q, a in zip(lp, Q, A, strict=True)),
    "ppo": lambda lp: clipped([math.exp(v - q) for v, q in zip(lp, Q, strict=True)], 0.8, 1.2),
    "dro": lambda lp: -sum(v * a - 0.025 * (v - q) ** 2 for v, q, a in zip(lp, Q, A, strict=True)),
    "gspo": lambda lp: clipped([sequence_ratio(lp, [1, 2, 3, 4])] * 5, 0.8, 1.2),
}


def inputs_of(name: str, **more: list[float]) -> dict[str, torch.Tensor]:
    given = {"weights": A} if name == "cross_entropy" else {"logprobs": Q, "advantages": A}
    return {key: torch.tensor(values, dtype=torch.float64) for key, values in {**given, **more}.items()}


def gradient(name: str, settings: dict[str, float] | None = None, **more: list[float]) -> torch.Tensor:
    lp = torch.tensor(LP, dtype=torch.float64, requires_grad=True)
    row_loss(name, lp, inputs_of(name, **more), check_settings(name, settings or {})).backward()
    assert lp.grad is not None
    return lp.grad


def numerical(formula: Formula) -> list[float]:
    step, slopes = 1e-6, []
    for i in range(len(LP)):
        up, down = ([v + sign * step * (j == i) for j, v in enumerate(LP)] for sign in (1, -1))
        slopes.append((formula(up) - formula(down)) / (2 * step))
    return slopes


@pytest.mark.parametrize("name", VALUES)
def test_the_value_is_the_formula_summed(name: str) -> None:
    lp = torch.tensor(LP, dtype=torch.float64)
    loss = row_loss(name, lp, inputs_of(name), check_settings(name, {}))
    assert loss.item() == pytest.approx(VALUES[name](LP), rel=1e-6)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    assert gradient(name).tolist() == pytest.approx(numerical(VALUES[name]), abs=1e-5)


def test_gspo_gives_a_sequence_of_one_advantage_the_gradient_of_its_own_ratio() -> None:
    alike = [0.0, 1.0, 1.0, 1.0, 1.0]

    def loss(lp: list[float]) -> float:
        return -4 * sequence_ratio(lp, [1, 2, 3, 4])

    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0}
    assert gradient("gspo", wide, advantages=alike).tolist() == pytest.approx(numerical(loss), abs=1e-5)


def test_gspo_takes_the_mean_over_the_mask() -> None:
    mask = [0.0, 0.0, 1.0, 1.0, 0.0]
    lp = torch.tensor(LP, dtype=torch.float64)
    loss = row_loss("gspo", lp, inputs_of("gspo", sequence_ratio_mask=mask), check_settings("gspo", {}))
    ratio = sequence_ratio(LP, [2, 3])
    wanted = -sum(min(ratio * a, min(max(ratio, 0.8), 1.2) * a) for a in A)
    assert loss.item() == pytest.approx(wanted)


def test_cispo_weighs_the_log_probability_by_a_clipped_ratio_without_gradient() -> None:
    settings = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
    wanted = [-min(max(math.exp(v - q), 0.9), 1.3) * a for v, q, a in zip(LP, Q, A, strict=True)]
    assert gradient("cispo", settings).tolist() == pytest.approx(wanted)
    one_sided = [-min(math.exp(v - q), 4.0) * a for v, q, a in zip(LP, Q, A, strict=True)]
    assert gradient("cispo").tolist() == pytest.approx(one_sided)


def test_weights_multiply_the_loss_of_each_token() -> None:
    weights = [0.0, 1.0, 0.5, -1.0, 0.0]
    plain, weighted = gradient("importance_sampling"), gradient("importance_sampling", weights=weights)
    assert weighted.tolist() == pytest.approx([w * g for w, g in zip(weights, plain.tolist(), strict=True)])


def test_thresholds_of_single_tokens_go_before_the_setting() -> None:
    lows, highs = [0.0, 0.9, 0.5, 0.1, 0.95], [9.0, 1.1, 1.5, 9.0, 1.01]
    lp = torch.tensor(LP, dtype=torch.float64)
    more = {"clip_low_threshold": lows, "clip_high_threshold": highs}
    loss = row_loss("ppo", lp, inputs_of("ppo", **more), check_settings("ppo", {"clip_low_threshold": 0.99}))
    ratios = [math.exp(v - q) for v, q in zip(LP, Q, strict=True)]
    each = zip(ratios, A, lows, highs, strict=True)
    assert loss.item() == pytest.approx(-sum(min(r * a, min(max(r, lo), hi) * a) for r, a, lo, hi in each))


def test_where_a_loss_says_it_has_no_gradient_it_has_none() -> None:
    for name in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"):
        arrays = {key: values.numpy() for key, values in inputs_of(name).items()}
        trained = LOSSES[name].trained({**arrays, "target_tokens": np.arange(5)})
        assert (gradient(name)[torch.from_numpy(~trained)] == 0).all(), name
    assert not LOSSES["cross_entropy"].trained({"weights": np.zeros((2, 3)), "target_tokens": np.zeros((2, 3))}).any()


def test_a_huge_ratio_at_a_token_without_advantage_does_no_harm() -> None:
    lp = torch.tensor([-1.0, -1.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-200.0, -1.0]), "advantages": torch.tensor([0.0, 1.0])}
    for name in ("importance_sampling", "ppo", "cispo"):
        loss = row_loss(name, lp, inputs, check_settings(name, {}))
        assert loss.isfinite() and torch.autograd.grad(loss, lp)[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        (
            "stable_reinforce",
            {},
            "'stable_reinforce' is not served here: its formula is not published; there are cross_entropy",
        ),
        ("ppo", {"clip_epsilon": 0.2}, "no 'clip_epsilon'; it has clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 1.0}, "no settings"),
        ("dro", {"beta": "big"}, "'big'"),
        ("dro", {"beta": math.nan}, "nan"),
        ("ppo", {"clip_low_threshold": 1.5}, "1.5 is above"),
    ],
)
def test_settings_that_do_not_exist_are_refused(name: str, settings: dict[str, float | str], told: str) -> None:
    with pytest.raises(LossError, match=told):
        check_settings(name, settings)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("ppo", {"logprobs": None}, "needs 'logprobs'"),
        ("ppo", {"mask": np.ones(3)}, "takes no 'mask'"),
        ("ppo", {"advantages": np.ones(2)}, "2 entries for 3 tokens"),
        ("ppo", {"advantages": np.array([1.0, np.inf, 0.0])}, "not finite"),
        ("ppo", {"target_tokens": np.ones((3, 2), int)}, "one value a token"),
        ("cross_entropy", {"target_tokens": np.ones((3, 2), int)}, r"weights have shape \[3\]"),
        ("cross_entropy", {"target_tokens": np.ones((3, 0), int), "weights": np.ones((3, 0))}, "at least one target"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name: str, change: dict[str, np.ndarray | None], told: str) -> None:
    given: dict[str, np.ndarray] = {"target_tokens": np.arange(3)}
    given |= {"weights": np.ones(3)} if name == "cross_entropy" else {"logprobs": np.ones(3), "advantages": np.ones(3)}
    changed = {key: values for key, values in {**given, **change}.items() if values is not None}
    with pytest.raises(LossError, match=told):
        check_inputs(name, 3, changed)
