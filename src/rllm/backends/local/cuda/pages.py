"""Keys and values in pages of equal size, so that sequences of any length share one pool and a group's prompt is stored once.

The host's side is a list of free pages and a count of users for each; it never looks at what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rllm.backends.local.model import DecoderConfig
from rllm.backends.local.transfer import to_device

PAGE = 64
"""Tokens a page holds."""
SPARE = 0
"""Page that belongs to no one: rows without a request write there."""


class PagePool:
    """`k` and `v` are [layers, pages, kv_heads, PAGE, head_dim]."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, pages: int):
        shape = (config.n_layers, pages + 1, config.n_kv_heads, PAGE, config.head_dim)
        # Zeros, not garbage: a masked key still meets a query, and what comes of NaN stays NaN.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._free = list(range(pages, SPARE, -1))
        self._users = [0] * (pages + 1)

    @staticmethod
    def bytes_per_page(config: DecoderConfig, itemsize: int) -> int:
        return 2 * config.n_layers * config.n_kv_heads * PAGE * config.head_dim * itemsize

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages with one user each; the caller has looked at `free`."""
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        device = self.k.device
        a, b = to_device(list(sources), device), to_device(list(targets), device)
        self.k[:, b] = self.k[:, a]
        self.v[:, b] = self.v[:, a]


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)
