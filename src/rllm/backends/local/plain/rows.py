"""Rows that are decoded together: their cache, where their tokens stand in it, and how rows join and leave.

Rows of unlike length are filled up on the left, so that all end at the same place. Knows caches; nothing of sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from rllm.backends.local.requests import Request
from rllm.backends.local.sampling import BatchParams


@dataclass(eq=False)
class Rows:
    """`mask` [rows, cached tokens] is 1 where the row has a token. Without `cache` rows are read anew for every token."""

    adapter: str
    requests: list[Request]
    cache: Any
    mask: Tensor
    settings: BatchParams | None = None

    def select(self, rows: list[int], requests: list[Request]) -> None:
        """Keep these rows, each as often as it is named, for `requests`. With none the cache is done with."""
        self.requests, self.settings = requests, None
        if self.cache is None or not rows or rows == list(range(self.mask.shape[0])):
            return
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.batch_select_indices(index)
        self.mask = self.mask[index]
        self._trim(int(self.mask.argmax(dim=1).min()))

    def join(self, other: Rows) -> None:
        """Add the rows of `other`, of the same adapter, after these; its cache is used up."""
        total = max(self.mask.shape[1], other.mask.shape[1])
        for rows in (self, other):
            rows._fill(total)
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            if mine.keys is not None:
                mine.keys = torch.cat((mine.keys, theirs.keys))
                mine.values = torch.cat((mine.values, theirs.values))
        self.mask = torch.cat((self.mask, other.mask))
        self.requests, self.settings = self.requests + other.requests, None

    def _fill(self, total: int) -> None:
        """Lengthen the cache to `total` tokens by empty places on the left."""
        more = total - self.mask.shape[1]
        if not more:
            return
        self.mask = F.pad(self.mask, (more, 0))
        for layer in self.cache.layers:
            if layer.keys is None:
                continue
            own = _length(layer, total) - layer.keys.shape[-2]
            # Zeros, not garbage: a masked place still meets its value with weight 0.
            layer.keys, layer.values = (F.pad(t, (0, 0, own, 0)) for t in (layer.keys, layer.values))
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = total

    def _trim(self, count: int) -> None:
        """Leave out the first `count` places, which no row uses any longer."""
        if not count:
            return
        self.mask = self.mask[:, count:]
        total = self.mask.shape[1]
        for layer in self.cache.layers:
            if layer.keys is None:
                continue
            first = layer.keys.shape[-2] - _length(layer, total)
            layer.keys, layer.values = (t[..., first:, :] for t in (layer.keys, layer.values))
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = total


def _length(layer: Any, total: int) -> int:
    """Places that a layer keeps of `total` tokens: those that the next one may still see."""
    return min(total, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else total
