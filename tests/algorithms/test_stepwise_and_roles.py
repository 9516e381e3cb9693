"""Advantages of steps, of roles with an estimator of their own, and those that steps bring along, each reach their tokens."""

import pytest

from rllm.algorithms.advantages import ESTIMATORS
from rllm.algorithms.datums import build_datums, check_role_names
from rllm.algorithms.grouping import Accounting, group_by_role, usable_trajectories
from rllm.errors import ConfigError, DataError
from rllm.types import Episode, Step, TerminationReason, Trajectory


def run(*steps, role="solver", reward=0.0):
    """A trajectory whose steps extend each other: step k samples the tokens given for it"""
    history, made = [1], []
    for response, more in steps:
        made.append(Step(prompt_ids=list(history), response_ids=response, logprobs=[-1.0] * len(response), **more))
        history += [*response, 9]
    return Trajectory(name=role, steps=made, reward=reward)


def turns(*rewards, **more):
    return run(*(([10 + k] * (k + 1), {"reward": r}) for k, r in enumerate(rewards)), **more)


def datums(*trajectories, **options):
    account = Accounting()
    episodes = [Episode(f"t:{k}", None, [t], TerminationReason.ENV_DONE) for k, t in enumerate(trajectories)]
    groups = group_by_role(usable_trajectories(episodes, account))
    rows = build_datums(groups, account, **({"estimator": "grpo", "std": "none"} | options))
    account.check()
    return rows, account


def advantages(trajectory):
    return [step.advantage for step in trajectory.steps]


def test_broadcast_gives_every_step_the_advantage_of_the_trajectory():
    a, b = turns(5.0, 7.0, reward=1.0), turns(0.0, reward=0.0)
    (row, _), _ = datums(a, b)
    assert advantages(a) == [0.5, 0.5] and advantages(b) == [-0.5]
    assert row.ids == [1, 10, 9, 11, 11] and row.mask == [0, 1, 0, 1, 1]
    assert row.advantages == [0, 0.5, 0, 0.5, 0.5]


def test_per_step_compares_the_returns_of_the_same_step_index():
    a, b = turns(0.0, 0.0, 1.0), turns(1.0, 0.0, 0.0)
    datums(a, b, stepwise="per_step", gamma=0.5)
    # returns a: .25 .5 1; b: 1 0 0
    assert advantages(a) == [-0.375, 0.25, 0.5] and advantages(b) == [0.375, -0.25, -0.5]


def test_per_step_without_discounting_later_rewards_is_the_steps_own_reward():
    a, b = turns(3.0, 1.0), turns(1.0, 2.0)
    datums(a, b, stepwise="per_step", gamma=0.0)
    assert advantages(a) == [1.0, -0.5] and advantages(b) == [-1.0, 0.5]


def test_where_no_step_was_rewarded_the_trajectorys_reward_is_that_of_its_last_step():
    a, b = turns(0.0, 0.0, reward=1.0), turns(0.0, 0.0, reward=0.0)
    datums(a, b, stepwise="per_step", gamma=0.5)
    assert advantages(a) == [0.25, 0.5]
    single = [turns(0.0, reward=r) for r in (1.0, 0.0)], [turns(0.0, reward=r) for r in (1.0, 0.0)]
    datums(*single[0], stepwise="per_step")
    datums(*single[1])
    assert [advantages(t) for t in single[0]] == [advantages(t) for t in single[1]] == [[0.5], [-0.5]]


def test_a_step_without_a_signal_is_not_trained_and_its_tokens_leave_the_denominators():
    a, b = turns(0.0, 1.0), turns(0.0, 0.0)
    longer = turns(0.0, 1.0, 4.0)
    (row_a, row_b, row_longer), account = datums(a, b, longer, stepwise="per_step", gamma=0.0)
    assert row_a.mask == row_b.mask == [0, 0, 0, 1, 1]
    assert row_a.logprobs == [0, 0, 0, -1, -1]
    assert row_longer.mask == [0, 0, 0, 1, 1, 0, 0, 0, 0]  # nothing to compare its third step with
    assert (account.trained, account.untrained_steps) == (3, 4)
    assert account.to_metrics()["samples/untrained_steps"] == 4


def test_keep_trains_steps_without_a_signal_with_advantage_zero():
    rows, account = datums(turns(0.0, 1.0), turns(0.0, 0.0), stepwise="per_step", gamma=0.0, zero_std="keep")
    assert [row.mask for row in rows] == [[0, 1, 0, 1, 1]] * 2 and account.untrained_steps == 0


def test_a_trajectory_of_which_no_step_has_a_signal_is_dropped_for_its_reason():
    _, account = datums(turns(1.0, 1.0), turns(1.0, 1.0), stepwise="per_step")
    assert account.dropped == {"zero_std": 2}
    _, account = datums(turns(1.0, 2.0), stepwise="per_step")
    assert account.dropped == {"singleton": 1}


def test_roles_may_have_estimators_of_their_own_and_see_their_own_batch_whole(monkeypatch):
    seen = []

    def seen_by_test(groups, std):
        seen.append([(list(g.rewards), list(g.lengths)) for g in groups])
        return [[7.0] * len(g.rewards) for g in groups]

    monkeypatch.setitem(ESTIMATORS, "seen_by_test", seen_by_test)
    solvers = [turns(0.0, reward=1.0), turns(0.0, 0.0, reward=1.0)]
    judge = turns(0.0, role="judge", reward=0.25)
    _, account = datums(*solvers, judge, per_role={"solver": "seen_by_test", "judge": "reinforce"})
    assert seen == [[([1.0, 1.0], [1, 3])]]
    assert [advantages(t) for t in (*solvers, judge)] == [[7.0], [7.0, 7.0], [0.25]]
    assert account.trained == 3


def test_precomputed_advantages_are_taken_as_they_are():
    whole, tokenwise = run(([5, 6], {"advantage": 2})), run(([5, 6], {"advantage": [0.5, -0.5]}))
    rows, account = datums(whole, tokenwise, estimator="precomputed")
    assert [row.advantages for row in rows] == [[0, 2, 2], [0, 0.5, -0.5]]
    assert account.trained == 2  # equal rewards, and groups of one, are no reason to drop them


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        ([0.5], r"step call-7 of trajectory 'solver': 1 advantages for 2 sampled tokens"),
        (None, r"step call-7 .*Step\.advantage is None; algorithm\.adv_estimator=precomputed"),
        ([0.5, float("nan")], "one finite number"),
        (True, "Step.advantage is True"),
        ("high", "Step.advantage is 'high'"),
    ],
)
def test_precomputed_advantages_that_do_not_fit_name_the_step(advantage, message):
    with pytest.raises(DataError, match=message):
        datums(run(([5, 6], {"advantage": advantage, "id": "call-7"})), estimator="precomputed")


def test_a_step_reward_that_is_no_finite_number_names_the_step():
    with pytest.raises(DataError, match=r"step call-7 of trajectory 'solver': reward inf"):
        datums(run(([5], {"reward": float("inf"), "id": "call-7"})), stepwise="per_step")


def test_settings_for_a_role_that_nobody_has_are_refused():
    groups = group_by_role([("t", turns(0.0)), ("t", turns(0.0, role="judge"))])
    check_role_names(groups, {"judge": None}, "algorithm.per_role")
    check_role_names([], {"judge": None}, "algorithm.per_role")
    with pytest.raises(ConfigError, match=r"role 'jugde'; the roles are judge, solver; did you mean 'judge'\?"):
        check_role_names(groups, {"jugde": None}, "algorithm.per_role")
