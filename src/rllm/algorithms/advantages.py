"""Advantage estimators: from the rewards of one role's batch to one number a sample.

Pure functions over floats. All see the groups of the role at once, so that those that compare inside a group and those that
compare with the whole batch are one kind of function. Adding one: decorate it with `register_advantage`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rllm.algorithms.spec import Std
from rllm.config.names import ESTIMATORS as KNOWN
from rllm.config.names import GROUP_RELATIVE, check_new_name
from rllm.errors import ConfigError


@dataclass(frozen=True)
class RewardGroup:
    """The rewards that are compared with each other (of one task and role), and how many tokens of each sample are trained."""

    rewards: Sequence[float]
    lengths: Sequence[int]


Estimator = Callable[[Sequence[RewardGroup], Std], list[list[float]]]
"""(all groups of one role in a step, ``algorithm.grpo_std``) -> one advantage for each reward of each group."""

# Rewards this close are equal: float residue of a mean must not become a huge normalised advantage.
EQUAL_REWARDS = 1e-9

# Sums of squares of rewards above this leave the range of a float.
SQUARES_OVERFLOW = 1e150

ESTIMATORS: dict[str, Estimator] = {}


def register_advantage(name: str, *, group_relative: bool = False) -> Callable[[Estimator], Estimator]:
    """Decorator that makes a function the estimator ``algorithm.adv_estimator=name``.

    It is called once a step and role as ``fn(groups, std)``; see `Estimator`. `group_relative`: a group of one, and a group of
    equal rewards, carry no signal for it; they are dropped and counted as ``algorithm.zero_std`` says.
    Raises `ConfigError` for a name that is taken.
    """

    check_new_name(name, KNOWN, "advantage estimator")

    def register(fn: Estimator) -> Estimator:
        KNOWN[name] = fn.__doc__ or "registered by the user"
        ESTIMATORS[name] = fn
        (GROUP_RELATIVE.add if group_relative else GROUP_RELATIVE.discard)(name)
        return fn

    return register


def estimate(name: str, groups: Sequence[RewardGroup], std: Std = "sample") -> list[list[float]]:
    """Advantages of all groups of one role by the estimator called `name`; their shape is that of the rewards."""
    if name not in ESTIMATORS:
        near = difflib.get_close_matches(name, ESTIMATORS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"algorithm.adv_estimator: unknown {name!r}{hint}; known are {', '.join(ESTIMATORS)}")
    try:
        advantages = ESTIMATORS[name](groups, std)
    except OverflowError:
        advantages = [[math.inf] * len(group.rewards) for group in groups]
    expected, found = [len(g.rewards) for g in groups], [len(values) for values in advantages]
    if expected != found:
        raise ConfigError(f"advantage estimator {name!r}: gave {found} advantages for groups of {expected} rewards")
    if not all(math.isfinite(value) for values in advantages for value in values):
        largest = max((abs(reward) for group in groups for reward in group.rewards), default=0.0)
        raise ConfigError(
            f"advantage estimator {name!r}: gave an advantage that is not a finite number; the largest reward is {largest:g}"
        )
    return advantages


def is_uniform(rewards: Sequence[float]) -> bool:
    """Whether all rewards of a group are the same, so that comparing them teaches nothing."""
    spread = max(rewards) - min(rewards)
    return spread <= EQUAL_REWARDS * max(1.0, abs(max(rewards)), abs(min(rewards)))


def whiten(values: Sequence[float], counts: Sequence[int] | None = None, std: Std = "sample") -> list[float]:
    """``(v - mean) / std`` over all values, value i counted ``counts[i]`` times (once where `counts` is None).

    `std` sample: ddof = 1 (over the counts); population: ddof = 0; none: only the mean is taken away. Equal values give 0.
    """
    counts = [1] * len(values) if counts is None else counts
    total = sum(counts)
    if total == 0 or is_uniform(values):
        return [0.0] * len(values)
    largest = max(map(abs, values))
    if largest > SQUARES_OVERFLOW:
        scaled = whiten([v / largest for v in values], counts, std)
        return [largest * v for v in scaled] if std == "none" else scaled
    mean = math.fsum(n * v for n, v in zip(counts, values, strict=True)) / total
    centred = [v - mean for v in values]
    if std == "none":
        return centred
    square = math.fsum(n * c * c for n, c in zip(counts, centred, strict=True))
    if square == 0.0:
        return [0.0] * len(values)
    scale = math.sqrt(square / (total - 1 if std == "sample" else total))
    return [c / scale for c in centred]


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Discounted return of each step of a trajectory: ``G_t = r_t + gamma G_{t+1}``. `gamma` 0: the step's own reward."""
    result: list[float] = []
    running = 0.0
    for reward in reversed(rewards):
        running = reward + gamma * running
        result.append(running)
    return result[::-1]


def grpo(groups: Sequence[RewardGroup], std: Std = "sample") -> list[list[float]]:
    """``(r - mean) / std`` over the group (Shao et al. 2024, DeepSeekMath, sec. 4.1.2).

    `std` sample: ddof = 1, as verl computes it; population: ddof = 0; none: mean only. Nothing is added to the standard deviation.
    A group of one and a group of equal rewards get 0.
    """
    return [whiten(group.rewards, std=std) for group in groups]


def dr_grpo(groups: Sequence[RewardGroup], std: Std = "none") -> list[list[float]]:
    """``r - mean`` over the group, whatever `std` says (Liu et al. 2025, Dr. GRPO). The paper's loss also leaves out the division by
    the length: ``algorithm.loss_agg_mode=seq-mean-token-sum-norm``."""
    return grpo(groups, "none")


def rloo(groups: Sequence[RewardGroup], std: Std = "none") -> list[list[float]]:
    """The reward less the mean of the group's other rewards, ``n / (n - 1) (r - mean)`` (Ahmadian et al. 2024)."""
    return [
        [a * len(group.rewards) / (len(group.rewards) - 1) for a in centred] if len(centred) > 1 else centred
        for group, centred in zip(groups, grpo(groups, "none"), strict=True)
    ]


def opo(groups: Sequence[RewardGroup], std: Std = "none") -> list[list[float]]:
    """The reward less the group's mean weighted by length, ``r - sum(l r) / sum(l)`` (Hao et al. 2025, OPO)."""
    result: list[list[float]] = []
    for group in groups:
        total = sum(group.lengths)
        if total == 0 or is_uniform(group.rewards):
            result.append([0.0] * len(group.rewards))
            continue
        baseline = math.fsum(n * r for n, r in zip(group.lengths, group.rewards, strict=True)) / total
        result.append([r - baseline for r in group.rewards])
    return result


def reinforce(groups: Sequence[RewardGroup], std: Std = "none") -> list[list[float]]:
    """The reward itself (Williams 1992), no baseline; groups of one are allowed."""
    return [list(group.rewards) for group in groups]


def reinforce_plus_plus(groups: Sequence[RewardGroup], std: Std = "sample") -> list[list[float]]:
    """The reward whitened over all trained tokens of the role's batch (Hu 2025, REINFORCE++), each token having its sample's reward
    (no discount inside a sample). `std` none: only the batch mean is taken away."""
    return _whiten_batch(groups, [list(group.rewards) for group in groups], std)


def reinforce_plus_plus_baseline(groups: Sequence[RewardGroup], std: Std = "sample") -> list[list[float]]:
    """``r - mean`` of the group, then whitened over all trained tokens of the role's batch (Hu 2025, REINFORCE++ with baseline).

    Groups of one have no baseline: they get 0 and take no part in the batch's statistics.
    """
    with_baseline = [i for i, group in enumerate(groups) if len(group.rewards) > 1]
    chosen = [groups[i] for i in with_baseline]
    whitened = _whiten_batch(chosen, grpo(chosen, "none"), std)
    result = [[0.0] * len(group.rewards) for group in groups]
    for i, values in zip(with_baseline, whitened, strict=True):
        result[i] = values
    return result


def prpo(groups: Sequence[RewardGroup], std: Std = "sample") -> list[list[float]]:
    """The reward whitened over all samples of the role's batch, of whatever task and length."""
    ones = [RewardGroup(group.rewards, [1] * len(group.rewards)) for group in groups]
    return _whiten_batch(ones, [list(group.rewards) for group in groups], std)


def _whiten_batch(groups: Sequence[RewardGroup], values: Sequence[Sequence[float]], std: Std) -> list[list[float]]:
    if not groups:
        return []
    flat = [v for part in values for v in part]
    whitened = iter(whiten(flat, [n for group in groups for n in group.lengths], std))
    return [[next(whitened) for _ in part] for part in values]


ESTIMATORS |= {
    fn.__name__: fn
    for fn in (grpo, dr_grpo, rloo, opo, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, prpo)
}
