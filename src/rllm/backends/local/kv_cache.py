"""Keys and values of the running sequences, one slot each, and attention over them.

Slots 0..n-1 are the running ones, so decoding reads views and copies nothing. Knows no requests.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from rllm.backends.local.model import DecoderConfig

POSITION_STEP = 64


def default_kv_bytes(device: torch.device) -> int:
    """What the running sequences may take unless told: half of the free memory on CUDA, a quarter of the machine's on CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


class KVCache:
    """Grows on demand in slots and positions, in big steps as long as it stays under `max_bytes`.

    `k` and `v` are [layers, slots, kv_heads, positions, head_dim].
    """

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, max_positions: int, max_bytes: int
    ):
        self.max_positions, self.max_bytes = max_positions, max_bytes
        # Zeros, not garbage: a masked position still meets its value with weight 0, and 0 * NaN is NaN.
        shape = (config.n_layers, 0, config.n_kv_heads, 0, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def nbytes_of(self, slots: int, positions: int) -> int:
        """Bytes of keys and values of `slots` sequences of `positions` tokens each."""
        layers, _, heads, _, size = self.k.shape
        return 2 * layers * heads * size * self.k.element_size() * slots * positions

    def reserve(self, slots: int, positions: int) -> None:
        """Make room for `slots` sequences of `positions` tokens; what they hold stays, what lies beyond may go."""
        have_slots, have_positions = self.k.shape[1], self.k.shape[3]
        if slots <= have_slots and positions <= have_positions:
            return
        new_slots = max(slots, 2 * have_slots) if slots > have_slots else have_slots
        new_positions = max(positions, have_positions * 3 // 2) if positions > have_positions else have_positions
        new_positions = min(-(-new_positions // POSITION_STEP) * POSITION_STEP, self.max_positions)
        if self.nbytes_of(new_slots, new_positions) > self.max_bytes:
            new_slots, new_positions = slots, min(-(-positions // POSITION_STEP) * POSITION_STEP, self.max_positions)
        keep_slots, keep_positions = min(have_slots, new_slots), min(have_positions, new_positions)
        for name in ("k", "v"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(*old.shape[:1], new_slots, old.shape[2], new_positions, old.shape[4])
            new[:, :keep_slots, :, :keep_positions] = old[:, :keep_slots, :, :keep_positions]
            setattr(self, name, new)

    def fill(self, slot: int, count: int, k: Tensor, v: Tensor) -> None:
        """Put the keys and values of a prompt, [layers, kv_heads, length, head_dim], at the start of `count` slots from `slot` on."""
        self.k[:, slot : slot + count, :, : k.shape[2]] = k.unsqueeze(1)
        self.v[:, slot : slot + count, :, : v.shape[2]] = v.unsqueeze(1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot into another."""
        self.k[:, target, :, :length] = self.k[:, source, :, :length]
        self.v[:, target, :, :length] = self.v[:, source, :, :length]


class DecodeAttention:
    """Attention of one new token per sequence over its slot: writes its key and value first.

    `positions` [n] is where the new token of each row stands; `rows` names the slots, None meaning slots 0..n-1.
    """

    def __init__(self, cache: KVCache, positions: Tensor, longest: int, rows: Tensor | None = None):
        self.cache, self.positions, self.longest = cache, positions, longest
        self.rows = rows
        self.slots = torch.arange(len(positions), device=positions.device) if rows is None else rows
        visible = torch.arange(longest, device=positions.device) <= positions.unsqueeze(1)
        mask = torch.zeros(visible.shape, dtype=cache.k.dtype, device=positions.device)
        self.mask = mask.masked_fill_(~visible, float("-inf"))[:, None, None, :]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.k[layer], self.cache.v[layer]
        keys[self.slots, :, self.positions] = k
        values[self.slots, :, self.positions] = v
        n, heads, size = q.shape
        pick = slice(n) if self.rows is None else self.rows
        # The query heads that share a key head are laid out as its queries: grouped attention without copying keys.
        grouped = q.reshape(n, k.shape[1], heads // k.shape[1], size)
        seen_keys, seen_values = keys[pick, :, : self.longest], values[pick, :, : self.longest]
        if q.is_cuda:
            out = F.scaled_dot_product_attention(grouped, seen_keys, seen_values, attn_mask=self.mask)
            return out.reshape(n, heads, size)
        # Two batched products and a softmax are faster on CPU than its fused kernel, which wants long queries.
        scores = torch.bmm(grouped.flatten(0, 1), seen_keys.flatten(0, 1).transpose(1, 2)).view(n, heads, -1)
        weights = scores.mul_(size**-0.5).add_(self.mask[:, 0]).softmax(dim=-1)
        out = torch.bmm(weights.view(-1, grouped.shape[2], self.longest), seen_values.flatten(0, 1))
        return out.view(n, heads, size)
