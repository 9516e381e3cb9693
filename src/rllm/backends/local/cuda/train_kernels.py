"""Triton kernels of a decoder layer over packed tokens, forward and backward: what lies between the matrix products.

Each reads its inputs once and writes its outputs once; statistics are in float32, results are rounded where the plain path rounds.
Shapes: N tokens, last dimensions contiguous, strides in elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, weight, out, out_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``out = x / rms(x) * weight`` of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = out.dtype.element_ty
    values = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (values * scale).to(dtype).to(tl.float32) * gain
    tl.store(out + row * out_stride + columns, normed.to(dtype), mask=inside)


@triton.jit
def norm_backward_kernel(
    grad, x, weight, residual_grad, out, narrow, narrow_stride, again, weight_grads, n, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WEIGHTS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """``out = residual_grad + d norm / d x``, the same rounded in `narrow`, and the norm once more in `again`. With WEIGHTS each program leaves its rows' share of the weight's gradient,
    `weight_grads` [programs, SIZE]."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROWS):
        row = (program * ROWS + i).to(tl.int64)
        here = inside & (row < n)
        values = tl.load(x + row * SIZE + columns, mask=here, other=0.0).to(tl.float32)
        given = tl.load(grad + row * SIZE + columns, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
        normed = values * scale
        rounded = normed.to(again.dtype.element_ty).to(tl.float32) * gain
        tl.store(again + row * SIZE + columns, rounded.to(again.dtype.element_ty), mask=here)
        if WEIGHTS:
            share += given * normed
        given = given * gain
        passed = scale * (given - normed * (tl.sum(given * normed, axis=0) / SIZE))
        passed += tl.load(residual_grad + row * SIZE + columns, mask=here, other=0.0).to(tl.float32)
        tl.store(out + row * SIZE + columns, passed.to(out.dtype.element_ty), mask=here)
        if NARROW:
            tl.store(narrow + row * narrow_stride + columns, passed.to(narrow.dtype.element_ty), mask=here)
    if WEIGHTS:
        tl.store(weight_grads + program * SIZE + columns, share, mask=inside)


@triton.jit
def rotate_kernel(
    qkv, norm, cos, sin, positions, q, k, n, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Query and key heads through their norm and rotation; `qkv` [N, HEADS + 2 KV_HEADS, 2 HALF]."""
    SIZE: tl.constexpr = 2 * HALF
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    inside = (rows < n)[:, None]
    low = tl.arange(0, HALF)[None, :]
    dtype = q.dtype.element_ty
    start = qkv + (rows[:, None] * (HEADS + 2 * KV_HEADS) + head) * SIZE + low
    first = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / SIZE + eps)[:, None]
        gain = norm + (head >= HEADS).to(tl.int32) * SIZE + low
        first = ((first * scale).to(dtype).to(tl.float32) * tl.load(gain).to(tl.float32)).to(dtype).to(tl.float32)
        second = (
            ((second * scale).to(dtype).to(tl.float32) * tl.load(gain + HALF).to(tl.float32)).to(dtype).to(tl.float32)
        )
    # The tables hold both halves; the first half of `sin` is negative.
    turn = tl.load(positions + rows, mask=rows < n, other=0).to(tl.int64)[:, None] * SIZE + low
    turned = first * tl.load(cos + turn).to(tl.float32) + second * tl.load(sin + turn).to(tl.float32)
    second = second * tl.load(cos + turn + HALF).to(tl.float32) + first * tl.load(sin + turn + HALF).to(tl.float32)
    if head < HEADS:
        target = q + (rows[:, None] * HEADS + head) * SIZE + low
    else:
        target = k + (rows[:, None] * KV_HEADS + head - HEADS) * SIZE + low
    tl.store(target, turned.to(dtype), mask=inside)
    tl.store(target + HALF, second.to(dtype), mask=inside)


@triton.jit
def rotate_backward_kernel(
    dq, dk, dv, qkv, norm, cos, sin, positions, out, out_stride, norm_grads, n, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Gradient of `qkv` from those of the rotated queries and keys and of the values. With WEIGHTS each program leaves its share of
    the norm's gradient, `norm_grads` [row tiles, HEADS + KV_HEADS, 2 HALF]."""
    SIZE: tl.constexpr = 2 * HALF
    tile = tl.program_id(0)
    rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    inside = (rows < n)[:, None]
    low = tl.arange(0, HALF)[None, :]
    if head < HEADS:
        given = dq + (rows[:, None] * HEADS + head) * SIZE + low
    elif head < HEADS + KV_HEADS:
        given = dk + (rows[:, None] * KV_HEADS + head - HEADS) * SIZE + low
    else:
        given = dv + (rows[:, None] * KV_HEADS + head - HEADS - KV_HEADS) * SIZE + low
    first = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(given + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        turn = tl.load(positions + rows, mask=rows < n, other=0).to(tl.int64)[:, None] * SIZE + low
        turned = first * tl.load(cos + turn).to(tl.float32) + second * tl.load(sin + turn + HALF).to(tl.float32)
        second = second * tl.load(cos + turn + HALF).to(tl.float32) + first * tl.load(sin + turn).to(tl.float32)
        first = turned
        if NORM:
            start = qkv + (rows[:, None] * (HEADS + 2 * KV_HEADS) + head) * SIZE + low
            x1 = tl.load(start, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(start + HALF, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / SIZE + eps)[:, None]
            x1, x2 = x1 * scale, x2 * scale
            if WEIGHTS:
                share = norm_grads + (tile * (HEADS + KV_HEADS) + head) * SIZE + tl.arange(0, HALF)
                tl.store(share, tl.sum(first * x1, axis=0))
                tl.store(share + HALF, tl.sum(second * x2, axis=0))
            gain = norm + (head >= HEADS).to(tl.int32) * SIZE + low
            first = first * tl.load(gain).to(tl.float32)
            second = second * tl.load(gain + HALF).to(tl.float32)
            mean = ((tl.sum(first * x1, axis=1) + tl.sum(second * x2, axis=1)) / SIZE)[:, None]
            first, second = scale * (first - x1 * mean), scale * (second - x2 * mean)
    dtype = out.dtype.element_ty
    target = out + rows[:, None] * out_stride + head * SIZE + low
    tl.store(target, first.to(dtype), mask=inside)
    tl.store(target + HALF, second.to(dtype), mask=inside)


@triton.jit
def swiglu_kernel(x, out, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``silu(gate) * up`` of one row's block; `x` [N, 2 SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = out.dtype.element_ty
    gate = tl.load(x + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    activated = gate * tl.sigmoid(gate)
    tl.store(out + row * out_stride + columns, (activated * up).to(dtype), mask=inside)


@triton.jit
def swiglu_backward_kernel(grad, x, dx, dx_stride, again, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Gradient `dx` [N, 2 SIZE] of gate and up, and ``silu(gate) * up`` once more in `again` [N, SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = dx.dtype.element_ty
    gate = tl.load(x + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    activated = gate * s
    tl.store(again + row * SIZE + columns, (activated * up).to(dtype), mask=inside)
    tl.store(dx + row * dx_stride + columns, (given * up * (s + activated * (1.0 - s))).to(dtype), mask=inside)
    tl.store(dx + row * dx_stride + SIZE + columns, (given * activated).to(dtype), mask=inside)


@triton.jit
def logprob_kernel(
    logits, targets, temperatures, logprobs, entropies, grads, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    GRADS: tl.constexpr,
):  # fmt: skip
    """Log-probability of the target and entropy of one row of float32 logits at its temperature, in one pass (online softmax); with
    GRADS a second one leaves ``d logprob / d logits = (one_hot - p) / temperature``."""
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0 / tl.load(temperatures + row)
    start = logits + row * VOCAB
    columns = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        here = first + columns < VOCAB
        x = tl.load(start + first + columns, mask=here, other=float("-inf")) * inverse
        newest = tl.maximum(top, x)
        shrink = tl.where(top == newest, 1.0, tl.exp(top - newest))
        e = tl.where(x == newest, 1.0, tl.exp(x - newest))
        e = tl.where(here, e, 0.0)
        total = total * shrink + e
        weighted = weighted * shrink + tl.where(here, e * x, 0.0)
        top = newest
    best = tl.max(top, axis=0)
    scale = tl.where(top == float("-inf"), 0.0, tl.exp(top - best))
    whole = tl.sum(total * scale, axis=0)
    lse = best + tl.log(whole)
    target = tl.load(targets + row)
    tl.store(logprobs + row, tl.load(start + target) * inverse - lse)
    tl.store(entropies + row, lse - tl.sum(weighted * scale, axis=0) / whole)
    if GRADS:
        for first in range(0, VOCAB, BLOCK):
            here = first + columns < VOCAB
            x = tl.load(start + first + columns, mask=here, other=float("-inf")) * inverse
            one = (first + columns == target).to(tl.float32)
            grad = (one - tl.exp(x - lse)) * inverse
            tl.store(grads + row * VOCAB + first + columns, grad.to(grads.dtype.element_ty), mask=here)


@triton.jit
def merge_kernel(
    out, lse, more, more_lse, first, last, n,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attention over two sets of keys from that over each: `out` [n, HEADS, SIZE] and `lse` [HEADS, n] take in `more` and `more_lse` at the
    rows from `first` to `last`, which alone have any."""
    rows, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    seen = (rows >= tl.load(first)) & (rows < tl.load(last))
    a = tl.load(lse + head * n + rows, mask=seen, other=0.0)
    b = tl.load(more_lse + head * n + rows, mask=seen, other=0.0)
    top = tl.maximum(a, b)
    total = top + tl.log(tl.exp(a - top) + tl.exp(b - top))
    places = (rows[:, None] * HEADS + head) * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(out + places, mask=seen[:, None], other=0.0).to(tl.float32) * tl.exp(a - total)[:, None]
    y = tl.load(more + places, mask=seen[:, None], other=0.0).to(tl.float32) * tl.exp(b - total)[:, None]
    tl.store(out + places, (x + y).to(out.dtype.element_ty), mask=seen[:, None])
    tl.store(lse + head * n + rows, total, mask=seen)


@triton.jit
def add_above_kernel(
    dq, dk, dv, more_dq, more_dk, more_dv, first, last, n,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the second gradients to the first, [n, heads, SIZE] each: of queries at the rows from `first` to `last`, of keys and values at
    those before `first`."""
    rows, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    split = tl.load(first)
    if head < HEADS:
        seen = (rows >= split) & (rows < tl.load(last))
        _add_rows(dq, more_dq, rows, head, seen, HEADS, SIZE)
    else:
        seen = rows < split
        if head < HEADS + KV_HEADS:
            _add_rows(dk, more_dk, rows, head - HEADS, seen, KV_HEADS, SIZE)
        else:
            _add_rows(dv, more_dv, rows, head - HEADS - KV_HEADS, seen, KV_HEADS, SIZE)


@triton.jit
def _add_rows(onto, more, rows, head, seen, HEADS: tl.constexpr, SIZE: tl.constexpr):
    places = (rows[:, None] * HEADS + head) * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.load(onto + places, mask=seen[:, None], other=0.0).to(tl.float32)
    total += tl.load(more + places, mask=seen[:, None], other=0.0).to(tl.float32)
    tl.store(onto + places, total.to(onto.dtype.element_ty), mask=seen[:, None])
