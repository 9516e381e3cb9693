"""The numbers reported about episodes: per role, per task, per data source. Definitions are in the docstrings.

Pure functions over the user's types.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import comb

from rllm.algorithms.advantages import is_uniform
from rllm.types import Episode, Task, Trajectory, TrajectoryGroup


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of `k` tries is right, from `correct` of `n` tries.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, Codex, eq. 1). Needs ``1 <= k <= n``.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} tries per task, found {n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def reward_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Rewards of one training step.

    ``critic/score/mean`` is the mean over all rewarded trajectories, of every role (so for solver-judge with n solvers it is
    (n * solver + judge) / (n + 1)); groups that teach nothing count here although they are not trained.
    ``reward/<role>/mean|std|min|max`` are the same over one role; ``groups/<role>/informative`` is the share of groups whose
    rewards differ.
    """
    by_role: dict[str, list[Trajectory]] = defaultdict(list)
    informative: dict[str, list[bool]] = defaultdict(list)
    for group in groups:
        by_role[group.role] += group.trajectories
        rewards = [float(t.reward or 0.0) for t in group.trajectories]
        informative[group.role].append(len(rewards) > 1 and not is_uniform(rewards))
    metrics: dict[str, float] = {}
    everything = [float(t.reward or 0.0) for trajectories in by_role.values() for t in trajectories]
    if everything:
        metrics["critic/score/mean"] = statistics.fmean(everything)
    for role, trajectories in by_role.items():
        rewards = [float(t.reward or 0.0) for t in trajectories]
        metrics[f"reward/{role}/mean"] = statistics.fmean(rewards)
        metrics[f"reward/{role}/std"] = statistics.pstdev(rewards)
        metrics[f"reward/{role}/min"] = min(rewards)
        metrics[f"reward/{role}/max"] = max(rewards)
        metrics[f"groups/{role}/informative"] = statistics.fmean(informative[role])
        lengths = [sum(len(step.response_ids) for step in t.steps) for t in trajectories]
        metrics[f"response_length/{role}/mean"] = statistics.fmean(lengths)
        steps = [step for t in trajectories for step in t.steps]
        if steps:
            metrics[f"truncated/{role}"] = statistics.fmean(step.finish_reason == "length" for step in steps)
    return metrics


def episode_metrics(episodes: Iterable[Episode]) -> dict[str, float]:
    """``batch/<metric>``: mean over the step's episodes that did not fail of each metric the evaluator gave.

    ``batch/solve_all|none|partial``: share of tasks of which all, none or some episodes were right;
    ``batch/termination/<reason>``: share of episodes that ended so.
    """
    episodes = list(episodes)
    metrics = {f"batch/{name}": value for name, value in _mean_metrics(episodes).items()}
    by_task: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        if not episode.failed:
            by_task[episode.task_id].append(episode.is_correct)
        if episode.termination_reason is not None:
            key = f"batch/termination/{episode.termination_reason.value}"
            metrics[key] = metrics.get(key, 0.0) + 1.0 / len(episodes)
    if by_task:
        metrics["batch/solve_all"] = statistics.fmean(all(right) for right in by_task.values())
        metrics["batch/solve_none"] = statistics.fmean(not any(right) for right in by_task.values())
        metrics["batch/solve_partial"] = 1.0 - metrics["batch/solve_all"] - metrics["batch/solve_none"]
    return metrics


def validation_metrics(episodes: Iterable[Episode], ks: Sequence[int] = (1,)) -> dict[str, float]:
    """``val/<data source>/<metric>``: mean over the validation episodes of that source that did not fail.

    ``val/<source>/pass@k`` is the unbiased estimate from `is_correct`, averaged over tasks with at least k episodes;
    ``val/<source>/reward/<role>`` the mean reward of a role; ``val/<source>/failed`` the number of failed episodes.
    """
    by_source: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_source[_source(episode)].append(episode)
    metrics: dict[str, float] = {}
    for source, members in by_source.items():
        prefix = f"val/{source}/"
        metrics |= {prefix + name: value for name, value in _mean_metrics(members).items()}
        metrics[prefix + "failed"] = float(sum(episode.failed for episode in members))
        by_task: dict[str, list[bool]] = defaultdict(list)
        by_role: dict[str, list[float]] = defaultdict(list)
        for episode in members:
            if episode.failed:
                continue
            by_task[episode.task_id].append(episode.is_correct)
            for trajectory in episode.trajectories:
                if trajectory.reward is not None:
                    by_role[trajectory.role].append(float(trajectory.reward))
        for role, rewards in by_role.items():
            metrics[f"{prefix}reward/{role}"] = statistics.fmean(rewards)
        for k in ks:
            estimates = [pass_at_k(len(right), sum(right), k) for right in by_task.values() if len(right) >= k]
            if estimates:
                metrics[f"{prefix}pass@{k}"] = statistics.fmean(estimates)
    return metrics


def _mean_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        if not episode.failed:
            for name, value in episode.metrics.items():
                values[name].append(float(value))
    return {name: statistics.fmean(numbers) for name, numbers in values.items()}


def _source(episode: Episode) -> str:
    return episode.task.data_source if isinstance(episode.task, Task) else "unknown"


def finite_or_none(metrics: dict[str, float]) -> dict[str, float | None]:
    """What goes to files: a value that is no finite number is null there, never NaN."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
