"""Which trajectories are compared with each other, and which of them are trained.

Pure bookkeeping over the user's types: no tensors, no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.types import Episode, Trajectory, TrajectoryGroup


@dataclass
class Accounting:
    """Where every trajectory of a step went. ``generated = trained + dropped + failed + stale`` always holds.

    The unit is the trajectory. A failed episode that recorded none counts as one. `untrained_steps` are steps without a signal of
    trajectories that are trained (with ``algorithm.stepwise=per_step``).
    """

    generated: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    stale: int = 0
    untrained_steps: int = 0

    def check(self) -> None:
        """Raise if a sample was lost. A programming error, never the user's."""
        accounted = self.trained + self.dropped.total() + self.failed.total() + self.stale
        if self.generated != accounted:
            raise AssertionError(f"lost samples: generated {self.generated}, accounted for {accounted} ({self})")

    def add(self, other: Accounting) -> None:
        self.generated += other.generated
        self.trained += other.trained
        self.dropped.update(other.dropped)
        self.failed.update(other.failed)
        self.stale += other.stale
        self.untrained_steps += other.untrained_steps

    def to_metrics(self) -> dict[str, float]:
        """``samples/...`` counts of one step."""
        metrics = {"generated": self.generated, "trained": self.trained, "stale": self.stale}
        metrics |= {"untrained_steps": self.untrained_steps} if self.untrained_steps else {}
        metrics |= {f"dropped/{reason}": n for reason, n in self.dropped.items()}
        metrics |= {f"failed/{reason}": n for reason, n in self.failed.items()}
        return {f"samples/{name}": float(n) for name, n in metrics.items()}

    def to_dict(self) -> dict[str, object]:
        return {
            "generated": self.generated,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "failed": dict(self.failed),
            "stale": self.stale,
        }

    def counts(self) -> dict[str, Any]:
        """All of it as plain data; `of_counts` is the inverse."""
        return self.to_dict() | {"untrained_steps": self.untrained_steps}

    @classmethod
    def of_counts(cls, counts: Mapping[str, Any]) -> Accounting:
        return cls(**{**counts, "dropped": Counter(counts["dropped"]), "failed": Counter(counts["failed"])})


def usable_trajectories(episodes: Iterable[Episode], account: Accounting) -> list[tuple[str, Trajectory]]:
    """(task id, trajectory) of every trajectory with a reward and sampled tokens; the others are counted by reason."""
    usable: list[tuple[str, Trajectory]] = []
    for episode in episodes:
        account.generated += max(len(episode.trajectories), 1) if episode.failed else len(episode.trajectories)
        if episode.failed:
            assert episode.termination_reason is not None
            account.failed[episode.termination_reason.value] += max(len(episode.trajectories), 1)
            continue
        for trajectory in episode.trajectories:
            if not any(step.response_ids for step in trajectory.steps):
                account.dropped["no_tokens"] += 1
            elif trajectory.reward is None:
                account.failed["no_reward"] += 1
            else:
                usable.append((episode.task_id, trajectory))
    return usable


def group_by_role(items: Iterable[tuple[str, Trajectory]]) -> list[TrajectoryGroup]:
    """One group per (task id, role), in order of first appearance."""
    groups: dict[tuple[str, str], TrajectoryGroup] = {}
    for task_id, trajectory in items:
        key = (task_id, trajectory.role)
        if key not in groups:
            groups[key] = TrajectoryGroup(task_id, trajectory.role, [])
        groups[key].trajectories.append(trajectory)
    return list(groups.values())
