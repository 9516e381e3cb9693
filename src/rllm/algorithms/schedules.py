"""The course of the learning rate over a run, the same for reinforcement learning and fine-tuning.

Pure functions of how far the run is.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]

# The first step of a warm-up would be one of rate 0, which costs as much as any other and does nothing.
LEAST_WARMUP = 1e-3


def rate_factor(
    done: float, total: float, *, schedule: Schedule = "constant", warmup: float = 0.0, min_ratio: float = 0.0
) -> float:
    """Share of the peak rate for the step that comes after `done` of `total`; `warmup` is in the same unit (steps, or shares of 1).

    Rises from 0 as ``done / warmup``, then ``min_ratio + (1 - min_ratio) f`` with ``f`` 1 (constant), ``1 - x`` (linear) or
    ``(1 + cos(pi x)) / 2`` (cosine, Loshchilov and Hutter 2017), ``x`` being the share that is done of what follows the warm-up.
    As in transformers' schedules of these names, but for the first step of a warm-up, whose rate is not 0.
    """
    if done < warmup:
        return max(done / warmup, LEAST_WARMUP)
    x = min(max((done - warmup) / max(total - warmup, 1e-9), 0.0), 1.0)
    left = {"constant": 1.0, "linear": 1.0 - x, "cosine": 0.5 * (1.0 + math.cos(math.pi * x))}[schedule]
    return min_ratio + (1.0 - min_ratio) * left


def warmup_length(total: float, steps: int | None, ratio: float) -> float:
    """Length of the warm-up in steps: `steps` where given, else `ratio` of `total`."""
    return float(steps) if steps is not None else ratio * total
