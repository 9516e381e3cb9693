"""From groups of rewarded trajectories to the rows a backend trains on: advantages, then rows of tokens.

Works on token ids alone: what was sampled is what is trained, and nothing is ever tokenised again.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rllm.algorithms.advantages import RewardGroup, estimate, is_uniform, returns
from rllm.algorithms.distillation import TokenAdvantages
from rllm.algorithms.grouping import Accounting
from rllm.algorithms.spec import Datum, Std
from rllm.config.names import GROUP_RELATIVE
from rllm.errors import ConfigError, DataError
from rllm.types import Step, Trajectory, TrajectoryGroup

Advantage = float | list[float]
"""Of all tokens of a step alike, or one for each of its sampled tokens."""


def rows_of(trajectory: Trajectory, advantages: Sequence[Advantage | None]) -> list[Datum]:
    """One row per run of steps in which each prompt begins with everything before it; a step that goes on from no row, or that another
    adapter sampled, starts a new one. Steps of several conversations may alternate. Each row is trained with the adapter that sampled it.

    `advantages` are those of the steps. Sampled tokens have mask 1; prompts, tool results and other text between them, and the tokens
    of steps whose advantage is None, have 0. Rows in which nothing is trained are left out.
    """
    rows: list[Datum] = []
    for step, advantage in zip(trajectory.steps, advantages, strict=True):
        if not step.response_ids:
            continue
        if len(step.logprobs) != len(step.response_ids):
            raise ValueError(
                f"step {step.id} of trajectory {trajectory.name!r}: {len(step.response_ids)} sampled tokens but "
                f"{len(step.logprobs)} log-probabilities; fill steps from the record (Step(id=response.id)) or give both"
            )
        row = next((row for row in reversed(rows) if _extends(step, row)), None)
        if row is None:
            row = Datum(ids=[], mask=[], temperature=step.temperature, adapter=step.adapter, role=trajectory.role)
            row.call = step.id
            rows.append(row)
        _append(row, step, advantage)
    return [row for row in rows if row.n_trained]


def _extends(step: Step, row: Datum) -> bool:
    same_policy = step.temperature == row.temperature and step.adapter == row.adapter
    return same_policy and step.prompt_ids[: len(row.ids)] == row.ids


def _append(row: Datum, step: Step, advantage: Advantage | None) -> None:
    observed = len(step.prompt_ids) - len(row.ids)
    sampled = len(step.response_ids)
    trained = advantage is not None
    values = advantage if isinstance(advantage, list) else [advantage or 0.0] * sampled
    row.ids += [*step.prompt_ids[len(row.ids) :], *step.response_ids]
    row.mask += [0] * observed + [int(trained)] * sampled
    row.advantages += [0.0] * observed + values
    row.logprobs += [0.0] * observed + (list(step.logprobs) if trained else [0.0] * sampled)


def build_datums(
    groups: Sequence[TrajectoryGroup],
    account: Accounting,
    *,
    estimator: str,
    std: Std = "sample",
    zero_std: Literal["drop", "keep"] = "drop",
    stepwise: Literal["broadcast", "per_step"] = "broadcast",
    gamma: float = 1.0,
    per_role: Mapping[str, str] | None = None,
    token_advantages: TokenAdvantages | None = None,
) -> list[Datum]:
    """Rows of every trained trajectory. What has no signal is counted in `account` and, by default, left out.

    `per_role` names the estimators of single roles. `stepwise` broadcast: all steps of a trajectory have the advantage of its reward.
    per_step: each step has a reward of its own (see `step_rewards`), and the discounted returns of those of one task, role and step
    index are compared; a step without a signal is not trained, and a trajectory without any is dropped. `token_advantages` take the
    place of those or are added to them; a step that has some always has a signal.
    """
    extra = token_advantages or TokenAdvantages()
    advantages: dict[int, list[Advantage | None]] = {}
    reasons: dict[int, str] = {}
    for role, members in _by_role(groups).items():
        name = (per_role or {}).get(role, estimator)
        if extra.replace and all(id(s) in extra.values for g in members for t in g.trajectories for s in t.steps):
            advantages |= {id(t): [None] * len(t.steps) for g in members for t in g.trajectories}
            continue
        if name == "precomputed":
            advantages |= {id(t): [_carried(t, step) for step in t.steps] for g in members for t in g.trajectories}
            continue
        samples = _samples_of_steps(members, gamma) if stepwise == "per_step" else _samples(members)
        rewards = [RewardGroup([s.reward for s in group], [s.n_tokens for s in group]) for group in samples]
        for group, reward, values in zip(samples, rewards, estimate(name, rewards, std), strict=True):
            reason = _no_signal(reward.rewards) if name in GROUP_RELATIVE and zero_std == "drop" else None
            for sample, value in zip(group, values, strict=True):
                own = advantages.setdefault(id(sample.trajectory), [None] * len(sample.trajectory.steps))
                if reason is None:
                    for k in sample.steps:
                        own[k] = value
                elif reasons.get(id(sample.trajectory)) != "zero_std":
                    reasons[id(sample.trajectory)] = reason
    data: list[Datum] = []
    for trajectory in (t for group in groups for t in group.trajectories):
        own = [extra.of(step, value) for step, value in zip(trajectory.steps, advantages[id(trajectory)], strict=True)]
        rows = rows_of(trajectory, own)
        if not rows:
            account.dropped[reasons[id(trajectory)]] += 1
            continue
        for step, advantage in zip(trajectory.steps, own, strict=True):
            if advantage is not None:
                step.advantage = advantage
            elif step.response_ids:
                account.untrained_steps += 1
        data += rows
        account.trained += 1
    return data


def check_role_names(groups: Sequence[TrajectoryGroup], named: Collection[str], key: str) -> None:
    """Raise a `ConfigError` if `named`, the roles that the setting `key` names, has one that no trajectory has: it would do nothing."""
    roles = {group.role for group in groups}
    unknown = sorted(set(named) - roles)
    if roles and unknown:
        near = difflib.get_close_matches(unknown[0], roles, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{key}: no trajectory has the role {unknown[0]!r}; the roles are {', '.join(sorted(roles))}{hint}"
        )


@dataclass(frozen=True)
class _Sample:
    """What has one reward: a trajectory, or one step of it."""

    trajectory: Trajectory
    steps: Sequence[int]
    reward: float

    @property
    def n_tokens(self) -> int:
        return sum(len(self.trajectory.steps[k].response_ids) for k in self.steps)


def _by_role(groups: Sequence[TrajectoryGroup]) -> dict[str, list[TrajectoryGroup]]:
    roles: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in groups:
        roles[group.role].append(group)
    return roles


def _samples(groups: Sequence[TrajectoryGroup]) -> list[list[_Sample]]:
    return [[_Sample(t, range(len(t.steps)), float(t.reward or 0.0)) for t in g.trajectories] for g in groups]


def _samples_of_steps(groups: Sequence[TrajectoryGroup], gamma: float) -> list[list[_Sample]]:
    """One group per task and step index. Steps without sampled tokens count in the returns only."""
    rewards = iter(step_rewards([t for group in groups for t in group.trajectories]))
    result: list[list[_Sample]] = []
    for group in groups:
        by_index: dict[int, list[_Sample]] = defaultdict(list)
        for trajectory in group.trajectories:
            for k, value in enumerate(returns(next(rewards), gamma)):
                if trajectory.steps[k].response_ids:
                    by_index[k].append(_Sample(trajectory, [k], value))
        result += by_index.values()
    return result


def step_rewards(trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """The rewards of the steps of each trajectory of one role. Where no step of them all has a reward other than 0, only whole
    trajectories were rewarded: the last step then has the trajectory's reward, the steps before it 0."""
    for trajectory in trajectories:
        for step in trajectory.steps:
            if not math.isfinite(step.reward):
                raise DataError(
                    f"step {step.id} of trajectory {trajectory.name!r}: reward {step.reward!r}; give a finite number"
                )
    if any(step.reward for t in trajectories for step in t.steps):
        return [[float(step.reward) for step in t.steps] for t in trajectories]
    return [[0.0] * (len(t.steps) - 1) + [float(t.reward or 0.0)] for t in trajectories]


def _no_signal(rewards: Sequence[float]) -> str | None:
    """Why comparing these rewards teaches nothing, or None."""
    return "singleton" if len(rewards) < 2 else "zero_std" if is_uniform(rewards) else None


def _carried(trajectory: Trajectory, step: Step) -> Advantage | None:
    """The advantage that a step brings along (``algorithm.adv_estimator=precomputed``)."""
    if not step.response_ids:
        return None
    where = f"step {step.id} of trajectory {trajectory.name!r}"
    values = step.advantage if isinstance(step.advantage, list) else [step.advantage]
    if isinstance(step.advantage, list) and len(values) != len(step.response_ids):
        raise DataError(
            f"{where}: {len(values)} advantages for {len(step.response_ids)} sampled tokens; give one for each token, or one number"
        )
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values):
        raise DataError(
            f"{where}: Step.advantage is {step.advantage!r}; algorithm.adv_estimator=precomputed trains on what the steps carry: "
            "one finite number, or a list of one for each sampled token"
        )
    return step.advantage
