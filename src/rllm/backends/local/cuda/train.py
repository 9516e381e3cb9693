"""A decoder layer over packed tokens as one autograd node, and the output head that never keeps its logits.

The node keeps, per token, the layer's input, the queries/keys/values before rotation, what attention gave, the middle residual and
gate/up: what products made. Everything else is made again in the backward pass, which reads memory but multiplies nothing. With
frozen weights no gradient of a weight is computed.
"""

from __future__ import annotations

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
    FloatLogits,
    LowRank,
    PackedCausal,
)

NORM_ROWS = 8
ROTATE_ROWS = 16
SWIGLU_BLOCK = 1024
LOGPROB_BLOCK = 8192
# Rows of logits held at once; with 151,936 ids 1024 rows are 620 MB in float32.
HEAD_ROWS = 1024
BLOCK_NAMES = tuple(BLOCKS)
# Where the weights stand among the inputs of `FusedLayer`.
FIRST_WEIGHT = 6 + 8


def attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedCausal) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(out, what its backward wants besides): causal attention inside each sequence, without padding.

    Sequences of one length go through cuDNN, whose kernels take half the time on Hopper; others through flash attention.
    """
    scale = q.shape[-1] ** -0.5
    if layout.ragged:
        bounds, longest = layout.bounds, layout.longest
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
        )
        return out, (lse, state, unused)
    results = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_rows(t, layout) for t in (q, k, v)), None, True, 0.0, True, False, scale=scale
    )
    return results[0].transpose(1, 2).reshape(q.shape), (results[1], results[6], results[7])


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: tuple[Tensor, ...], layout: PackedCausal
) -> tuple[Tensor, Tensor, Tensor]:
    scale, longest = q.shape[-1] ** -0.5, layout.longest
    if layout.ragged:
        lse, state, unused = kept
        return torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            layout.bounds,
            layout.bounds,
            longest,
            longest,
            0.0,
            True,
            state,
            unused,
            scale=scale,
        )
    lse, seed, offset = kept
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(_rows(t, layout) for t in (grad, q, k, v, out)), lse, seed, offset, None, None, None, longest, longest, 0.0, True,
        scale=scale,
    )  # fmt: skip
    dq, dk, dv = (d.transpose(1, 2).reshape(like.shape) for d, like in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _rows(t: Tensor, layout: PackedCausal) -> Tensor:
    """[sequences, heads, tokens, size] of packed [N, heads, size] where all sequences are equally long."""
    return t.view(layout.n, layout.longest, *t.shape[1:]).transpose(1, 2)


def fused_layers(model: Decoder, x: Tensor, layout: PackedCausal, lora: LowRank | None) -> Tensor:
    """What the layers of `model` give for packed tokens [N, hidden]: the residual, kept in float32 from layer to layer."""
    x = x.float()
    tables = model.rotary_tables()
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        x = fused_layer(layer, x, tables, layout, lora)
    return x


def fused_layer(
    layer: DecoderLayer, x: Tensor, tables: tuple[Tensor, Tensor], layout: PackedCausal, lora: LowRank | None
) -> Tensor:
    """What `DecoderLayer.forward` gives for packed tokens [N, hidden]."""
    pairs = [lora.pair(layer.index, block) if lora is not None else None for block in BLOCKS]
    linears = [getattr(layer, block) for block in BLOCKS]
    matrices = [matrix for pair in pairs for matrix in (pair or (None, None))]
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    norms = (layer.input_norm, layer.post_norm, layer.qk_norm)
    anchor = lora.anchor if lora is not None else None
    return FusedLayer.apply(x, layer, tables, layout, lora, anchor, *matrices, *weights, *biases, *norms)


class FusedLayer(torch.autograd.Function):
    """Inputs: residual x [N, hidden] in float32; A and B of the four blocks, None where there is none; their weights; their biases; the
    three norms. Where `lora` has sums, the gradients of A and B are added to those and not returned."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: DecoderLayer, tables: tuple[Tensor, Tensor], layout: PackedCausal, lora: LowRank | None,
        anchor: Tensor | None, *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        config = layer.config
        pairs, weights, biases, (input_norm, post_norm, qk_norm) = _sorted(tensors)
        h = norm(x, input_norm, config.rms_eps)
        qkv, low_qkv = _product(h, weights[0], biases[0], pairs[0])
        q, k, v = _rotated(qkv, qk_norm, tables, layout, config)
        layout.note(layer.index, k, v)
        out, kept = attention(q, k, v, layout)
        flat = out.view(len(x), -1)
        middle, low_o = _product(flat, weights[1], biases[1], pairs[1], onto=x)
        h = norm(middle, post_norm, config.rms_eps)
        gate_up, low_gate_up = _product(h, weights[2], biases[2], pairs[2])
        result, low_down = _product(_swiglu(gate_up), weights[3], biases[3], pairs[3], onto=middle)
        if any(ctx.needs_input_grad):
            ctx.layer, ctx.tables, ctx.layout, ctx.lora = layer, tables, layout, lora
            lows = (low_qkv, low_o, low_gate_up, low_down)
            ctx.save_for_backward(x, qkv, out, *kept, middle, gate_up, *lows, *tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, qkv, out, k0, k1, k2, middle, gate_up, *tensors = ctx.saved_tensors
        lows, tensors = tensors[:4], tensors[4:]
        layer, config, layout, lora = ctx.layer, ctx.layer.config, ctx.layout, ctx.lora
        pairs, weights, biases, (input_norm, post_norm, qk_norm) = _sorted(tensors)
        full = ctx.needs_input_grad[FIRST_WEIGHT]  # the weights are trained, or not, all together
        grad = grads[0].contiguous()
        d_matrices: list[Tensor | None] = [None] * 8
        d_weights: list[Tensor | None] = [None] * 4
        d_biases: list[Tensor | None] = [None] * 4

        def mixed_by(i: int, given: Tensor) -> Tensor | None:
            pair = pairs[i]
            return None if pair is None else given @ pair[1]

        def note_gradients(i: int, given: Tensor, mixed: Tensor | None, entered: Tensor) -> None:
            """Gradients of the parameters of product `i`; `given` is that of its result."""
            if full:
                d_weights[i] = given.t() @ entered
                d_biases[i] = None if biases[i] is None else given.sum(0)
            if mixed is None:
                return
            sums = lora.sums(layer.index, BLOCK_NAMES[i])
            if sums is None:
                d_matrices[2 * i], d_matrices[2 * i + 1] = mixed.t() @ entered, given.t() @ lows[i]
            else:
                _add_product(sums[0], mixed.t(), entered)
                _add_product(sums[1], given.t(), lows[i])

        def entering(i: int, given: Tensor, mixed: Tensor | None) -> Tensor:
            """Gradient of what entered product `i`."""
            d = given @ weights[i]
            pair = pairs[i]
            return d if mixed is None or pair is None else d.addmm_(mixed, pair[0])

        narrow = grad.to(weights[3].dtype)
        mixed = mixed_by(3, narrow)
        d_gate_up, act = _swiglu_backward(entering(3, narrow, mixed), gate_up)
        note_gradients(3, narrow, mixed, act)
        del act, narrow
        mixed = mixed_by(2, d_gate_up)
        d_middle, narrow, h, d_post = _norm_backward(
            entering(2, d_gate_up, mixed), middle, post_norm, grad, config.rms_eps, full
        )
        note_gradients(2, d_gate_up, mixed, h)
        del d_gate_up, h
        mixed = mixed_by(1, narrow)
        note_gradients(1, narrow, mixed, out.view(len(x), -1))
        d_out = entering(1, narrow, mixed).view_as(out)
        q, k, v = _rotated(qkv, qk_norm, ctx.tables, layout, config)
        dq, dk, dv = attention_backward(d_out, q, k, v, out, (k0, k1, k2), layout)
        d_qkv, d_qk_norm = _rotate_backward(dq, dk, dv, qkv, qk_norm, ctx.tables, layout, config, full)
        del q, k, v, dq, dk, dv, d_out
        mixed = mixed_by(0, d_qkv)
        d_x = d_input = None
        if ctx.needs_input_grad[0] or full:
            d_x, _, h, d_input = _norm_backward(
                entering(0, d_qkv, mixed), x, input_norm, d_middle, config.rms_eps, full
            )
        else:  # the first layer, whose input nobody trains
            h = norm(x, input_norm, config.rms_eps)
        note_gradients(0, d_qkv, mixed, h)
        return (d_x, None, None, None, None, None, *d_matrices, *d_weights, *d_biases, d_input, d_post, d_qk_norm)


def _sorted(tensors: Any) -> tuple[list[tuple[Tensor, Tensor] | None], list[Tensor], list[Tensor | None], list[Any]]:
    """(A and B), weights, biases of the four blocks, and the norms."""
    pairs = [(tensors[2 * i], tensors[2 * i + 1]) if tensors[2 * i] is not None else None for i in range(4)]
    return pairs, list(tensors[8:12]), list(tensors[12:16]), list(tensors[16:19])


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, pair: tuple[Tensor, Tensor] | None, onto: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(``onto + x W^T + bias + (x A^T) B^T``, ``x A^T``); in float32 where `onto` is."""
    if onto is None:
        y = F.linear(x, weight, bias)
    elif x.dtype == onto.dtype:
        y = torch.addmm(onto, x, weight.t())
    else:
        y = torch.addmm(onto, x, weight.t(), out_dtype=onto.dtype)
    if onto is not None and bias is not None:
        y += bias
    if pair is None:
        return y, None
    low = F.linear(x, pair[0])
    _add_product(y, low, pair[1].t())
    return y, low


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a b``; the factors may be narrower."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis of [N, size]."""
    n, size = x.shape
    out, block = torch.empty(n, size, dtype=weight.dtype, device=x.device), triton.next_power_of_2(size)
    kernels.norm_kernel[(n,)](x, weight, out, eps, SIZE=size, BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return out


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, residual_grad: Tensor, eps: float, full: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(gradient of the residual in its dtype, the same in the weights' dtype, the norm's result, gradient of its weight)."""
    n, size = x.shape
    programs, block = triton.cdiv(n, NORM_ROWS), triton.next_power_of_2(size)
    out, narrow = torch.empty_like(x), torch.empty(n, size, dtype=weight.dtype, device=x.device)
    again = torch.empty_like(narrow)
    shares = torch.empty(programs, size, device=x.device) if full else out
    kernels.norm_backward_kernel[(programs,)](
        grad, x, weight, residual_grad, out, narrow, again, shares, n, eps,
        SIZE=size, BLOCK=block, ROWS=NORM_ROWS, WEIGHTS=full, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out, narrow, again, shares.sum(0).to(weight.dtype) if full else None


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
    c: DecoderConfig, full: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    n, tiles = len(qkv), triton.cdiv(len(qkv), ROTATE_ROWS)
    out, heads = torch.empty_like(qkv), c.n_heads + c.n_kv_heads
    weights = full and qk_norm is not None
    shares = torch.empty(tiles, heads, c.head_dim, device=qkv.device) if weights else out
    kernels.rotate_backward_kernel[(tiles, heads + c.n_kv_heads)](
        dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv, qkv if qk_norm is None else qk_norm, *tables,
        layout.positions, out, out.stride(0), shares, n, c.rms_eps,
        HEADS=c.n_heads, KV_HEADS=c.n_kv_heads, HALF=c.head_dim // 2, NORM=qk_norm is not None, ROWS=ROTATE_ROWS,
        WEIGHTS=weights, num_warps=4,
    )  # fmt: skip
    if not weights:
        return out, None
    summed = shares.sum(0)
    return out, torch.stack((summed[: c.n_heads].sum(0), summed[c.n_heads :].sum(0))).to(qkv.dtype)


def _swiglu(x: Tensor) -> Tensor:
    n, size = len(x), x.shape[1] // 2
    out = torch.empty(n, size, dtype=x.dtype, device=x.device)
    kernels.swiglu_kernel[(n, triton.cdiv(size, SWIGLU_BLOCK))](x, out, SIZE=size, BLOCK=SWIGLU_BLOCK, num_warps=4)
    return out


def _swiglu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    n, size = grad.shape
    dx, again = torch.empty_like(x), torch.empty_like(grad)
    kernels.swiglu_backward_kernel[(n, triton.cdiv(size, SWIGLU_BLOCK))](
        grad, x, dx, again, SIZE=size, BLOCK=SWIGLU_BLOCK, num_warps=4
    )
    return dx, again


def token_logprobs(model: Decoder, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability [M] of `targets`, entropy [M]) from hidden states [M, hidden]; the entropy carries no gradient."""
    return HeadLogprobs.apply(hidden, model.output_weight, targets, temperatures)


class HeadLogprobs(torch.autograd.Function):
    """Logits are made a chunk at a time. With a frozen head the gradient of each log-probability by its hidden state is made while the
    chunk is there, so the backward pass is a scaling; a trained head needs its logits once more."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        trained = ctx.needs_input_grad[1]
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] and not trained else None
        logprobs, entropies = _head_pass(hidden, head, targets, temperatures, slopes)
        ctx.trained = trained
        if trained:
            ctx.save_for_backward(hidden, head, targets, temperatures)
        elif slopes is not None:
            ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = grads[0]
        if not ctx.trained:
            (slopes,) = ctx.saved_tensors
            return (slopes * grad.unsqueeze(1)).to(slopes.dtype), None, None, None
        hidden, head, targets, temperatures = ctx.saved_tensors
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        for rows in range(0, len(hidden), HEAD_ROWS):
            part = slice(rows, rows + HEAD_ROWS)
            d_logits = torch.empty(len(targets[part]), len(head), dtype=hidden.dtype, device=hidden.device)
            _chunk_logprobs(hidden[part], head, targets[part], temperatures[part], d_logits)
            d_logits *= grad[part].unsqueeze(1)
            d_hidden[part] = d_logits @ head
            d_head += d_logits.t() @ hidden[part]
        return d_hidden, d_head.to(head.dtype), None, None


def _head_pass(
    hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    parts = []
    for rows in range(0, len(hidden), HEAD_ROWS):
        part = slice(rows, rows + HEAD_ROWS)
        d_logits = None
        if slopes is not None:
            d_logits = torch.empty(len(targets[part]), len(head), dtype=hidden.dtype, device=hidden.device)
        parts.append(_chunk_logprobs(hidden[part], head, targets[part], temperatures[part], d_logits))
        if slopes is not None and d_logits is not None:
            slopes[part] = d_logits @ head
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor, d_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = FloatLogits.apply(hidden, head)
    n, vocab = logits.shape
    logprobs, entropies = torch.empty(n, device=logits.device), torch.empty(n, device=logits.device)
    kernels.logprob_kernel[(n,)](
        logits, targets, temperatures, logprobs, entropies, logits if d_logits is None else d_logits,
        VOCAB=vocab, BLOCK=min(LOGPROB_BLOCK, triton.next_power_of_2(vocab)), GRADS=d_logits is not None, num_warps=8,
    )  # fmt: skip
    return logprobs, entropies
