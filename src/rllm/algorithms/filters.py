"""What is left out of training, or has its reward changed, before trajectories are compared: every one of them counted.

Pure functions over the user's types.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from rllm.algorithms.advantages import is_uniform
from rllm.algorithms.grouping import Accounting
from rllm.types import Episode, TerminationReason, Trajectory, TrajectoryGroup

Item = tuple[str, Trajectory]
"""(task id, trajectory)."""


def drop_terminated(
    items: Iterable[Item], episodes: Iterable[Episode], reasons: Collection[TerminationReason], account: Accounting
) -> list[Item]:
    """`items` without those whose episode ended for one of `reasons`, each counted under that reason."""
    ended = {id(t): e.termination_reason or TerminationReason.UNKNOWN for e in episodes for t in e.trajectories}
    kept: list[Item] = []
    for task, trajectory in items:
        reason = ended[id(trajectory)]
        if reason in reasons:
            account.dropped[reason.value] += 1
        else:
            kept.append((task, trajectory))
    return kept


def drop_stale(items: Iterable[Item], version: int, max_staleness: int, account: Accounting) -> list[Item]:
    """`items` without those of which a token was sampled by a policy more than `max_staleness` versions older than `version`, counted as
    stale. Tokens that carry no version are taken as current."""
    kept: list[Item] = []
    for task, trajectory in items:
        oldest = min((v for step in trajectory.steps for v in step.versions), default=version)
        if version - oldest > max_staleness:
            account.stale += 1
        else:
            kept.append((task, trajectory))
    return kept


def drop_truncated(items: Iterable[Item], account: Accounting) -> list[Item]:
    """`items` without those of which a completion was cut off at its token limit, counted as ``truncated``
    (overlong filtering, Yu et al. 2025, DAPO, sec. 3.4)."""
    kept: list[Item] = []
    for task, trajectory in items:
        if is_truncated(trajectory):
            account.dropped["truncated"] += 1
        else:
            kept.append((task, trajectory))
    return kept


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether a completion of the trajectory ended at its token limit and not by itself."""
    return any(step.finish_reason == "length" for step in trajectory.steps)


def soft_overlong(length: int, max_len: int, cache_len: int) -> float:
    """Penalty in [-1, 0] for a completion of `length` tokens (Yu et al. 2025, DAPO, eq. 13).

    0 up to ``max_len - cache_len``, from there falling linearly to -1 at `max_len`, and -1 beyond.
    """
    return -min(max(length - (max_len - cache_len), 0) / cache_len, 1.0)


def overlong_penalty(trajectory: Trajectory, max_len: int, cache_len: int, factor: float) -> float:
    """What the longest completion of the trajectory costs: `factor` times `soft_overlong`."""
    longest = max((len(step.response_ids) for step in trajectory.steps), default=0)
    return factor * soft_overlong(longest, max_len, cache_len)


def shaped(trajectory: Trajectory, penalty: float) -> Trajectory:
    """The same trajectory, with the same steps, rewarded with `penalty` more (it is negative)."""
    return replace(trajectory, reward=float(trajectory.reward or 0.0) + penalty)


def without_signal(group: TrajectoryGroup) -> str | None:
    """Why comparing the trajectories of `group` teaches nothing (``singleton``, ``zero_std``), or None if it does."""
    rewards = [float(t.reward or 0.0) for t in group.trajectories]
    if len(rewards) < 2:
        return "singleton"
    return "zero_std" if is_uniform(rewards) else None


def informative(units: Iterable[Sequence[TrajectoryGroup]], account: Accounting) -> list[list[TrajectoryGroup]]:
    """The units (all groups of a task) in which at least one role has a signal; the groups of the others are counted by reason."""
    kept: list[list[TrajectoryGroup]] = []
    for unit in units:
        reasons = [without_signal(group) for group in unit]
        if not all(reasons):
            kept.append(list(unit))
            continue
        for group, reason in zip(unit, reasons, strict=True):
            account.dropped[str(reason)] += len(group.trajectories)
    return kept
