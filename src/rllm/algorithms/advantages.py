"""Advantage estimators: from the rewards of one group to one number a trajectory.

Pure functions over floats. Adding one: write the function, name it in `ESTIMATORS`, test it against the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from rllm.errors import ConfigError

Std = Literal["sample", "population", "none"]
Estimator = Callable[[Sequence[float], Std], list[float]]

# Rewards this close are equal: float residue of a mean must not become a huge normalised advantage.
EQUAL_REWARDS = 1e-9


def is_uniform(rewards: Sequence[float]) -> bool:
    """Whether all rewards of a group are the same, so that comparing them teaches nothing."""
    spread = max(rewards) - min(rewards)
    return spread <= EQUAL_REWARDS * max(1.0, abs(max(rewards)), abs(min(rewards)))


def grpo(rewards: Sequence[float], std: Std = "sample") -> list[float]:
    """``(r_i - mean) / std`` over the group (Shao et al. 2024, DeepSeekMath, sec. 4.1.2).

    `std` sample: ddof = 1, as verl computes it; population: ddof = 0; none: mean only (Liu et al. 2025, Dr. GRPO).
    A group of one and a group of equal rewards get 0.
    """
    if len(rewards) < 2 or is_uniform(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if std == "none":
        return centred
    ddof = 1 if std == "sample" else 0
    scale = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - ddof))
    return [c / scale for c in centred]


def reinforce(rewards: Sequence[float], std: Std = "none") -> list[float]:
    """The reward itself (Williams 1992), no baseline; groups of one are allowed."""
    return list(rewards)


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "reinforce": reinforce}
GROUP_RELATIVE = frozenset({"grpo"})
"""Estimators that compare inside a group: they need at least two, and learn nothing from equal rewards."""


def estimate(name: str, rewards: Sequence[float], std: Std = "sample") -> list[float]:
    """Advantages of one group by the estimator called `name`."""
    if name not in ESTIMATORS:
        raise ConfigError(f"algorithm.adv_estimator: unknown {name!r}; known are {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name](rewards, std)
