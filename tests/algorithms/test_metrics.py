"""Reported numbers mean what their docstrings say."""

import math

import pytest

from rllm.algorithms.grouping import Accounting, group_by_role, usable_trajectories
from rllm.algorithms.metrics import (
    episode_metrics,
    finite_or_none,
    pass_at_k,
    reward_metrics,
    validation_metrics,
)
from rllm.types import Episode, Step, Task, TerminationReason, Trajectory


def solver_judge(task, k, solvers, judge, source=None, failed=False):
    def run(role, reward):
        return Trajectory(name=role, reward=reward, steps=[Step(prompt_ids=[1], response_ids=[2], logprobs=[-1.0])])

    return Episode(
        id=f"{task}:{k}",
        task=Task(id=task, metadata={"data_source": source} if source else {}),
        trajectories=[*(run("solver", r) for r in solvers), run("judge", judge)],
        is_correct=judge == 1,
        metrics={"solver_acc": sum(solvers) / len(solvers), "judge_acc": judge},
        termination_reason=TerminationReason.ERROR if failed else TerminationReason.ENV_DONE,
    )


def test_critic_score_is_the_mean_over_trajectories_of_every_role():
    episodes = [solver_judge("a", 0, [1, 0], 1), solver_judge("a", 1, [0, 0], 0)]
    metrics = reward_metrics(group_by_role(usable_trajectories(episodes, Accounting())))
    n, solver, judge = 2, 0.25, 0.5
    assert metrics["critic/score/mean"] == pytest.approx((n * solver + judge) / (n + 1))
    assert metrics["reward/solver/mean"] == solver and metrics["reward/judge/mean"] == judge


def test_validation_is_a_mean_over_episodes_by_source_and_unknown_without_one():
    episodes = [
        solver_judge("a", 0, [1, 0], 1, source="countdown"),
        solver_judge("b", 0, [0, 0], 0, source="countdown"),
        solver_judge("c", 0, [1, 1], 1),
    ]
    metrics = validation_metrics(episodes)
    assert metrics["val/countdown/solver_acc"] == 0.25
    assert metrics["val/countdown/judge_acc"] == metrics["val/countdown/pass@1"] == 0.5
    assert metrics["val/unknown/solver_acc"] == 1.0


def test_a_failed_episode_is_counted_and_never_a_score_of_zero():
    episodes = [solver_judge("a", 0, [1, 1], 1, "s"), solver_judge("b", 0, [0, 0], 0, "s", failed=True)]
    metrics = validation_metrics(episodes)
    assert metrics["val/s/solver_acc"] == 1.0 and metrics["val/s/failed"] == 1.0
    assert episode_metrics(episodes)["batch/termination/error"] == 0.5


def test_solve_shares_are_shares_of_tasks():
    episodes = [
        solver_judge("a", 0, [1], 1),
        solver_judge("a", 1, [1], 0),
        solver_judge("b", 0, [1], 1),
        solver_judge("c", 0, [1], 0),
    ]
    metrics = episode_metrics(episodes)
    assert metrics["batch/solve_partial"] == pytest.approx(1 / 3)
    assert metrics["batch/solve_all"] == metrics["batch/solve_none"] == pytest.approx(1 / 3)


def test_pass_at_k_is_unbiased():
    assert pass_at_k(8, 3, 4) == pytest.approx(0.9285714)
    assert pass_at_k(4, 0, 2) == 0.0 and pass_at_k(4, 4, 4) == 1.0
    with pytest.raises(ValueError, match="at least 5 tries"):
        pass_at_k(4, 1, 5)


def test_files_hold_null_instead_of_nan():
    assert finite_or_none({"a": math.nan, "b": math.inf, "c": 1.0}) == {"a": None, "b": None, "c": 1.0}
