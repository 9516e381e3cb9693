"""Policy losses per token, and how token losses become one number.

Pure functions of tensors: nothing here knows of models, rows' text or micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rllm.algorithms.spec import LossSpec
from rllm.errors import ConfigError

TokenLoss = Callable[[LossSpec, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]

# exp() of more than this is of no use as an importance ratio and overflows in half precision.
MAX_LOG_RATIO = 20.0


def ppo_clip(spec: LossSpec, logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with separate bounds (Schulman et al. 2017, eq. 7; asymmetric as in DAPO, Yu et al. 2025).

    ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(logprobs - old)``. All tensors [N], one entry a trained token.
    Statistics [N]: ``clip_fraction`` is 1 where the clipped branch is the active one (no gradient flows).
    """
    ratio = torch.exp((logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    loss = torch.maximum(plain, clipped)
    return loss, {"clip_fraction": (clipped > plain).to(loss.dtype), "ratio": ratio.detach()}


def cross_entropy(
    spec: LossSpec, logprobs: Tensor, old: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood, each token weighted by its entry of `advantages` (1 for plain fine-tuning)."""
    return -logprobs * advantages, {}


LOSSES: dict[str, TokenLoss] = {"ppo_clip": ppo_clip, "cross_entropy": cross_entropy}


def token_loss(spec: LossSpec, logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss [N], statistics [N] each) of the loss that `spec` names."""
    if spec.name not in LOSSES:
        raise ConfigError(f"algorithm.loss: unknown loss {spec.name!r}; known are {', '.join(LOSSES)}")
    return LOSSES[spec.name](spec, logprobs, old, advantages)


def token_weights(spec: LossSpec, row_tokens: Sequence[int]) -> list[float]:
    """Weight of each trained token of each row, so that ``loss = sum over rows and tokens of weight * token loss``.

    `row_tokens` counts the trained tokens of every row of the whole optimizer step, so the result does not depend on
    micro-batches. ``token-mean``: one over the trained tokens of the step. Rows without a trained token count nowhere.
    """
    total = sum(row_tokens)
    if spec.aggregation != "token-mean":
        raise ConfigError(f"algorithm.loss_agg_mode: unknown mode {spec.aggregation!r}; known is token-mean")
    return [1.0 / total if n else 0.0 for n in row_tokens]
