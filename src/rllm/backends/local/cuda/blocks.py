"""The decoder's layers as the sampler runs them, for prompts and for single tokens: every row with the adapter it names.

Knows rows, adapters and pages; how rows see others is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from rllm.backends.local.cuda import kernels
from rllm.backends.local.cuda.bank import AdapterBank, BlockBank
from rllm.backends.local.cuda.pages import PAGE, PagePool
from rllm.backends.local.model import BLOCKS, Decoder, DecoderLayer, FloatLogits

SILU_BLOCK = 128
# Elements of B that one program may hold; beyond, it adds up one rank after the other.
LOW_RANK_ELEMENTS = 65536
Attention = Callable[[int, Tensor, Tensor | None, Tensor | None], Tensor]
"""(layer, q [n, heads, size], and for prompts k, v [n, kv_heads, size]) -> [n, heads, size]"""


class BankedLayers:
    def __init__(self, model: Decoder, bank: AdapterBank, pool: PagePool):
        self.model, self.bank, self.pool = model, bank, pool
        self._chained: dict[str, Any] = kernels.chained(model.device)

    def run(
        self, ids: Tensor, positions: Tensor, adapters: Tensor, table: Tensor, attend: Attention, prompts: bool = False
    ) -> Tensor:
        """Final hidden states [n, hidden] of rows `ids` [n], whose keys and values are written on the way. `table`: pages of every row's
        sequence [n, pages] or, of `prompts`, the page of every row [n]."""
        model, c = self.model, self.model.config
        residual = F.embedding(ids, model.embed).float()
        layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        h = self._add_norm(residual, None, None, adapters, layers[0].input_norm)
        for i, layer in enumerate(layers):
            qkv, o, gate_up, down = (self.bank.blocks[i, block] for block in BLOCKS)
            q, k, v = self._rotated(i, layer, qkv, product(h, qkv), positions, adapters, table, prompts)
            mixed = attend(i, q, k, v).view(len(q), -1)
            h = self._add_norm(residual, product(mixed, o), o, adapters, layer.post_norm)
            h = self._silu_mul(gate_up, product(h, gate_up), adapters)
            following = layers[i + 1].input_norm if i + 1 < c.n_layers else model.final_norm
            h = self._add_norm(residual, product(h, down), down, adapters, following)
        return h

    def logits(self, hidden: Tensor, adapters: Tensor) -> Tensor:
        """[n, vocab] in float32."""
        logits = FloatLogits.apply(hidden, self.model.output_weight)
        return self.bank.add_head(logits, hidden, adapters) if self.bank.head is not None else logits

    def _add_norm(
        self, residual: Tensor, delta: Tensor | None, bank: BlockBank | None, adapters: Tensor, weight: Tensor
    ) -> Tensor:
        n, size = residual.shape
        out = torch.empty(n, size, dtype=weight.dtype, device=weight.device)
        block = triton.next_power_of_2(size)
        rank = bank.rank if bank is not None else 0
        kernels.add_norm_kernel[(n,)](
            residual, residual if delta is None else delta, 0 if delta is None else delta.stride(0),
            residual if bank is None else bank.b, adapters, weight, out, self.model.config.rms_eps,
            SIZE=size, BLOCK=block, RANK=rank, RANKS=triton.next_power_of_2(max(rank, 1)), HAS_DELTA=delta is not None,
            AT_ONCE=rank * block <= LOW_RANK_ELEMENTS, **self._chained, num_warps=min(16, max(4, block // 256, rank * block // 4096)),
        )  # fmt: skip
        return out

    def _rotated(
        self, index: int, layer: DecoderLayer, bank: BlockBank, qkv: Tensor, positions: Tensor, adapters: Tensor,
        table: Tensor, prompts: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        c, n, dtype = self.model.config, len(qkv), self.model.dtype
        q = torch.empty(n, c.n_heads, c.head_dim, dtype=dtype, device=qkv.device)
        k = v = None
        if prompts:
            k = torch.empty(n, c.n_kv_heads, c.head_dim, dtype=dtype, device=qkv.device)
            v = torch.empty_like(k)
        cos, sin = self.model.rotary_tables()
        norm = layer.qk_norm
        kernels.rotate_write_kernel[(triton.cdiv(n, kernels.ROWS), c.n_heads + 2 * c.n_kv_heads)](
            qkv, qkv.stride(0), bank.b, adapters, qkv if norm is None else norm, cos, sin, positions, table,
            table.stride(0), q, q if k is None else k, q if v is None else v, self.pool.k[index], self.pool.v[index], n,
            c.rms_eps,
            HEADS=c.n_heads, KV_HEADS=c.n_kv_heads, HALF=c.head_dim // 2, RANK=bank.rank, ADAPTERS=self.bank.capacity,
            NORM=norm is not None, PAGE=PAGE, TILE=kernels.ROWS, PROMPTS=prompts, **self._chained, num_warps=4,
        )  # fmt: skip
        return q, k, v

    def _silu_mul(self, bank: BlockBank, x: Tensor, adapters: Tensor) -> Tensor:
        n, size = x.shape[0], self.model.config.intermediate_size
        out = torch.empty(n, size, dtype=self.model.dtype, device=x.device)
        kernels.silu_mul_kernel[(triton.cdiv(n, kernels.ROWS), triton.cdiv(size, SILU_BLOCK))](
            x, x.stride(0), bank.b, adapters, out, n,
            SIZE=size, BLOCK=SILU_BLOCK, RANK=bank.rank, ADAPTERS=self.bank.capacity, TILE=kernels.ROWS, **self._chained, num_warps=4,
        )  # fmt: skip
        return out


def product(x: Tensor, bank: BlockBank) -> Tensor:
    """``x W^T + bias`` in float32 over the base's rows and those of every adapter."""
    if x.dtype == torch.float32:
        return F.linear(x, bank.weight, bank.bias)
    y = torch.mm(x, bank.weight.t(), out_dtype=torch.float32)
    return y if bank.bias is None else y.add_(bank.bias)
