"""From trajectories with advantages to the rows a backend trains on.

Works on token ids alone: what was sampled is what is trained, and nothing is ever tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rllm.algorithms.advantages import GROUP_RELATIVE, Std, estimate, is_uniform
from rllm.algorithms.grouping import Accounting
from rllm.algorithms.spec import Datum
from rllm.types import Step, Trajectory, TrajectoryGroup


def rows_of(trajectory: Trajectory, advantage: float) -> list[Datum]:
    """One row per run of steps in which each prompt begins with everything before it; a step that does not, or that another adapter
    sampled, starts a new row. Each row is trained with the adapter that sampled it.

    Sampled tokens have mask 1, prompts, tool results and other text between them 0.
    """
    rows: list[Datum] = []
    for step in trajectory.steps:
        if not step.response_ids:
            continue
        if len(step.logprobs) != len(step.response_ids):
            raise ValueError(
                f"step {step.id} of trajectory {trajectory.name!r}: {len(step.response_ids)} sampled tokens but "
                f"{len(step.logprobs)} log-probabilities; fill steps from the record (Step(id=response.id)) or give both"
            )
        row = rows[-1] if rows else None
        if row is None or not _extends(step, row):
            row = Datum(ids=[], mask=[], temperature=step.temperature, adapter=step.adapter, role=trajectory.role)
            row.call = step.id
            rows.append(row)
        _append(row, step, advantage)
    return rows


def _extends(step: Step, row: Datum) -> bool:
    same_policy = step.temperature == row.temperature and step.adapter == row.adapter
    return same_policy and step.prompt_ids[: len(row.ids)] == row.ids


def _append(row: Datum, step: Step, advantage: float) -> None:
    observed = step.prompt_ids[len(row.ids) :]
    sampled = step.response_ids
    row.ids += [*observed, *sampled]
    row.mask += [0] * len(observed) + [1] * len(sampled)
    row.advantages += [0.0] * len(observed) + [advantage] * len(sampled)
    row.logprobs += [0.0] * len(observed) + list(step.logprobs)


def build_datums(
    groups: Sequence[TrajectoryGroup],
    account: Accounting,
    *,
    estimator: str,
    std: Std = "sample",
    zero_std: Literal["drop", "keep"] = "drop",
) -> list[Datum]:
    """Rows of every trained trajectory. Groups without a signal are counted in `account` and, by default, left out."""
    data: list[Datum] = []
    for group in groups:
        rewards = [float(t.reward) for t in group.trajectories if t.reward is not None]
        if estimator in GROUP_RELATIVE and zero_std == "drop":
            reason = "singleton" if len(rewards) < 2 else "zero_std" if is_uniform(rewards) else None
            if reason:
                account.dropped[reason] += len(rewards)
                continue
        for trajectory, advantage in zip(group.trajectories, estimate(estimator, rewards, std), strict=True):
            for step in trajectory.steps:
                step.advantage = advantage
            data += rows_of(trajectory, advantage)
            account.trained += 1
    return data
