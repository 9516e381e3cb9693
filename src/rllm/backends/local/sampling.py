"""From logits to sampled ids: temperature, top-k, top-p and inverse-CDF sampling, for a whole batch at once.

Knows neither requests nor the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rllm.backends.base import SamplingParams


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
    probs = logprobs.double().exp()
    if params.top_k is not None or params.top_p is not None:
        probs = _cut(probs, params)
    cdf = probs.cumsum(dim=-1)
    # The factor keeps u * total below the total whatever the rounding: the first sum above it belongs to a possible id.
    below = u * (cdf[:, -1] * (1.0 - 2.0**-52))
    ids = torch.searchsorted(cdf, below.unsqueeze(1), right=True).squeeze(1)
    ids = ids.clamp_(max=logits.shape[1] - 1)  # NaN only: any id, with a NaN log-probability beside it
    if params.greedy is not None:
        ids = torch.where(params.greedy, logits.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)


def _cut(probs: Tensor, params: BatchParams) -> Tensor:
    """Zero what top-k and top-p (the smallest set whose mass reaches p) leave out."""
    ordered, order = probs.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k is not None:
        keep &= torch.arange(probs.shape[1], device=probs.device) < params.top_k.unsqueeze(1)
    if params.top_p is not None:
        kept = torch.where(keep, ordered, 0.0)
        mass_before = kept.cumsum(dim=-1) - kept
        keep &= mass_before < params.top_p.double().unsqueeze(1) * kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter(1, order, torch.where(keep, ordered, 0.0))
