"""Advantages have the values their formulas give, and nothing irrelevant changes them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.advantages import estimate, is_uniform
from rllm.errors import ConfigError


@pytest.mark.parametrize(
    ("rewards", "std", "expected"),
    [
        ([1, 0, 0, 0], "sample", [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], "population", [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ([1, 0, 0, 0], "none", [0.75, -0.25, -0.25, -0.25]),
        ([1, 1, 1, 0, 0, 0, 0, 0], "sample", [1.2076147] * 3 + [-0.7245688] * 5),
        ([1, 1, 1, 1], "sample", [0, 0, 0, 0]),
        ([0.7], "sample", [0]),
    ],
)
def test_grpo_has_the_value_of_its_formula(rewards, std, expected):
    assert estimate("grpo", rewards, std) == pytest.approx(expected, abs=1e-6)


def test_reinforce_is_the_reward_itself_and_allows_a_group_of_one():
    assert estimate("reinforce", [0.7]) == [0.7]


def test_an_unknown_estimator_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown 'grpoo'.*grpo, reinforce"):
        estimate("grpoo", [1.0, 0.0])


def test_float_residue_of_equal_rewards_is_no_signal():
    rewards = [0.1 + 0.2, 0.3, 0.3]
    assert is_uniform(rewards)
    assert estimate("grpo", rewards) == [0.0, 0.0, 0.0]


finite_rewards = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)


@given(finite_rewards, st.sampled_from(["sample", "population", "none"]))
def test_grpo_is_finite_and_sums_to_zero(rewards, std):
    advantages = estimate("grpo", rewards, std)
    assert all(math.isfinite(a) for a in advantages)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-5 * len(rewards) * (1e3 if std == "none" else 1))


@given(finite_rewards, st.integers(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, constant):
    rewards = [round(r, 2) for r in rewards]
    shifted = [r + constant for r in rewards]
    assert estimate("grpo", shifted) == pytest.approx(estimate("grpo", rewards), abs=1e-6)
