"""One reward from several parts, some of which may have nothing to say.

Knows numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def combine_rewards(parts: Sequence[float | None], weights: Sequence[float] | None = None) -> float | None:
    """``sum of weight * part`` over the parts that are not None; None if all are: a failed sample then, never a reward of 0.

    `weights` are 1 by default. Raises `ValueError` if there is not one weight for each part.
    """
    weights = [1.0] * len(parts) if weights is None else weights
    if len(weights) != len(parts):
        raise ValueError(
            f"combine_rewards: {len(parts)} parts and {len(weights)} weights; give one weight for each part"
        )
    given = [weight * part for weight, part in zip(weights, parts, strict=True) if part is not None]
    return math.fsum(given) if given else None
