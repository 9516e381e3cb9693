"""The tasks of a run, and from them to the groups that a step trains: episodes, filters, shaped rewards, and more batches where too few tell anything.

Knows in which order; how episodes run and what a filter is lives one call down.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.algorithms import filters
from rllm.algorithms.grouping import Accounting, group_by_role, usable_trajectories
from rllm.algorithms.metrics import episode_metrics, reward_metrics
from rllm.config.schema import Config
from rllm.config.schema_algorithm import AlgorithmConfig
from rllm.data.dataset import Dataset, load_dataset
from rllm.errors import DataError
from rllm.rollouts.batch import Rollouts, stable_seed
from rllm.types import Episode, Task, TerminationReason, Trajectory, TrajectoryGroup


@dataclass
class Collected:
    """What a step has to train on. `units` are the groups of one task each, rewards shaped; `account` counts all that was left out.
    `rewarded` are all groups before any filter, with the rewards that the evaluator gave."""

    episodes: list[Episode] = field(default_factory=list)
    units: list[list[TrajectoryGroup]] = field(default_factory=list)
    rewarded: list[TrajectoryGroup] = field(default_factory=list)
    account: Accounting = field(default_factory=Accounting)
    batches: int = 0

    @property
    def groups(self) -> list[TrajectoryGroup]:
        return [group for unit in self.units for group in unit]

    def add(self, episodes: list[Episode], config: Config, version: int = 0) -> None:
        """Take one batch of episodes in: failed and rewardless ones are counted, the filters applied, the rest is grouped. `version` is
        that of the policy which will be trained."""
        a = config.algorithm
        self.batches += 1
        self.episodes += episodes
        usable = usable_trajectories(episodes, self.account)
        self.rewarded += group_by_role(usable)
        kept = filters.drop_stale(usable, version, a.max_staleness, self.account)
        if a.filter.enable:
            kept = filters.drop_terminated(kept, episodes, filtered_reasons(a), self.account)
        if a.mask_truncated:
            kept = filters.drop_truncated(kept, self.account)
        if a.overlong_buffer:
            kept = [(task, filters.shaped(t, _penalty(t, config))) for task, t in kept]
        units = _by_task(group_by_role(kept))
        if a.rejection_sampling.enable:
            units = filters.informative(units, self.account)
        self.units += units

    def cut(self, tasks: int) -> None:
        """Keep the first `tasks` units; the trajectories of the others are counted as ``surplus``."""
        for unit in self.units[tasks:]:
            self.account.dropped["surplus"] += sum(len(group.trajectories) for group in unit)
        del self.units[tasks:]

    def metrics(self, config: Config) -> dict[str, float]:
        """Rewards and episodes of the step, whether trained or not (`algorithms.metrics`), and what filters and shaping did:
        ``critic/score/kept`` (mean reward of what passed the filters, before shaping), ``critic/rewards/mean`` (the same after it),
        ``overlong/penalty`` (mean) and ``overlong/share`` (of trajectories with a penalty)."""
        a = config.algorithm
        metrics = reward_metrics(self.rewarded) | episode_metrics(self.episodes)
        kept = [t for group in self.groups for t in group.trajectories]
        if kept and (a.filter.enable or a.mask_truncated or a.rejection_sampling.enable or a.overlong_buffer):
            penalties = [_penalty(t, config) if a.overlong_buffer else 0.0 for t in kept]
            rewards = [float(t.reward or 0.0) for t in kept]
            metrics["critic/score/kept"] = statistics.fmean(rewards) - statistics.fmean(penalties)
            metrics["critic/rewards/mean"] = statistics.fmean(rewards)
            if a.overlong_buffer:
                metrics["overlong/penalty"] = statistics.fmean(penalties)
                metrics["overlong/share"] = statistics.fmean(p < 0 for p in penalties)
        if a.rejection_sampling.enable:
            metrics["rejection_sampling/batches"] = float(self.batches)
            metrics["rejection_sampling/tasks"] = float(len(self.units))
        return metrics


def collect(
    rollouts: Rollouts,
    batches: Iterator[list[Task]],
    config: Config,
    step: int,
    version: int = 0,
    watch: Callable[[Sequence[Task]], Callable[[Episode], None]] | None = None,
) -> Collected:
    """Run episodes for the next batch of tasks; with rejection sampling for more batches, until ``data.train_batch_size`` tasks have
    a signal or ``algorithm.rejection_sampling.max_batches`` are run. What `watch` makes of a batch's tasks hears of each episode as it
    ends."""
    sampling = config.algorithm.rejection_sampling
    found = Collected()
    limit = sampling.max_batches if sampling.enable else 1
    for attempt in range(limit) if limit else itertools.count():
        tasks = next(batches)
        heard = watch(tasks) if watch is not None else None
        episodes = rollouts.run(tasks, n=config.rollout.n, step=step, attempt=attempt, on_episode=heard)
        found.add(episodes, config, version)
        if len(found.units) >= config.data.train_batch_size:
            break
    if sampling.enable:
        found.cut(config.data.train_batch_size)
    return found


def filtered_reasons(a: AlgorithmConfig) -> set[TerminationReason]:
    """The termination reasons that ``algorithm.filter`` leaves out of training."""
    return {reason for reason in TerminationReason if getattr(a.filter, reason.value, False)}


def longest_response(config: Config) -> int:
    """Most tokens of a completion where a call does not say."""
    return config.rollout.max_tokens or config.data.max_response_length


def _penalty(trajectory: Trajectory, config: Config) -> float:
    a = config.algorithm
    return filters.overlong_penalty(trajectory, longest_response(config), a.overlong_buffer, a.overlong_penalty)


def _by_task(groups: Sequence[TrajectoryGroup]) -> list[list[TrajectoryGroup]]:
    units: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        units.setdefault(group.task_id, []).append(group)
    return list(units.values())


def task_batches(dataset: Dataset, config: Config) -> Iterator[list[Task]]:
    """Endless batches of ``data.train_batch_size`` tasks. Each epoch is shuffled anew (seeded); its last batch may be smaller."""
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    epoch = 0
    while True:
        tasks = list(dataset.shuffle(stable_seed(seed, "epoch", epoch)) if config.data.shuffle else dataset)
        for start in range(0, len(tasks), config.data.train_batch_size):
            yield tasks[start : start + config.data.train_batch_size]
        epoch += 1


def total_steps(dataset: Dataset | None, config: Config) -> int:
    """``trainer.total_steps``, or the batches in ``trainer.total_epochs`` epochs."""
    if config.trainer.total_steps is not None:
        return config.trainer.total_steps
    return math.ceil(len(dataset or ()) / config.data.train_batch_size) * config.trainer.total_epochs


def dataset_of(given: Any, files: Any, split: str, config: Config) -> Dataset | None:
    """What is given (a dataset or rows), else what the config names; None where there is neither."""
    if given is None and files is None:
        return None
    dataset = given if isinstance(given, Dataset) else Dataset(given, split=split) if given is not None else None
    if dataset is None:
        dataset = load_dataset(files, split=split, seed=config.trainer.seed)
    if len(dataset) == 0:
        raise DataError(f"the {split} dataset is empty; give at least one task")
    if split == "val" and config.data.val_size is not None:
        dataset = dataset.select(range(min(config.data.val_size, len(dataset))))
    return dataset
