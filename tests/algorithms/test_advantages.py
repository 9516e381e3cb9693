"""Advantages have the values their formulas give, and nothing irrelevant changes them."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.advantages import (
    ESTIMATORS,
    RewardGroup,
    estimate,
    is_uniform,
    register_advantage,
    returns,
    whiten,
)
from rllm.config import names
from rllm.config.load import load_config
from rllm.errors import ConfigError

WITHOUT_BASELINE = {"reinforce"}
SCALE_FREE = {"grpo", "prpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}


def groups(*rewards, lengths=None):
    return [RewardGroup(r, lengths[i] if lengths else [1] * len(r)) for i, r in enumerate(rewards)]


def flat(lists):
    return [x for part in lists for x in part]


def one(name, rewards, std="sample"):
    return estimate(name, groups(rewards), std)[0]


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
    assert one("grpo", rewards, std) == pytest.approx(expected, abs=1e-6)


def test_dr_grpo_takes_no_standard_deviation_whatever_is_set():
    for std in ("sample", "population", "none"):
        assert one("dr_grpo", [1, 0, 0, 0], std) == [0.75, -0.25, -0.25, -0.25]


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    rewards = [0.3, -1.0, 2.0, 0.0, 5.0]
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(5)]
    assert one("rloo", rewards) == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])


def test_opo_weighs_the_baseline_by_length():
    # (3 * 1 + 1 * 0) / 4
    assert estimate("opo", groups([1.0, 0.0], lengths=[[3, 1]])) == [[0.25, -0.75]]


def test_reinforce_is_the_reward_itself_and_allows_a_group_of_one():
    assert one("reinforce", [0.7]) == [0.7]


def test_prpo_compares_with_all_samples_of_the_role_alike():
    found = estimate("prpo", groups([1.0, 2.0], [3.0, 4.0], lengths=[[1, 50], [7, 9]]))
    assert flat(found) == pytest.approx([-1.1618950039, -0.3872983346, 0.3872983346, 1.1618950039])
    population = estimate("prpo", groups([1.0, 2.0], [3.0, 4.0]), "population")
    assert flat(population) == pytest.approx(((np.arange(1, 5) - 2.5) / np.std(np.arange(1, 5))).tolist())


@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
def test_reinforce_plus_plus_whitens_over_tokens(baseline, std, ddof):
    rewards, lengths = [[1.0, 0.0, 2.0], [0.0, 4.0]], [[2, 3, 1], [5, 4]]
    centred = [[r - (np.mean(g) if baseline else 0.0) for r in g] for g in rewards]
    tokens = np.repeat(flat(centred), flat(lengths))
    expected = (np.array(flat(centred)) - tokens.mean()) / tokens.std(ddof=ddof)
    name = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    assert flat(estimate(name, groups(*rewards, lengths=lengths), std)) == pytest.approx(expected.tolist())


def test_a_group_of_one_gets_0_and_is_no_part_of_the_batch_statistics_where_a_baseline_is_taken():
    alone = estimate("reinforce_plus_plus_baseline", groups([1.0, 0.0], [100.0], [3.0, 1.0]))
    assert alone[1] == [0.0]
    assert [alone[0], alone[2]] == estimate("reinforce_plus_plus_baseline", groups([1.0, 0.0], [3.0, 1.0]))


@pytest.mark.parametrize(("gamma", "expected"), [(0.9, [0.81, 0.9, 1.0]), (0.0, [0, 0, 1]), (1.0, [1, 1, 1])])
def test_returns_discount_later_rewards(gamma, expected):
    assert returns([0, 0, 1], gamma) == pytest.approx(expected)


def test_an_unknown_estimator_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown 'grpoo' \(did you mean 'grpo'\?\); known are grpo, "):
        estimate("grpoo", groups([1.0, 0.0]))


def test_float_residue_of_equal_rewards_is_no_signal():
    rewards = [0.1 + 0.2, 0.3, 0.3]
    assert is_uniform(rewards)
    for name in set(ESTIMATORS) - WITHOUT_BASELINE:
        assert one(name, rewards) == [0.0, 0.0, 0.0], name
    assert whiten(rewards, [3, 0, 1]) == [0.0, 0.0, 0.0]


batches = st.lists(
    st.lists(st.tuples(st.floats(-65504, 65504, width=16), st.integers(1, 300)), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


def drawn(batch):
    return [RewardGroup([r for r, _ in group], [n for _, n in group]) for group in batch]


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches, std=st.sampled_from(["sample", "population", "none"]))
def test_every_finite_reward_gives_finite_advantages_also_at_the_ends_of_half_precision(name, batch, std):
    found = estimate(name, drawn(batch), std)
    assert all(math.isfinite(a) for group in found for a in group)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - WITHOUT_BASELINE))
@given(batch=batches, std=st.sampled_from(["sample", "population", "none"]))
def test_advantages_with_a_baseline_do_not_lean_to_one_side(name, batch, std):
    """Their sum, over what the baseline is a mean of, is 0."""
    data = drawn(batch)
    found = estimate(name, data, std)
    by_token = name in ("opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    sums = [
        [(n if by_token else 1) * a for n, a in zip(group.lengths, values, strict=True)]
        for group, values in zip(data, found, strict=True)
    ]
    sums = sums if name in ("grpo", "dr_grpo", "rloo", "opo") else [flat(sums)]
    for terms in sums:
        assert math.fsum(terms) == pytest.approx(0.0, abs=1e-7 * (1 + max(map(abs, terms))) * len(terms))


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - WITHOUT_BASELINE))
@given(batch=batches, constant=st.integers(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(name, batch, constant):
    plain = [RewardGroup([round(r % 10, 1) for r in g.rewards], g.lengths) for g in drawn(batch)]
    shifted = [RewardGroup([r + constant for r in g.rewards], g.lengths) for g in plain]
    for a, b in zip(estimate(name, shifted), estimate(name, plain), strict=True):
        assert a == pytest.approx(b, abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches, order=st.randoms())
def test_the_order_of_samples_and_groups_changes_nothing(name, batch, order):
    data = [[(r, n, (i, j)) for j, (r, n) in enumerate(group)] for i, group in enumerate(batch)]

    def by_place(arranged):
        found = estimate(name, [RewardGroup([r for r, _, _ in g], [n for _, n, _ in g]) for g in arranged])
        return {
            place: a
            for g, values in zip(arranged, found, strict=True)
            for (_, _, place), a in zip(g, values, strict=True)
        }

    shuffled = [order.sample(group, len(group)) for group in order.sample(data, len(data))]
    a, b = by_place(data), by_place(shuffled)
    assert a.keys() == b.keys() and all(b[place] == pytest.approx(a[place], rel=1e-9, abs=1e-9) for place in a)


@pytest.mark.parametrize("name", sorted(SCALE_FREE))
def test_normalised_advantages_do_not_depend_on_the_scale_of_rewards(name):
    rewards = [[1.0, 0.0, 0.5], [2.0, 0.0]]
    scaled = [[1e3 * r for r in g] for g in rewards]
    assert flat(estimate(name, groups(*scaled))) == pytest.approx(flat(estimate(name, groups(*rewards))))


@pytest.fixture
def clean_registry():
    kept = dict(names.ESTIMATORS), set(names.GROUP_RELATIVE), dict(ESTIMATORS)
    yield
    for registry, before in zip((names.ESTIMATORS, names.GROUP_RELATIVE, ESTIMATORS), kept, strict=True):
        registry.clear()
        registry.update(before)


def test_a_users_estimator_is_one_more_name_of_the_config(clean_registry):
    with pytest.raises(ConfigError, match="unknown"):
        load_config(overrides=["algorithm.adv_estimator=best_only"])

    @register_advantage("best_only", group_relative=True)
    def best_only(groups, std):
        return [[float(r == max(g.rewards)) for r in g.rewards] for g in groups]

    assert load_config(overrides=["algorithm.adv_estimator=best_only"]).config.algorithm.adv_estimator == "best_only"
    assert one("best_only", [1.0, 3.0, 2.0]) == [0.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match=r"rollout\.n=1 with algorithm\.adv_estimator=best_only"):
        load_config(overrides=["algorithm.adv_estimator=best_only", "rollout.n=1"])
    with pytest.raises(ConfigError, match="did you mean 'best_only'"):
        load_config(overrides=["algorithm.adv_estimator=best_onyl"])


def test_a_users_estimator_cannot_take_a_built_in_name_or_give_what_does_not_fit(clean_registry):
    with pytest.raises(ConfigError, match="'grpo' is built in"):
        register_advantage("grpo")
    with pytest.raises(ConfigError, match="use a letter"):
        register_advantage("my estimator")
    register_advantage("short")(lambda groups, std: [[0.0] for _ in groups])
    with pytest.raises(ConfigError, match=r"'short': gave \[1\] advantages for groups of \[2\] rewards"):
        one("short", [1.0, 2.0])
    register_advantage("short")(lambda groups, std: [[math.nan for _ in g.rewards] for g in groups])
    with pytest.raises(ConfigError, match="not a finite number"):
        one("short", [1.0, 2.0])


@pytest.mark.parametrize("scale", [1e150, 1e160, 1e308])
@pytest.mark.parametrize("name", sorted(SCALE_FREE))
def test_the_largest_rewards_are_whitened_like_small_ones(name, scale):
    small = [[0.0, 0.5, 1.0], [0.25, -1.0]]
    large = [[scale * r for r in group] for group in small]
    for found, expected in zip(estimate(name, groups(*large)), estimate(name, groups(*small)), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)


def test_advantages_beyond_the_range_of_a_number_are_an_error_that_names_the_reward():
    for name in ("dr_grpo", "rloo", "opo"):
        with pytest.raises(ConfigError, match=rf"'{name}': .* not a finite number; the largest reward is 1.7e\+308"):
            estimate(name, groups([1.7e308, -1.7e308, -1.7e308]))
