"""The PPO loss and its gradient have the values of the formula; aggregation does not depend on how rows are split."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.losses import token_loss, token_weights
from rllm.algorithms.spec import LossSpec
from rllm.errors import ConfigError

ASYMMETRIC = LossSpec("ppo_clip", clip_low=0.2, clip_high=0.28)


def test_asymmetric_clip_has_the_right_loss_gradient_and_clip_fraction():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.25, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1, -1, 1, -1, 1, 2], dtype=torch.float64)
    logprobs = ratio.log().requires_grad_()
    loss, stats = token_loss(ASYMMETRIC, logprobs, torch.zeros(6, dtype=torch.float64), advantages)
    assert loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -1.25, -2])
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0, 1.5, -0.5, 0, -1.25, -2])
    assert stats["clip_fraction"].mean().item() == pytest.approx(1 / 3)


def test_on_policy_loss_and_gradient_are_minus_the_advantage():
    advantages = torch.tensor([0.5, -2.0])
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss, _ = token_loss(LossSpec(), logprobs, logprobs.detach(), advantages)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.tolist() == (-advantages).tolist() == gradient.tolist()


@given(
    st.lists(
        st.tuples(st.floats(-1e4, 0, width=32), st.floats(-1e4, 0, width=32), st.floats(-100, 100, width=32)),
        min_size=1,
        max_size=20,
    )
)
def test_no_finite_input_gives_nan_or_infinity(rows):
    logprobs, old, advantages = (torch.tensor(column) for column in zip(*rows, strict=True))
    logprobs.requires_grad_()
    loss, _ = token_loss(ASYMMETRIC, logprobs, old, advantages)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and logprobs.grad is not None and torch.isfinite(logprobs.grad).all()


def test_token_mean_weighs_every_trained_token_alike_and_skips_empty_rows():
    assert token_weights(LossSpec(), [3, 0, 1]) == [0.25, 0.0, 0.25]
    # [[1, 2, 3], [10]] -> token mean 4
    weights = token_weights(LossSpec(), [3, 1])
    assert math.fsum(weights[0] * x for x in (1, 2, 3)) + weights[1] * 10 == pytest.approx(4.0)


def test_all_rows_empty_is_zero_not_nan():
    assert token_weights(LossSpec(), [0, 0]) == [0.0, 0.0]


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="ppo_clip"):
        token_loss(LossSpec("pppo"), torch.zeros(1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ConfigError, match="token-mean"):
        token_weights(LossSpec(aggregation="tokenmean"), [1])
