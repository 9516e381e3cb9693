"""A decoder layer over packed tokens, forward and backward, and the same as one autograd node.

Kept are, per token, the layer's input, the queries/keys/values before rotation, what attention gave, the middle residual and
gate/up: what products made. Everything else is made again in the backward pass, which reads memory but multiplies nothing. With
frozen weights no gradient of a weight is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from rllm.backends.local.cuda import train_kernels as kernels
from rllm.backends.local.model import (
    BLOCKS,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    FusedLinear,
    LowRank,
    PackedCausal,
)

NORM_ROWS = 8
ROTATE_ROWS = 16
SWIGLU_BLOCK = 1024
# Tensors that one row of a buffer is aligned to.
ALIGNED = 64
Sums = Mapping[torch.nn.Parameter, Tensor]
"""Where the gradient of each trained weight is added up, in float32."""


def attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedCausal) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(out, what its backward wants besides): causal attention inside each sequence, without padding.

    Sequences of one length go through cuDNN, whose kernels take half the time on Hopper; others through flash attention. Where tokens see
    others `above` too, that is a pass of its own, and the two are put together by the sums under their softmax.
    """
    if not layout.ragged:
        out, *kept = cudnn(q, k, v, layout)
        return out, tuple(kept)
    out, lse, *states = flash(q, k, v, layout.bounds, layout.bounds, layout.longest, layout.longest, True)
    if (a := layout.above) is not None:
        more, more_lse, *_ = flash(q, k, v, a.queries, a.keys, a.longest_queries, a.longest_keys, False)
        n, heads, size = q.shape
        kernels.merge_kernel[(triton.cdiv(n, ROTATE_ROWS), heads)](
            out, lse, more, more_lse, a.queries, a.queries[-1:], n, HEADS=heads, SIZE=size, ROWS=ROTATE_ROWS, num_warps=4
        )  # fmt: skip
    return out, (lse, *states)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: tuple[Tensor, ...], layout: PackedCausal
) -> tuple[Tensor, Tensor, Tensor]:
    known, longest = (grad, q, k, v, out, *kept), layout.longest
    if not layout.ragged:
        return cudnn_backward(*known, layout=layout)
    grads = [g.contiguous() for g in flash_backward(*known, layout.bounds, layout.bounds, longest, longest, True)]
    if (a := layout.above) is not None:
        # With the sums over all that a token sees in `lse` and `out`, the gradients of the two parts add up.
        more = flash_backward(*known, a.queries, a.keys, a.longest_queries, a.longest_keys, False)
        n, heads, size = q.shape
        kernels.add_above_kernel[(triton.cdiv(n, ROTATE_ROWS), heads + 2 * k.shape[1])](
            *grads, *(g.contiguous() for g in more), a.queries, a.queries[-1:], n,
            HEADS=heads, KV_HEADS=k.shape[1], SIZE=size, ROWS=ROTATE_ROWS, num_warps=4,
        )  # fmt: skip
    dq, dk, dv = grads
    return dq, dk, dv


def flash(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, longest_q: int, longest_k: int, causal: bool
) -> tuple[Tensor, ...]:
    """(out [N, heads, size], log of the sums [heads, N], two states for the backward pass). Tokens outside the bounds get no values."""
    scale = q.shape[-1] ** -0.5
    return torch.ops.aten._flash_attention_forward(
        q, k, v, q_bounds, k_bounds, longest_q, longest_k, 0.0, causal, False, scale=scale
    )[:4]


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Tensor, unused: Tensor,
    q_bounds: Tensor, k_bounds: Tensor, longest_q: int, longest_k: int, causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v; none at tokens outside the bounds."""
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, q_bounds, k_bounds, longest_q, longest_k, 0.0, causal, state, unused,
        scale=q.shape[-1] ** -0.5,
    )  # fmt: skip


def cudnn(q: Tensor, k: Tensor, v: Tensor, layout: PackedCausal) -> tuple[Tensor, ...]:
    """(out, three tensors for the backward pass) of sequences that are equally long."""
    results = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_rows(t, layout) for t in (q, k, v)), None, True, 0.0, True, False, scale=q.shape[-1] ** -0.5
    )
    return results[0].transpose(1, 2).reshape(q.shape), results[1], results[6], results[7]


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, layout: PackedCausal
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(_rows(t, layout) for t in (grad, q, k, v, out)), lse, seed, offset, None, None, None, layout.longest, layout.longest,
        0.0, True, scale=q.shape[-1] ** -0.5,
    )  # fmt: skip
    dq, dk, dv = (d.transpose(1, 2).reshape(like.shape) for d, like in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _rows(t: Tensor, layout: PackedCausal) -> Tensor:
    """[sequences, heads, tokens, size] of packed [N, heads, size] where all sequences are equally long."""
    return t.view(layout.n, layout.longest, *t.shape[1:]).transpose(1, 2)


@dataclass
class Product:
    """One fused product of a layer and its low-rank term, part of it (`riding`) where the space around the weight holds A and B."""

    linear: FusedLinear
    pair: tuple[Tensor, Tensor] | None
    sums: tuple[Tensor, Tensor] | None
    riding: bool

    @property
    def side(self) -> int:
        """Columns of an entry for what enters B."""
        return self.linear.space.side if self.riding and self.linear.space is not None else 0

    @property
    def lead(self) -> int:
        """Columns of a given gradient for what enters A."""
        return self.linear.space.rank if self.riding and self.linear.space is not None else 0

    def entry(self, n: int) -> Tensor:
        """Room for the input [n, columns + side]; the kernel before writes the first `columns`."""
        weight = self.linear.weight
        width = weight.shape[1] + -(-self.side // ALIGNED) * ALIGNED
        return torch.empty(n, width, dtype=weight.dtype, device=weight.device)[:, : weight.shape[1] + self.side]

    def given(self, n: int) -> Tensor:
        """Room for the result's gradient [n, lead + rows]; the kernel before writes the last `rows`."""
        weight = self.linear.weight
        before = -(-self.lead // ALIGNED) * ALIGNED
        whole = torch.empty(n, before + len(weight), dtype=weight.dtype, device=weight.device)
        return whole[:, before - self.lead :]

    def forward(self, entry: Tensor, onto: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(``onto + x W^T + bias + (x A^T) B^T``, ``x A^T``); in float32 where `onto` is."""
        linear, space = self.linear, self.linear.space
        x, low, weight = entry, None, linear.weight
        if self.pair is not None and self.side and space is not None:
            x, weight = entry[:, : space.columns], space.wide
            torch.mm(x, space.a.t(), out=entry[:, space.columns :])
            low = entry[:, space.columns : space.columns + len(self.pair[0])].clone()  # a view would keep the entry
            x = entry
        elif self.pair is not None:
            low = F.linear(x, self.pair[0])
        if onto is None:
            y = F.linear(x, weight, linear.bias)
        else:
            y = _onto(onto, x, weight)
            if linear.bias is not None:
                y += linear.bias
        if self.pair is not None and low is not None and not self.side:
            _add_product(y, low, self.pair[1].t())
        return y, low

    def mix(self, given: Tensor) -> Tensor | None:
        """``g B`` [n, R] of the given gradient, put before it where it rides along."""
        if self.pair is None:
            return None
        b, space = self.pair[1], self.linear.space
        if not self.lead or space is None:
            return given @ b
        mixed = given[:, : self.lead]
        if space.side:
            torch.mm(given[:, self.lead :], space.b, out=mixed)
        else:
            torch.mm(given[:, self.lead :], b, out=mixed[:, : b.shape[1]])
            mixed[:, b.shape[1] :].zero_()
        return mixed[:, : b.shape[1]]

    def entering(self, given: Tensor, mixed: Tensor | None) -> Tensor:
        """Gradient of what entered."""
        space = self.linear.space
        if self.lead and space is not None:
            return given @ space.tall
        d = given @ self.linear.weight
        return d if mixed is None or self.pair is None else d.addmm_(mixed, self.pair[0])

    def note(
        self, given: Tensor, mixed: Tensor | None, entered: Tensor, low: Tensor | None, weights: Sums | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of A and B, where they are not added up in `sums`; those of the weights always are."""
        given = given[:, self.lead :]
        if weights is not None:
            _add_product(weights[self.linear.weight], given.t(), entered)
            if self.linear.bias is not None:
                weights[self.linear.bias] += given.sum(0)
        if mixed is None or low is None:
            return None, None
        if self.sums is None:
            return mixed.t() @ entered, given.t() @ low
        _add_product(self.sums[0], mixed.t(), entered)
        _add_product(self.sums[1], given.t(), low)
        return None, None


def products(layer: DecoderLayer, lora: LowRank | None) -> list[Product]:
    """The four products of a layer, in order."""
    result = []
    for block in BLOCKS:
        linear: FusedLinear = getattr(layer, block)
        pair = lora.pair(layer.index, block) if lora is not None else None
        sums = lora.sums(layer.index, block) if lora is not None and pair is not None else None
        result.append(Product(linear, pair, sums, pair is not None and lora is not None and lora.riding))
    return result


def layer_forward(
    layer: DecoderLayer, x: Tensor, tables: tuple[Tensor, Tensor], layout: PackedCausal, lora: LowRank | None
) -> tuple[Tensor, list[Any]]:
    """(result [N, hidden] in float32, what the backward pass wants) of the residual `x` [N, hidden]."""
    config, n = layer.config, len(x)
    qkv_of, o_of, gate_up_of, down_of = products(layer, lora)
    qkv, low_qkv = qkv_of.forward(norm(x, layer.input_norm, config.rms_eps, qkv_of.entry(n)))
    q, k, v = _rotated(qkv, layer.qk_norm, tables, layout, config)
    layout.note(layer.index, k, v)
    out, kept = attention(q, k, v, layout)
    del q, k, v
    middle, low_o = o_of.forward(out.view(n, -1), onto=x)
    gate_up, low_gate_up = gate_up_of.forward(norm(middle, layer.post_norm, config.rms_eps, gate_up_of.entry(n)))
    result, low_down = down_of.forward(_swiglu(gate_up, down_of.entry(n)), onto=middle)
    return result, [x, qkv, out, *kept, middle, gate_up, low_qkv, low_o, low_gate_up, low_down]


def layer_backward(
    layer: DecoderLayer, grad: Tensor, kept: list[Any], tables: tuple[Tensor, Tensor], layout: PackedCausal,
    lora: LowRank | None, weights: Sums | None, to_input: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:  # fmt: skip
    """(gradient of the residual that entered, or None if `to_input` is False and none is wanted; those of A and B of the four products
    where `lora` has no sums), from that of the result. `kept` is emptied."""
    config, n, full = layer.config, len(grad), weights is not None
    x, qkv, out, k0, k1, k2, middle, gate_up, low_qkv, low_o, low_gate_up, low_down = kept
    kept.clear()
    qkv_of, o_of, gate_up_of, down_of = products(layer, lora)
    given = down_of.given(n)
    given[:, down_of.lead :].copy_(grad)
    mixed = down_of.mix(given)
    d_gate_up, act = _swiglu_backward(down_of.entering(given, mixed), gate_up, gate_up_of.given(n), gate_up_of.lead)
    down = down_of.note(given, mixed, act, low_down, weights)
    del act, given, gate_up
    mixed = gate_up_of.mix(d_gate_up)
    given = o_of.given(n)
    d_middle, h, d_post = _norm_backward(
        gate_up_of.entering(d_gate_up, mixed),
        middle,
        layer.post_norm,
        grad,
        given[:, o_of.lead :],
        config.rms_eps,
        full,
    )
    gates = gate_up_of.note(d_gate_up, mixed, h, low_gate_up, weights)
    del d_gate_up, h, middle
    mixed = o_of.mix(given)
    o = o_of.note(given, mixed, out.view(n, -1), low_o, weights)
    d_out = o_of.entering(given, mixed).view_as(out)
    q, k, v = _rotated(qkv, layer.qk_norm, tables, layout, config)
    dq, dk, dv = attention_backward(d_out, q, k, v, out, (k0, k1, k2), layout)
    del q, k, v, d_out, out, k0, k1, k2, given
    d_qkv, d_qk_norm = _rotate_backward(
        dq, dk, dv, qkv, layer.qk_norm, tables, layout, config, full, qkv_of.given(n), qkv_of.lead
    )
    del dq, dk, dv, qkv
    mixed = qkv_of.mix(d_qkv)
    d_x = d_input = None
    if to_input or full:
        d_x, h, d_input = _norm_backward(
            qkv_of.entering(d_qkv, mixed), x, layer.input_norm, d_middle, None, config.rms_eps, full
        )
    else:  # the first layer, whose input nobody trains
        h = norm(x, layer.input_norm, config.rms_eps)
    first = qkv_of.note(d_qkv, mixed, h, low_qkv, weights)
    if weights is not None:
        for parameter, share in ((layer.input_norm, d_input), (layer.post_norm, d_post), (layer.qk_norm, d_qk_norm)):
            if parameter is not None and share is not None:
                weights[parameter] += share
    return d_x, [*first, *o, *gates, *down]


def fused_layers(
    model: Decoder, x: Tensor, layout: PackedCausal, lora: LowRank | None, weights: Sums | None = None
) -> Tensor:
    """What the layers of `model` give for packed tokens [N, hidden]: the residual, kept in float32 from layer to layer."""
    x = x.float()
    tables = model.rotary_tables()
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        x = fused_layer(layer, x, tables, layout, lora, weights)
    return x


def fused_layer(
    layer: DecoderLayer, x: Tensor, tables: tuple[Tensor, Tensor], layout: PackedCausal, lora: LowRank | None,
    weights: Sums | None = None,
) -> Tensor:  # fmt: skip
    """What `DecoderLayer.forward` gives for packed tokens [N, hidden]. Trained weights need `weights`."""
    if torch.is_grad_enabled() and weights is None and layer.input_norm.requires_grad:
        raise ValueError("fused layers add up the gradients of trained weights: say where")
    pairs = [lora.pair(layer.index, block) if lora is not None else None for block in BLOCKS]
    matrices = [matrix for pair in pairs for matrix in (pair or (None, None))]
    return FusedLayer.apply(
        x, layer, tables, layout, lora, weights, lora.anchor if lora is not None else None, *matrices
    )


class FusedLayer(torch.autograd.Function):
    """Inputs: residual x [N, hidden] in float32; A and B of the four blocks, None where there is none. Where `lora` has sums, the
    gradients of A and B are added to those and not returned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: DecoderLayer, tables: tuple[Tensor, Tensor], layout: PackedCausal, lora: LowRank | None,
        weights: Sums | None, anchor: Tensor | None, *matrices: Tensor | None,
    ) -> Tensor:  # fmt: skip
        result, kept = layer_forward(layer, x, tables, layout, lora)
        if any(ctx.needs_input_grad):
            ctx.layer, ctx.tables, ctx.layout, ctx.lora, ctx.weights = layer, tables, layout, lora, weights
            ctx.save_for_backward(*kept)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        d_x, matrices = layer_backward(
            ctx.layer, grads[0].contiguous(), list(ctx.saved_tensors), ctx.tables, ctx.layout, ctx.lora, ctx.weights,
            ctx.needs_input_grad[0],
        )  # fmt: skip
        return (d_x, None, None, None, None, None, None, *matrices)


def _onto(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``total + x W^T`` in the dtype of `total`."""
    if x.dtype == total.dtype:
        return torch.addmm(total, x, weight.t())
    return torch.addmm(total, x, weight.t(), out_dtype=total.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a b``; the factors may be narrower."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last axis of [N, size]; in the first columns of `out` if that is given, which is returned."""
    n, size = x.shape
    block = triton.next_power_of_2(size)
    if out is None:
        out = torch.empty(n, size, dtype=weight.dtype, device=x.device)
    kernels.norm_kernel[(n,)](
        x, weight, out, out.stride(0), eps, SIZE=size, BLOCK=block, num_warps=min(16, max(1, block // 512))
    )
    return out


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, residual_grad: Tensor, narrow: Tensor | None, eps: float, full: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(gradient of the residual in its dtype, the norm's result, gradient of its weight); the first in the weights' dtype in `narrow`."""
    n, size = x.shape
    programs, block = triton.cdiv(n, NORM_ROWS), triton.next_power_of_2(size)
    out, again = torch.empty_like(x), torch.empty(n, size, dtype=weight.dtype, device=x.device)
    shares = torch.empty(programs, size, device=x.device) if full else out
    kernels.norm_backward_kernel[(programs,)](
        grad, x, weight, residual_grad, out, out if narrow is None else narrow, 0 if narrow is None else narrow.stride(0), again, shares, n, eps,
        SIZE=size, BLOCK=block, ROWS=NORM_ROWS, WEIGHTS=full, NARROW=narrow is not None, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out, again, shares.sum(0) if full else None


def _rotated(
    qkv: Tensor, qk_norm: Tensor | None, tables: tuple[Tensor, Tensor], layout: PackedCausal, c: DecoderConfig
) -> tuple[Tensor, Tensor, Tensor]:
    n = len(qkv)
    q = torch.empty(n, c.n_heads, c.head_dim, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(n, c.n_kv_heads, c.head_dim, dtype=qkv.dtype, device=qkv.device)
    kernels.rotate_kernel[(triton.cdiv(n, ROTATE_ROWS), c.n_heads + c.n_kv_heads)](
        qkv, qkv if qk_norm is None else qk_norm, *tables, layout.positions, q, k, n, c.rms_eps,
        HEADS=c.n_heads, KV_HEADS=c.n_kv_heads, HALF=c.head_dim // 2, NORM=qk_norm is not None, ROWS=ROTATE_ROWS,
        num_warps=4,
    )  # fmt: skip
    return q, k, qkv.view(n, -1, c.head_dim)[:, c.n_heads + c.n_kv_heads :]


def _rotate_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, qk_norm: Tensor | None, tables: tuple[Tensor, Tensor], layout: PackedCausal,
    c: DecoderConfig, full: bool, given: Tensor, lead: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(`given`, of which the columns from `lead` on are the gradient of `qkv`; that of the norm's weight)."""
    n, tiles = len(qkv), triton.cdiv(len(qkv), ROTATE_ROWS)
    out, heads = given[:, lead:], c.n_heads + c.n_kv_heads
    weights = full and qk_norm is not None
    shares = torch.empty(tiles, heads, c.head_dim, device=qkv.device) if weights else out
    kernels.rotate_backward_kernel[(tiles, heads + c.n_kv_heads)](
        dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv, qkv if qk_norm is None else qk_norm, *tables,
        layout.positions, out, out.stride(0), shares, n, c.rms_eps,
        HEADS=c.n_heads, KV_HEADS=c.n_kv_heads, HALF=c.head_dim // 2, NORM=qk_norm is not None, ROWS=ROTATE_ROWS,
        WEIGHTS=weights, num_warps=4,
    )  # fmt: skip
    if not weights:
        return given, None
    summed = shares.sum(0)
    return given, torch.stack((summed[: c.n_heads].sum(0), summed[c.n_heads :].sum(0)))


def _swiglu(x: Tensor, out: Tensor) -> Tensor:
    """``silu(gate) * up`` in the first columns of `out`."""
    n, size = len(x), x.shape[1] // 2
    kernels.swiglu_kernel[(n, triton.cdiv(size, SWIGLU_BLOCK))](
        x, out, out.stride(0), SIZE=size, BLOCK=SWIGLU_BLOCK, num_warps=4
    )
    return out


def _swiglu_backward(grad: Tensor, x: Tensor, given: Tensor, lead: int) -> tuple[Tensor, Tensor]:
    """(`given`, of which the columns from `lead` on are the gradient of `x`; ``silu(gate) * up`` once more)."""
    n, size = grad.shape
    dx, again = given[:, lead:], torch.empty_like(grad)
    kernels.swiglu_backward_kernel[(n, triton.cdiv(size, SWIGLU_BLOCK))](
        grad, x, dx, dx.stride(0), again, SIZE=size, BLOCK=SWIGLU_BLOCK, num_warps=4
    )
    return given, again
