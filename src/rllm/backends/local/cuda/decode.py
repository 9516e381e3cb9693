"""One decoding step on CUDA as a captured graph: embedding, layers, logits; then one draw for every row.

Rows' state lives on the device and moves on by itself, so steps can be queued before the host has seen what the last one drew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from rllm.backends.base import SamplingParams
from rllm.backends.local.cuda import kernels
from rllm.backends.local.cuda.bank import AdapterBank, BlockBank
from rllm.backends.local.cuda.pages import PAGE, PagePool
from rllm.backends.local.model import Decoder, DecoderLayer, FloatLogits
from rllm.backends.local.sampling import BatchParams, sample
from rllm.backends.local.transfer import to_device

SAMPLE_BLOCK = 4096
SILU_BLOCK = 128
# Programs that keep the device busy while they wait for memory, and the most shares a row's pages are split into.
BUSY_PROGRAMS = 512
MAX_SPLITS = 16
# Elements of B that one program may hold; beyond, it adds up one rank after the other.
LOW_RANK_ELEMENTS = 65536
Cut = tuple[Sequence[SamplingParams], Sequence[float]]
"""Settings and uniform numbers of the rows, for a draw outside the kernels."""


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
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
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
        if size not in self._graphs:
            self._capture(size)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits

    def _capture(self, size: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(size)  # compiles kernels; what it writes is written again by the first replay
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a caller may score a text in another thread meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            logits = self.forward(size)
        self._memory = self._memory or graph.pool()
        self._graphs[size] = (graph, logits)

    def forward(self, n: int) -> Tensor:
        """Logits [n, vocab] of the next token of the first `n` rows, whose keys and values are written on the way."""
        model, c, s = self.model, self.model.config, self.state
        residual = F.embedding(s.ids[:n], model.embed).float()
        layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        h = self._add_norm(residual, None, None, layers[0].input_norm)
        for i, layer in enumerate(layers):
            blocks = {block: self.bank.blocks[i, block] for block in ("qkv", "o", "gate_up", "down")}
            mixed = self._attend(i, layer, blocks["qkv"], F.linear(h, blocks["qkv"].weight, blocks["qkv"].bias))
            y = F.linear(mixed, blocks["o"].weight, blocks["o"].bias)
            h = self._add_norm(residual, y, blocks["o"], layer.post_norm)
            h = self._silu_mul(blocks["gate_up"], F.linear(h, blocks["gate_up"].weight, blocks["gate_up"].bias))
            y = F.linear(h, blocks["down"].weight, blocks["down"].bias)
            following = layers[i + 1].input_norm if i + 1 < c.n_layers else model.final_norm
            h = self._add_norm(residual, y, blocks["down"], following)
        logits = FloatLogits.apply(h, model.output_weight)
        return self.bank.add_head(logits, h, s.adapters[:n]) if self.bank.head is not None else logits

    def _add_norm(self, residual: Tensor, delta: Tensor | None, bank: BlockBank | None, weight: Tensor) -> Tensor:
        n, size = residual.shape
        out = torch.empty(n, size, dtype=weight.dtype, device=weight.device)
        block = triton.next_power_of_2(size)
        rank = bank.rank if bank is not None else 0
        kernels.add_norm_kernel[(n,)](
            residual, residual if delta is None else delta, 0 if delta is None else delta.stride(0),
            residual if bank is None else bank.b, self.state.adapters, weight, out, self.model.config.rms_eps,
            SIZE=size, BLOCK=block, RANK=rank, RANKS=triton.next_power_of_2(max(rank, 1)), HAS_DELTA=delta is not None,
            AT_ONCE=rank * block <= LOW_RANK_ELEMENTS, num_warps=min(16, max(4, block // 256, rank * block // 4096)),
        )  # fmt: skip
        return out

    def _attend(self, index: int, layer: DecoderLayer, bank: BlockBank, qkv: Tensor) -> Tensor:
        c, s, n = self.model.config, self.state, qkv.shape[0]
        q = torch.empty(n, c.n_heads, c.head_dim, dtype=qkv.dtype, device=qkv.device)
        cos, sin = self.model.rotary_tables()
        norm = layer.qk_norm
        k_pool, v_pool = self.pool.k[index], self.pool.v[index]
        kernels.rotate_write_kernel[(triton.cdiv(n, kernels.ROWS), c.n_heads + 2 * c.n_kv_heads)](
            qkv, qkv.stride(0), bank.b, s.adapters, qkv if norm is None else norm, cos, sin, s.positions, s.table,
            s.table.stride(0), q, k_pool, v_pool, n, c.rms_eps,
            HEADS=c.n_heads, KV_HEADS=c.n_kv_heads, HALF=c.head_dim // 2, RANK=bank.rank, ADAPTERS=self.bank.capacity,
            NORM=norm is not None, PAGE=PAGE, TILE=kernels.ROWS, num_warps=4,
        )  # fmt: skip
        group = c.n_heads // c.n_kv_heads
        splits = splits_for(n * c.n_kv_heads)
        out = torch.empty_like(q)
        sums = lse = out
        if splits > 1:
            sums = torch.empty(n, c.n_heads, splits, c.head_dim, device=q.device)
            lse = torch.empty(n, c.n_heads, splits, device=q.device)
        kernels.decode_attention_kernel[(n, c.n_kv_heads, splits)](
            q, k_pool, v_pool, s.table, s.table.stride(0), s.positions, out, sums, lse,
            c.head_dim**-0.5 * math.log2(math.e),
            HEADS=c.n_heads, KV_HEADS=c.n_kv_heads, GROUP=group, PADDED=max(16, triton.next_power_of_2(group)),
            SIZE=c.head_dim, PAGE=PAGE, SPLITS=splits, num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            kernels.combine_kernel[(n * c.n_heads,)](sums, lse, out, SIZE=c.head_dim, SPLITS=splits, num_warps=2)
        return out.view(n, -1)

    def _silu_mul(self, bank: BlockBank, x: Tensor) -> Tensor:
        n, size = x.shape[0], self.model.config.intermediate_size
        out = torch.empty(n, size, dtype=x.dtype, device=x.device)
        kernels.silu_mul_kernel[(triton.cdiv(n, kernels.ROWS), triton.cdiv(size, SILU_BLOCK))](
            x, x.stride(0), bank.b, self.state.adapters, out, n,
            SIZE=size, BLOCK=SILU_BLOCK, RANK=bank.rank, ADAPTERS=self.bank.capacity, TILE=kernels.ROWS, num_warps=4,
        )  # fmt: skip
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
            logits, s.temperatures[rows], tops, sums, best, VOCAB=vocab, BLOCK=SAMPLE_BLOCK, num_warps=8
        )
        kernels.draw_kernel[(n,)](
            logits, s.temperatures[rows], s.greedy[rows], s.seeds[rows], s.counts[rows], s.positions[rows], self.max_len,
            tops, sums, best, s.ids[rows], result, n,
            VOCAB=vocab, BLOCK=SAMPLE_BLOCK, BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), num_warps=8,
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
