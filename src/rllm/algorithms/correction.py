"""Weights for tokens that another policy sampled than the one that is trained, and the KL that is taken off rewards.

Pure functions over rows and floats; knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rllm.algorithms.spec import Datum

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]

# exp() of more than this is of no use as a weight.
MAX_LOG_WEIGHT = 20.0


def raw_weights(differences: NDArray[np.float64], level: Level) -> NDArray[np.float64]:
    """Importance weight of each token of one row, without a limit. `differences` [N]: ``d = log p_trainer - log p_sampler``.

    token: ``exp(d_t)``; sequence: ``exp(sum d)``, the exact weight of the row; geometric: ``exp(mean d)``, the same per token.
    The last two are the same number for all tokens of the row.
    """
    if level == "token":
        exponent = differences
    else:
        exponent = np.full_like(differences, differences.sum() if level == "sequence" else differences.mean())
    return np.exp(np.clip(exponent, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))


def importance_weights(
    differences: Sequence[float], *, level: Level, mode: Mode, cap: float, floor: float | None = None
) -> list[float]:
    """Weights [N] of the policy loss of one row's tokens; they carry no gradient. `differences` as in `raw_weights`.

    truncate: ``min(w, cap)`` (truncated importance sampling, Yao et al. 2025); mask: ``w`` inside ``[floor, cap]``, 0 outside
    (IcePop, Zhao et al. 2025, on tokens; the same on whole rows). `floor` None is ``1 / cap``; truncation has none.
    """
    weights = raw_weights(np.asarray(differences, dtype=np.float64), level)
    if mode == "truncate":
        return np.minimum(weights, cap).tolist()
    low = 1.0 / cap if floor is None else floor
    return np.where((weights >= low) & (weights <= cap), weights, 0.0).tolist()


def effective_sample_size(weights: Sequence[float]) -> float:
    """``(sum w)^2 / sum w^2`` (Kish 1965): the number of equally weighted samples that are worth as much; 0 without weight."""
    w = np.asarray(weights, dtype=np.float64)
    squares = float((w * w).sum())
    return float(w.sum()) ** 2 / squares if squares else 0.0


def correct(data: Sequence[Datum], *, level: Level, mode: Mode, cap: float, floor: float | None) -> dict[str, float]:
    """Fill `weights` of every row from its `old_logprobs` (the trainer's) and `logprobs` (the sampler's).

    Returns, over all trained tokens: ``ess`` (effective share of the samples, from the weights before their limits),
    ``kl_k1`` and ``kl_k3`` (KL of sampler to trainer, estimators of Schulman 2020), ``weight_mean`` and ``weight_max`` of the
    weights used, and the shares ``truncated`` and ``masked``.
    """
    raw: list[NDArray[np.float64]] = []
    used: list[NDArray[np.float64]] = []
    gaps: list[NDArray[np.float64]] = []
    for row in data:
        trained = np.asarray(row.mask, dtype=bool)
        gap = (np.asarray(row.old_logprobs) - np.asarray(row.logprobs))[trained]
        weights = np.asarray(importance_weights(gap.tolist(), level=level, mode=mode, cap=cap, floor=floor))
        everywhere = np.zeros(len(row.ids))
        everywhere[trained] = weights
        row.weights = everywhere.tolist()
        raw.append(raw_weights(gap, level))
        used.append(weights)
        gaps.append(gap)
    before, after, d = np.concatenate(raw), np.concatenate(used), np.concatenate(gaps)
    return {
        "ess": effective_sample_size(before.tolist()) / len(before),
        "kl_k1": float(-d.mean()),
        "kl_k3": float((np.expm1(np.clip(d, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)) - d).mean()),
        "weight_mean": float(after.mean()),
        "weight_max": float(after.max()),
        "truncated": float((before > cap).mean()) if mode == "truncate" else 0.0,
        "masked": float((after == 0.0).mean()) if mode == "mask" else 0.0,
    }


def kl_in_reward(rewards: Sequence[float], old: Sequence[float], ref: Sequence[float], beta: float) -> list[float]:
    """Rewards of the tokens of one row less the KL penalty: ``r_t - beta (log p_old - log p_ref)`` (Ziegler et al. 2019, eq. 2).

    All [N]. An outcome reward sits on the last token, so the sum is the reward of the whole row less beta times its log-ratio.
    """
    return [r - beta * (o - f) for r, o, f in zip(rewards, old, ref, strict=True)]
