"""Batches are gathered until enough of them teach something; whatever is left out on the way is counted and changes no mean in secret."""

import itertools

import pytest

from rllm.collect import collect
from rllm.config.load import load_config
from rllm.types import Episode, Step, Task, TerminationReason, Trajectory


class FakeRollouts:
    """Two episodes a task; `rewards(task number, k)` of a solver and, with it, a judge where `judge` gives a reward."""

    def __init__(self, rewards, finish=lambda number, k: "stop", reason=lambda number, k: TerminationReason.ENV_DONE):
        self.rewards, self.finish, self.reason = rewards, finish, reason
        self.asked: list[tuple[list[str], int, int]] = []

    def run(self, tasks, *, n, step, attempt, on_episode=None):
        self.asked.append(([task.id for task in tasks], step, attempt))
        episodes = []
        for task in tasks:
            for k in range(n):
                number = int(task.id)
                length = 10 if self.finish(number, k) == "length" else 4
                response = Step(
                    prompt_ids=[1],
                    response_ids=[2] * length,
                    logprobs=[-1.0] * length,
                    finish_reason=self.finish(number, k),
                )
                trajectory = Trajectory(name="solver", steps=[response], reward=self.rewards(number, k))
                reason = self.reason(number, k)
                episodes.append(Episode(id=f"{task.id}:{k}", trajectories=[trajectory], termination_reason=reason))
        return episodes


def gathered(rollouts, *overrides, tasks=100, step=1):
    config = load_config(
        overrides=["data.train_batch_size=3", "rollout.n=2", "data.max_response_length=10", *overrides]
    ).config
    numbers = itertools.cycle(range(tasks))
    batches = iter(lambda: [Task(str(next(numbers))) for _ in range(3)], None)
    found = collect(rollouts, batches, config, step)
    found.account.trained = sum(len(g.trajectories) for g in found.groups)
    found.account.check()
    return found, found.metrics(config)


SAMPLING = "algorithm.rejection_sampling.enable=true"


def even_tasks_differ(number, k):
    return float(k) if number % 2 == 0 else 1.0


def test_without_rejection_sampling_a_step_is_one_batch_and_every_group_is_kept():
    rollouts = FakeRollouts(even_tasks_differ)
    found, metrics = gathered(rollouts)
    assert rollouts.asked == [(["0", "1", "2"], 1, 0)]
    assert [g.task_id for g in found.groups] == ["0", "1", "2"] and found.account.dropped == {}
    assert "critic/score/kept" not in metrics and "rejection_sampling/batches" not in metrics


def test_batches_are_gathered_until_there_are_enough_tasks_with_a_signal():
    rollouts = FakeRollouts(even_tasks_differ)
    found, metrics = gathered(rollouts, SAMPLING, step=7)
    assert rollouts.asked == [(["0", "1", "2"], 7, 0), (["3", "4", "5"], 7, 1)]
    assert [g.task_id for g in found.groups] == ["0", "2", "4"]
    assert found.account.generated == 12 and found.account.dropped == {"zero_std": 6}
    assert metrics["critic/score/mean"] == pytest.approx(9 / 12) and metrics["critic/score/kept"] == 0.5
    assert metrics["rejection_sampling/batches"] == 2 and metrics["rejection_sampling/tasks"] == 3


def test_more_than_enough_is_cut_to_the_batch_size_and_counted():
    found, _ = gathered(FakeRollouts(lambda number, k: 1.0 if number == 0 else float(k)), SAMPLING)
    assert [g.task_id for g in found.groups] == ["1", "2", "3"]
    assert found.account.dropped == {"zero_std": 2, "surplus": 4} and found.account.generated == 12


def test_after_the_most_batches_the_step_has_what_there_is():
    rollouts = FakeRollouts(lambda number, k: float(k) if number == 4 else 0.0)
    found, metrics = gathered(rollouts, SAMPLING, "algorithm.rejection_sampling.max_batches=4")
    assert len(rollouts.asked) == 4 and [g.task_id for g in found.groups] == ["4"]
    assert found.account.dropped == {"zero_std": 22} and metrics["rejection_sampling/tasks"] == 1


def test_a_limit_of_zero_batches_is_no_limit():
    rollouts = FakeRollouts(lambda number, k: float(k) if number % 40 == 0 else 0.0)
    found, _ = gathered(rollouts, SAMPLING, "algorithm.rejection_sampling.max_batches=0")
    assert len(rollouts.asked) == 27 and len(found.units) == 3


def test_a_task_that_comes_again_in_a_step_is_a_group_of_its_own():
    found, _ = gathered(FakeRollouts(lambda number, k: float(k) if number == 1 else 0.0), SAMPLING, tasks=3)
    assert [(g.task_id, len(g.trajectories)) for g in found.groups] == [("1", 2)] * 3
    assert len(found.units) == 3


def test_filtered_episodes_leave_their_group_and_stay_in_the_score():
    reasons = {(0, 0): TerminationReason.MAX_TURNS_EXCEEDED, (1, 1): TerminationReason.UNKNOWN}
    rollouts = FakeRollouts(
        lambda number, k: float(k), reason=lambda number, k: reasons.get((number, k), TerminationReason.ENV_DONE)
    )
    found, metrics = gathered(rollouts, "algorithm.filter.enable=true")
    assert [len(g.trajectories) for g in found.groups] == [1, 2, 2]
    assert found.account.dropped == {"max_turns_exceeded": 1}
    assert metrics["critic/score/mean"] == 0.5 and metrics["critic/score/kept"] == pytest.approx(3 / 5)
    found, _ = gathered(rollouts, "algorithm.filter={enable: true, max_turns_exceeded: false, unknown: true}")
    assert found.account.dropped == {"unknown": 1}
    found, _ = gathered(rollouts)
    assert found.account.dropped == {}


def test_truncated_trajectories_leave_their_group_only_where_that_is_asked():
    rollouts = FakeRollouts(lambda number, k: float(k), finish=lambda number, k: "length" if number == k else "stop")
    found, metrics = gathered(rollouts, "algorithm.mask_truncated=true")
    assert [len(g.trajectories) for g in found.groups] == [1, 1, 2] and found.account.dropped == {"truncated": 2}
    assert metrics["critic/score/mean"] == 0.5 == metrics["critic/score/kept"]
    assert metrics["truncated/solver"] == pytest.approx(2 / 6)
    assert [len(g.trajectories) for g in gathered(rollouts)[0].groups] == [2, 2, 2]


def test_a_long_completion_costs_reward_in_the_comparison_and_the_score_stays_the_evaluators():
    rollouts = FakeRollouts(
        lambda number, k: 1.0, finish=lambda number, k: "length" if (number, k) == (1, 0) else "stop"
    )
    found, metrics = gathered(rollouts, "algorithm.overlong_buffer=4", "algorithm.overlong_penalty=0.5", SAMPLING)
    group = found.groups[0]
    assert (group.task_id, [t.reward for t in group.trajectories]) == ("1", [0.5, 1.0])
    assert metrics["critic/score/mean"] == 1.0 == metrics["critic/score/kept"]
    kept = sum(len(g.trajectories) for g in found.groups)
    assert metrics["critic/rewards/mean"] == pytest.approx(1.0 - 0.5 / kept)
    assert metrics["overlong/penalty"] == pytest.approx(-0.5 / kept)
    assert metrics["overlong/share"] == pytest.approx(1 / kept)


def test_when_everything_is_filtered_the_metrics_say_so_without_a_mean_of_nothing():
    rollouts = FakeRollouts(lambda number, k: float(k), finish=lambda number, k: "length")
    found, metrics = gathered(rollouts, "algorithm.mask_truncated=true")
    assert found.groups == [] and found.account.dropped == {"truncated": 6}
    assert metrics["critic/score/mean"] == 0.5 and "critic/score/kept" not in metrics
