"""What is left out of training is counted by its reason, and groups are made of the rest."""

import json
from pathlib import Path

import pytest

from rllm.algorithms import filters
from rllm.algorithms.grouping import Accounting, group_by_role, usable_trajectories
from rllm.types import Episode, Step, TerminationReason, Trajectory, TrajectoryGroup

CASES = json.loads((Path(__file__).parents[1] / "reference" / "cases.json").read_text())


def trajectory(reward=1.0, role="solver", lengths=(2,), finish="stop"):
    steps = [
        Step(prompt_ids=[1], response_ids=[5] * n, logprobs=[-1.0] * n, finish_reason=finish if i == 0 else "stop")
        for i, n in enumerate(lengths)
    ]
    return Trajectory(name=role, reward=reward, steps=steps)


def episode(k, reason, *trajectories):
    return Episode(id=f"t:{k}", trajectories=list(trajectories), termination_reason=reason)


def test_episodes_that_ended_for_a_filtered_reason_are_counted_and_never_grouped():
    reasons = [TerminationReason.ENV_DONE, TerminationReason.MAX_TURNS_EXCEEDED, None, TerminationReason.TIMEOUT]
    episodes = [episode(k, reason, trajectory(k), trajectory(k, "judge")) for k, reason in enumerate(reasons)]
    account = Accounting()
    items = usable_trajectories(episodes, account)
    kept = filters.drop_terminated(
        items, episodes, {TerminationReason.MAX_TURNS_EXCEEDED, TerminationReason.UNKNOWN}, account
    )
    assert [t.reward for _, t in kept] == [0, 0]
    assert account.dropped == {"max_turns_exceeded": 2, "unknown": 2} and account.failed == {"timeout": 2}
    account.trained = len(kept)
    account.check()


def test_a_completion_cut_off_anywhere_takes_its_trajectory_out():
    account = Accounting()
    items = [("t", trajectory(1.0, lengths=(2, 2), finish="length")), ("t", trajectory(0.0)), ("t", trajectory(1.0))]
    kept = filters.drop_truncated(items, account)
    assert [t.reward for _, t in kept] == [0.0, 1.0] and account.dropped == {"truncated": 1}
    (group,) = group_by_role(kept)
    assert len(group.trajectories) == 2


def test_the_soft_penalty_is_that_of_the_reference_case():
    (case,) = [case for case in CASES if case["kind"] == "soft_overlong"]
    given = case["input"]
    found = [filters.soft_overlong(n, given["max_len"], given["cache_len"]) for n in given["lengths"]]
    assert found == pytest.approx(case["expected"]["penalty"], abs=1e-12)


def test_the_longest_completion_of_a_trajectory_costs_and_its_steps_stay_the_same():
    before = trajectory(1.0, lengths=(3, 9, 1))
    penalty = filters.overlong_penalty(before, max_len=10, cache_len=4, factor=0.5)
    assert penalty == pytest.approx(-0.5 * 3 / 4)
    after = filters.shaped(before, penalty)
    assert (before.reward, after.reward) == (1.0, pytest.approx(0.625)) and after.steps is before.steps


def group(role, *rewards):
    return TrajectoryGroup("t", role, [trajectory(r, role) for r in rewards])


def test_a_task_is_kept_if_one_of_its_roles_has_a_signal_and_counted_role_by_role_if_none_has():
    units = [
        [group("solver", 1, 0), group("judge", 1, 1)],
        [group("solver", 1, 1, 1), group("judge", 0)],
        [group("solver", 0.5, 0.5 + 1e-12)],
    ]
    account = Accounting()
    kept = filters.informative(units, account)
    assert kept == units[:1]
    assert account.dropped == {"zero_std": 5, "singleton": 1}


def test_a_sample_of_too_old_a_policy_is_stale_and_not_trained():
    def sampled(*versions):
        t = trajectory(lengths=(len(versions),))
        t.steps[0].versions = list(versions)
        return t

    account = Accounting(generated=5)
    items = [("t", t) for t in (sampled(3, 3), sampled(3, 4), sampled(4, 5), sampled(5, 5), trajectory())]
    kept = filters.drop_stale(items, 5, 1, account)
    assert [t.steps[0].versions for _, t in kept] == [[4, 5], [5, 5], []]
    assert account.stale == 2
    account.trained = len(kept)
    account.check()
    assert len(filters.drop_stale(items, 5, 2, Accounting())) == 5
