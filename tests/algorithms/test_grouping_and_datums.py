"""Every trajectory is trained or counted; groups are (task, role); rows are exactly the sampled tokens."""

import pytest

from rllm.algorithms.datums import build_datums, rows_of
from rllm.algorithms.grouping import Accounting, group_by_role, usable_trajectories
from rllm.types import Episode, Step, TerminationReason, Trajectory


def step(prompt=(1, 2), response=(3, 4), **more):
    return Step(prompt_ids=list(prompt), response_ids=list(response), logprobs=[-1.0] * len(response), **more)


def trajectory(role, reward, *steps):
    return Trajectory(name=role, reward=reward, steps=list(steps) or [step()])


def episode(task, k, *trajectories, reason=TerminationReason.ENV_DONE, error=None):
    return Episode(id=f"{task}:{k}", trajectories=list(trajectories), termination_reason=reason, error=error)


def datums(episodes, **options):
    account = Accounting()
    groups = group_by_role(usable_trajectories(episodes, account))
    rows = build_datums(groups, account, **({"estimator": "grpo"} | options))
    account.check()
    return rows, account, groups


def test_solver_and_judge_are_never_pooled():
    episodes = [
        episode("t", 0, trajectory("solver", 1.0), trajectory("solver", 0.0), trajectory("judge", 1.0)),
        episode("t", 1, trajectory("solver", 1.0), trajectory("solver", 1.0), trajectory("judge", 0.0)),
    ]
    rows, account, groups = datums(episodes, std="none")
    assert [(g.group_id, len(g.trajectories)) for g in groups] == [("t:solver", 4), ("t:judge", 2)]
    by_role = {role: [row.advantages[-1] for row in rows if row.role == role] for role in ("solver", "judge")}
    assert by_role == {"solver": [0.25, -0.75, 0.25, 0.25], "judge": [0.5, -0.5]}
    assert account.trained == account.generated == 6


def test_a_task_id_with_colons_keeps_its_group():
    episodes = [episode("ns:a:1", k, trajectory("solver", float(k))) for k in range(2)]
    _, _, groups = datums(episodes)
    assert [g.task_id for g in groups] == ["ns:a:1"]


def test_an_all_equal_role_is_dropped_alone_and_counted():
    episodes = [episode("t", k, trajectory("solver", 1.0), trajectory("judge", float(k))) for k in range(2)]
    rows, account, _ = datums(episodes)
    assert {row.role for row in rows} == {"judge"}
    assert account.to_dict() == {
        "generated": 4,
        "trained": 2,
        "dropped": {"zero_std": 2},
        "failed": {},
        "stale": 0,
    }


def test_keep_trains_an_all_equal_group_with_advantage_zero():
    episodes = [episode("t", k, trajectory("solver", 1.0)) for k in range(2)]
    rows, account, _ = datums(episodes, zero_std="keep")
    assert account.trained == 2 and all(a == 0 for row in rows for a in row.advantages)


def test_failures_missing_rewards_singletons_and_empty_answers_are_each_counted():
    episodes = [
        episode("t", 0, reason=TerminationReason.ERROR, error="boom"),
        episode("t", 1, trajectory("solver", 1.0), reason=TerminationReason.TIMEOUT),
        episode("t", 2, trajectory("solver", None)),
        episode("t", 3, trajectory("solver", 1.0, step(response=()))),
        episode("t", 4, trajectory("solver", 1.0)),
    ]
    rows, account, _ = datums(episodes)
    assert rows == []
    assert account.to_dict() == {
        "generated": 5,
        "trained": 0,
        "dropped": {"no_tokens": 1, "singleton": 1},
        "failed": {"error": 1, "timeout": 1, "no_reward": 1},
        "stale": 0,
    }


def test_a_lost_sample_raises():
    account = Accounting(generated=2, trained=1)
    with pytest.raises(AssertionError, match="lost samples"):
        account.check()


def test_steps_that_extend_each_other_become_one_row_with_the_right_mask():
    steps = [step([1, 2, 3], [4, 5]), step([1, 2, 3, 4, 5, 6, 7], [8])]
    (row,) = rows_of(trajectory("solver", 1.0, *steps), [2.0, 2.0])
    assert row.ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.mask == [0, 0, 0, 1, 1, 0, 0, 1]
    assert row.advantages == [0, 0, 0, 2.0, 2.0, 0, 0, 2.0]
    assert row.logprobs == [0, 0, 0, -1.0, -1.0, 0, 0, -1.0]


def test_a_rewritten_history_starts_a_new_row_and_loses_nothing():
    steps = [step([1, 2, 3], [4, 5]), step([1, 2, 9], [8])]
    rows = rows_of(trajectory("solver", 1.0, *steps), [1.0, 1.0])
    assert [row.ids for row in rows] == [[1, 2, 3, 4, 5], [1, 2, 9, 8]]
    assert sum(row.n_trained for row in rows) == 3


def test_conversations_that_alternate_in_one_trajectory_become_a_row_each():
    steps = [step((1,), (2,)), step((7,), (8,)), step((1, 2, 3), (4,)), step((7, 8), (9,))]
    first, second = rows_of(trajectory("solver", 1.0, *steps), [1.0] * 4)
    assert (first.ids, first.mask) == ([1, 2, 3, 4], [0, 1, 0, 1])
    assert (second.ids, second.mask) == ([7, 8, 9], [0, 1, 1])


def test_an_empty_completion_gives_no_row():
    assert rows_of(trajectory("solver", 1.0, step(response=())), [1.0]) == []


def test_missing_logprobs_are_an_error_that_names_the_step():
    bad = Step(id="call-7", prompt_ids=[1], response_ids=[2, 3])
    with pytest.raises(ValueError, match=r"call-7.*2 sampled tokens but 0 log-probabilities"):
        rows_of(trajectory("solver", 1.0, bad), [1.0])
    with pytest.raises(ValueError, match="2 response ids but 1 logprobs"):
        Step(response_ids=[1, 2], logprobs=[0.5])
