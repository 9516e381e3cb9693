"""From logits to sampled ids: temperature, top-k, top-p and inverse-CDF sampling, for a whole batch at once.

Knows neither requests nor the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rllm.backends.base import SamplingParams

# Vocabularies up to here are searched in one round; larger ones by blocks of this many ids.
ONE_ROUND = 4096
BLOCK = 128


def uniforms(seed: int, n: int) -> np.ndarray:
    """`n` numbers in [0, 1) that depend on `seed` alone: one for each token of a completion."""
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(n)


@dataclass(frozen=True)
class BatchParams:
    """Sampling settings of the rows of one batch, as tensors [n] on the device (None where no row asks for it)."""

    temperature: Tensor
    greedy: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> BatchParams:
        temperatures = [p.temperature for p in params]
        greedy = [t == 0.0 for t in temperatures]
        top_k = [p.top_k or vocab_size for p in params]
        top_p = [p.top_p for p in params]
        return cls(
            torch.tensor([t or 1.0 for t in temperatures], device=device),
            torch.tensor(greedy, device=device) if any(greedy) else None,
            torch.tensor(top_k, device=device) if any(k < vocab_size for k in top_k) else None,
            torch.tensor(top_p, device=device) if any(p < 1.0 for p in top_p) else None,
        )


def sample(logits: Tensor, params: BatchParams, u: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [n], log-probabilities [n]) from logits [n, vocab] and uniform numbers `u` [n] (float64).

    The log-probability is that of the tempered distribution over the whole vocabulary, before top-k and top-p cut it; a greedy row
    (temperature 0) reports the untempered one. The id is the inverse of the cumulative distribution at `u`, so a row's result
    depends on its own logits and number only. An id of probability 0 is never drawn.
    """
    logprobs = torch.log_softmax(logits / params.temperature.unsqueeze(1), dim=-1)
    probs = logprobs.exp()
    if params.top_k is not None or params.top_p is not None:
        probs = _cut(probs, params)
    ids = _invert(probs, u.unsqueeze(1))
    if params.greedy is not None:
        ids = torch.where(params.greedy.unsqueeze(1), logits.argmax(dim=-1, keepdim=True), ids)
    return ids.squeeze(1), logprobs.gather(1, ids).squeeze(1)


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """[n, 1]: the first index whose cumulative sum (float64) of `weights` [n, m] lies above `u` [n, 1] of the total.

    A large vocabulary is searched in two rounds, first for the block, then within it: the sums cost a fraction of a cumulative sum.
    """
    n, m = weights.shape
    if m <= ONE_ROUND:
        return _pick(weights.cumsum(dim=-1, dtype=torch.float64), u)[0]
    blocks = F.pad(weights, (0, -m % BLOCK)).view(n, -1, BLOCK)
    sums = blocks.sum(dim=-1).double()
    cdf = sums.cumsum(dim=-1)
    block, point = _pick(cdf, u)
    mass = sums.gather(1, block)
    row = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, BLOCK)).squeeze(1)
    inside, _ = _pick(
        row.cumsum(dim=-1, dtype=torch.float64), ((point - cdf.gather(1, block) + mass) / mass).clamp_(min=0.0)
    )
    return (block * BLOCK + inside).clamp_(max=m - 1)


def _pick(cdf: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """(index, point) [n, 1] each: where `cdf` [n, m] first exceeds the point `u` * total."""
    total = cdf[:, -1:]
    # Kept below the total whatever the rounding, so that the first sum above it exists and belongs to a possible id.
    point = torch.minimum(u * total, total * (1.0 - 2.0**-52))
    index = torch.searchsorted(cdf, point, right=True)
    return index.clamp_(max=cdf.shape[1] - 1), point  # beyond the end only for NaN: any id, with a NaN log-probability


def _cut(probs: Tensor, params: BatchParams) -> Tensor:
    """Zero what top-k and top-p (the smallest set whose mass reaches p) leave out."""
    ordered, order = probs.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k is not None:
        keep &= torch.arange(probs.shape[1], device=probs.device) < params.top_k.unsqueeze(1)
    if params.top_p is not None:
        kept = torch.where(keep, ordered, 0.0)
        mass = kept.cumsum(dim=-1, dtype=torch.float64)
        keep &= mass - kept < params.top_p.unsqueeze(1) * mass[:, -1:]
    return torch.zeros_like(probs).scatter(1, order, torch.where(keep, ordered, 0.0))
