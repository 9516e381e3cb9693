"""One decoding step on CUDA as a captured graph; then one draw for every row.

Rows' state lives on the device and moves on by itself, so steps can be queued before the host has seen what the last one drew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from rllm.backends.base import SamplingParams
from rllm.backends.local.cuda import kernels
from rllm.backends.local.cuda.bank import AdapterBank
from rllm.backends.local.cuda.blocks import BankedLayers
from rllm.backends.local.cuda.capture import SAMPLING, capture
from rllm.backends.local.cuda.pages import PAGE, PagePool
from rllm.backends.local.model import Decoder
from rllm.backends.local.sampling import BatchParams, sample
from rllm.backends.local.transfer import to_device

SAMPLE_BLOCK = 4096
# Rows of a group that read its pages together, and the shares those pages are split into.
TILE_ROWS = 8
PREFIX_SPLITS = 4
# Programs that keep the device busy while they wait for memory, and the most shares a row's pages are split into.
BUSY_PROGRAMS = 512
MAX_SPLITS = 16
Cut = tuple[Sequence[SamplingParams], Sequence[float]]
"""Settings and uniform numbers of the rows, for a draw outside the kernels."""


@dataclass
class Groups:
    """Rows whose first pages are the same, in tiles of at most `TILE_ROWS`: `tiles` [most, TILE_ROWS] row numbers or -1, `table` [most,
    pages] and `pages` [most] what they share; `shared` [rows] how many pages of a row that is."""

    tiles: Tensor
    table: Tensor
    pages: Tensor
    shared: Tensor
    any: bool = False

    @classmethod
    def empty(cls, rows: int, pages: int, device: torch.device) -> Groups:
        most = max(1, rows // 2)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return cls(
            torch.full((most, TILE_ROWS), -1, **integers),
            torch.zeros(most, pages, **integers),
            torch.zeros(most, **integers),
            torch.zeros(rows, **integers),
        )

    def set(self, rows: Sequence[Sequence[int]]) -> None:
        """`rows`: for every row the pages that it may share with others, empty for none."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for i, pages in enumerate(rows):
            if pages:
                alike.setdefault(tuple(pages), []).append(i)
        tiles = [
            (members[i : i + TILE_ROWS], pages)
            for pages, members in alike.items()
            for i in range(0, len(members) - 1, TILE_ROWS)
        ]
        if not tiles and not self.any:
            return
        self.any = bool(tiles)
        host = [torch.full_like(self.tiles, -1, device="cpu"), torch.zeros_like(self.table, device="cpu")]
        counts, shared = torch.zeros_like(self.pages, device="cpu"), torch.zeros_like(self.shared, device="cpu")
        for i, (members, pages) in enumerate(tiles):
            host[0][i, : len(members)] = torch.tensor(members)
            host[1][i, : len(pages)] = torch.tensor(pages)
            counts[i] = len(pages)
            shared[torch.tensor(members)] = len(pages)
        for target, values in zip(
            (self.tiles, self.table, self.pages, self.shared), (*host, counts, shared), strict=True
        ):
            target.copy_(to_device(values, target.device))


@dataclass
class RowState:
    """What the device knows of every row: [rows] each, `table` [rows, pages]."""

    ids: Tensor
    positions: Tensor
    counts: Tensor
    adapters: Tensor
    temperatures: Tensor
    greedy: Tensor
    seeds: Tensor
    table: Tensor
    groups: Groups

    @classmethod
    def empty(cls, rows: int, pages: int, device: torch.device) -> RowState:
        def integers(dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        return cls(
            ids=integers(torch.int64),
            positions=integers(),
            counts=integers(),
            adapters=integers() - 1,
            temperatures=torch.ones(rows, device=device),
            greedy=integers(),
            seeds=integers(torch.int64),
            table=torch.zeros(rows, pages, dtype=torch.int32, device=device),
            groups=Groups.empty(rows, pages, device),
        )

    def tensors(self) -> list[Tensor]:
        return [
            self.ids, self.positions, self.counts, self.adapters, self.temperatures, self.greedy, self.seeds, self.table
        ]  # fmt: skip

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row ``rows[i]`` was; the rows after them are as good as empty."""
        n = len(rows)
        order = to_device(list(rows), self.ids.device)
        for tensor in self.tensors():
            tensor[:n] = tensor[order]
        self.clear(n)

    def clear(self, first: int) -> None:
        """Rows from `first` on belong to no request: they write to the spare page and no one reads them."""
        self.table[first:] = 0
        self.positions[first:] = 0
        self.adapters[first:] = -1
        self.temperatures[first:] = 1.0


class DecodeStep:
    """Draws one token for the first n rows of `state`. Graphs are captured for a few batch sizes when first asked for."""

    def __init__(self, model: Decoder, bank: AdapterBank, pool: PagePool, state: RowState, max_len: int):
        self.model, self.bank, self.pool, self.state, self.max_len = model, bank, pool, state, max_len
        self._layers = BankedLayers(model, bank, pool)
        self._chained: dict[str, Any] = kernels.chained(model.device)
        # By batch size, and whether any rows share pages.
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = None

    def forget_graphs(self) -> None:
        self._graphs.clear()
        self._memory = None

    def run(self, n: int, cut: Cut | None = None) -> Tensor:
        """Queue one step of the first `n` rows; returns [2, n] int32: ids, bits of the log-probabilities. `cut` where some row asks
        for top-k or top-p."""
        logits = self._logits(n)
        return self.draw(logits, 0, n, cut)

    def _logits(self, n: int) -> Tensor:
        size = bucket(n, len(self.state.ids))
        if self.model.device.type != "cuda":  # the interpreter, in tests
            return self.forward(size)
        key = size, self.state.groups.any
        if key not in self._graphs:
            self._capture(key)
        graph, logits = self._graphs[key]
        graph.replay()
        return logits

    def _capture(self, key: tuple[int, bool]) -> None:
        # What the run before writes is written again by the first replay.
        step = partial(self.forward, key[0])
        graphs, logits, self._memory = capture([step], self._memory, warm_up=True, priority=SAMPLING)
        self._graphs[key] = (graphs[0], logits[0])

    def forward(self, n: int) -> Tensor:
        """Logits [n, vocab] of the next token of the first `n` rows, whose keys and values are written on the way."""
        s = self.state
        h = self._layers.run(s.ids[:n], s.positions, s.adapters, s.table, self._attend)
        return self._layers.logits(h, s.adapters[:n])

    def _attend(self, index: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        c, s, n = self.model.config, self.state, len(q)
        k_pool, v_pool = self.pool.k[index], self.pool.v[index]
        group, scale = c.n_heads // c.n_kv_heads, c.head_dim**-0.5 * math.log2(math.e)
        shapes = {"HEADS": c.n_heads, "KV_HEADS": c.n_kv_heads, "GROUP": group, "SIZE": c.head_dim, "PAGE": PAGE}
        g = s.groups
        prefix_sums = prefix_lse = q
        if g.any:
            prefix_sums = torch.empty(n, c.n_heads, PREFIX_SPLITS, c.head_dim, device=q.device)
            prefix_lse = torch.empty(n, c.n_heads, PREFIX_SPLITS, device=q.device)
            kernels.prefix_attention_kernel[(max(1, n // 2), c.n_kv_heads, PREFIX_SPLITS)](
                q, k_pool, v_pool, g.tiles, g.table, g.table.stride(0), g.pages, prefix_sums, prefix_lse, scale,
                ROWS=TILE_ROWS, PADDED=max(16, triton.next_power_of_2(TILE_ROWS * group)), SPLITS=PREFIX_SPLITS, **shapes,
                **self._chained, num_warps=4, num_stages=2,
            )  # fmt: skip
        splits = splits_for(n * c.n_kv_heads)
        out = torch.empty_like(q)
        sums = lse = out
        if splits > 1:
            sums = torch.empty(n, c.n_heads, splits, c.head_dim, device=q.device)
            lse = torch.empty(n, c.n_heads, splits, device=q.device)
        kernels.decode_attention_kernel[(n, c.n_kv_heads, splits)](
            q, k_pool, v_pool, s.table, s.table.stride(0), s.positions, g.shared, prefix_sums, prefix_lse, out, sums, lse,
            scale, PADDED=max(16, triton.next_power_of_2(group)), SPLITS=splits, PREFIX_SPLITS=PREFIX_SPLITS if g.any else 0, **shapes,
            **self._chained, num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            kernels.combine_kernel[(n * c.n_heads,)](
                sums, lse, out, SIZE=c.head_dim, SPLITS=splits, **self._chained, num_warps=2
            )
        return out

    def draw(self, logits: Tensor, first: int, n: int, cut: Cut | None = None) -> Tensor:
        """Sample rows ``first .. first + n`` from `logits` [>= n, vocab] and move them on; see `run` for what returns."""
        s, vocab, device = self.state, self.model.config.vocab_size, logits.device
        result = torch.empty(2, n, dtype=torch.int32, device=device)
        rows = slice(first, first + n)
        if cut is not None:
            return self._draw_cut(logits[:n], rows, cut, result)
        blocks = triton.cdiv(vocab, SAMPLE_BLOCK)
        tops = torch.empty(n, blocks, device=device)
        sums = torch.empty(n, blocks, device=device)
        best = torch.empty(n, blocks, dtype=torch.int32, device=device)
        kernels.partial_softmax_kernel[(n, blocks)](
            logits,
            s.temperatures[rows],
            tops,
            sums,
            best,
            VOCAB=vocab,
            BLOCK=SAMPLE_BLOCK,
            **self._chained,
            num_warps=8,
        )
        kernels.draw_kernel[(n,)](
            logits, s.temperatures[rows], s.greedy[rows], s.seeds[rows], s.counts[rows], s.positions[rows], self.max_len,
            tops, sums, best, s.ids[rows], result, n,
            VOCAB=vocab, BLOCK=SAMPLE_BLOCK, BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), **self._chained, num_warps=8,
        )  # fmt: skip
        return result

    def _draw_cut(self, logits: Tensor, rows: slice, cut: Cut, result: Tensor) -> Tensor:
        s, (params, numbers) = self.state, cut
        u = to_device(list(numbers), logits.device, torch.float64)
        ids, logprobs = sample(logits.float(), BatchParams.of(params, logits.shape[1], logits.device), u)
        s.ids[rows] = ids
        s.counts[rows] += 1
        s.positions[rows] = (s.positions[rows] + 1).clamp_(max=self.max_len - 1)
        result[0] = ids
        result[1] = logprobs.float().view(torch.int32)
        return result


def bucket(n: int, most: int) -> int:
    """The batch size a graph is captured for: few enough sizes, little waste."""
    step = 1 if n <= 2 else 4 if n <= 16 else 8 if n <= 64 else 16 if n <= 128 else 32 if n <= 256 else 64
    return min(-(-n // step) * step, most)


def splits_for(programs: int) -> int:
    """Shares of a row's pages, a power of two, so that a small batch fills the device too."""
    splits = 1
    while splits < MAX_SPLITS and programs * splits < BUSY_PROGRAMS:
        splits *= 2
    return splits
