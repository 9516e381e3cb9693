"""Triton kernels of one decoding step: what lies between the matrix products.

Low-rank updates cost no kernel of their own: a product's weight has the rows of every adapter's A below its own rows, so one product gives
``W x`` and all ``A x``; the kernel that reads the result adds ``B (A x)`` of each row's adapter on the way. Rounding is that of training:
products come in float32, ``A x``, the sum with the low-rank term and each step of the normalisation are rounded to the model's dtype; the
residual is kept in float32.

Strides are in elements; last dimensions are contiguous. `adapters` [n] is the adapter's number of each row, -1 for none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 16
"""Rows a program handles where a low-rank product is part of it: the least a matrix unit takes."""


def chained(device: torch.device) -> dict[str, bool]:
    """Launch options of the kernels below: on Hopper a kernel is set up while the one before it still runs, and then waits for it
    (programmatic dependent launch); a step is hundreds of kernels of a few microseconds."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}


@triton.jit
def _begin(CHAINED: tl.constexpr):
    """Nothing may be read or written before the kernel in front has ended."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def add_norm_kernel(
    residual, delta, delta_stride, b, adapters, weight, out, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, HAS_DELTA: tl.constexpr,
    AT_ONCE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """``residual += delta + B h``; ``out = rms_norm(residual) * weight``. One program a row; `delta` [n, SIZE + ...], then h; `b`
    [adapters, RANK, SIZE], loaded AT_ONCE or rank by rank."""
    _begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = out.dtype.element_ty
    if HAS_DELTA and RANK > 0:
        adapter = tl.load(adapters + row).to(tl.int64)
    x = tl.load(residual + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        y = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if RANK > 0:
            h = delta + row * delta_stride + SIZE + adapter * RANK
            matrix = b + adapter * RANK * SIZE + columns
            if AT_ONCE:
                ranks = tl.arange(0, RANKS)
                there = (ranks < RANK) & (adapter >= 0)
                scale = tl.load(h + ranks, mask=there, other=0.0).to(dtype).to(tl.float32)
                rows = tl.load(
                    matrix[None, :] + ranks[:, None] * SIZE, mask=there[:, None] & inside[None, :], other=0.0
                )
                y += tl.sum(rows.to(tl.float32) * scale[:, None], axis=0)
            elif adapter >= 0:
                for r in tl.range(RANK):
                    scale = tl.load(h + r).to(dtype).to(tl.float32)
                    y += scale * tl.load(matrix + r * SIZE, mask=inside, other=0.0).to(tl.float32)
        x += y
        tl.store(residual + row * SIZE + columns, x, mask=inside)
    variance = tl.sum(x * x, axis=0) / SIZE
    normed = (x * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + columns, (normed * gain).to(dtype), mask=inside)


@triton.jit
def _low_rank(x, base, stride, first, b, column, rows, inside, adapter, RANK: tl.constexpr, ADAPTERS: tl.constexpr,
              PARTS: tl.constexpr, part, TOTAL: tl.constexpr):  # fmt: skip
    """x [ROWS, C] + B h of each row's adapter. h of part `part` starts at ``first + (adapter * PARTS + part) * RANK`` of a row;
    `b` [adapters, TOTAL, RANK], of which `column` [C] names the rows."""
    ranks = tl.arange(0, RANK)
    for a in tl.range(ADAPTERS):
        mine = inside & (adapter == a)
        if tl.sum(mine.to(tl.int32)) > 0:
            place = first + (a * PARTS + part) * RANK
            h = tl.load(base + rows[:, None] * stride + place + ranks[None, :], mask=mine[:, None], other=0.0)
            matrix = tl.load(b + (a * TOTAL + column[None, :]) * RANK + ranks[:, None])
            x += tl.dot(h.to(matrix.dtype), matrix)
    return x


@triton.jit
def rotate_write_kernel(
    qkv, stride, b, adapters, norm, cos, sin, positions, table, table_stride, q_out, k_out, v_out, k_pool, v_pool, n, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr, ADAPTERS: tl.constexpr,
    NORM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, PROMPTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Low-rank update, query/key norm and rotation of one head of TILE rows; keys and values go into their pages. `table` holds the pages
    of every row's sequence or, with PROMPTS, the page of every row; keys and values then also go to `k_out` and `v_out`.

    `qkv` [n, (HEADS + 2 KV_HEADS) * 2 HALF, then h of the three parts]; pools [pages, KV_HEADS, PAGE, 2 HALF].
    """
    _begin(CHAINED)
    SIZE: tl.constexpr = 2 * HALF
    TOTAL: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    rows = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    head = tl.program_id(1)
    inside = rows < n
    part = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
    low = tl.arange(0, HALF)
    high = low + HALF
    dtype = q_out.dtype.element_ty
    start = qkv + rows[:, None] * stride + head * SIZE
    first = tl.load(start + low[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    second = tl.load(start + high[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    if RANK > 0:
        adapter = tl.load(adapters + rows, mask=inside, other=-1)
        first = _low_rank(
            first, qkv, stride, TOTAL, b, head * SIZE + low, rows, inside, adapter, RANK, ADAPTERS, 3, part, TOTAL
        )
        second = _low_rank(
            second, qkv, stride, TOTAL, b, head * SIZE + high, rows, inside, adapter, RANK, ADAPTERS, 3, part, TOTAL
        )
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    position = tl.load(positions + rows, mask=inside, other=0).to(tl.int64)
    if part < 2:
        if NORM:
            variance = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / SIZE
            scale = tl.rsqrt(variance + eps)[:, None]
            gain = norm + part * SIZE
            first = (first * scale).to(dtype).to(tl.float32) * tl.load(gain + low).to(tl.float32)[None, :]
            second = (second * scale).to(dtype).to(tl.float32) * tl.load(gain + high).to(tl.float32)[None, :]
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        # The tables hold both halves; the first half of `sin` is negative.
        turn = position[:, None] * SIZE
        c1 = tl.load(cos + turn + low[None, :]).to(tl.float32)
        c2 = tl.load(cos + turn + high[None, :]).to(tl.float32)
        s1 = tl.load(sin + turn + low[None, :]).to(tl.float32)
        s2 = tl.load(sin + turn + high[None, :]).to(tl.float32)
        turned = first * c1 + second * s1
        second = second * c2 + first * s2
        first = turned
    if part == 0:
        target = q_out + (rows[:, None] * HEADS + head) * SIZE
    else:
        if PROMPTS:  # noqa: SIM108 - a branch at compile time
            entry = table + rows
        else:
            entry = table + rows * table_stride + position // PAGE
        page = tl.load(entry, mask=inside, other=0).to(tl.int64)
        own = head - HEADS - (part - 1) * KV_HEADS
        place = ((page * KV_HEADS + own) * PAGE + position % PAGE) * SIZE
        packed = (rows * KV_HEADS + own) * SIZE
        if part == 1:
            target, twin = k_pool + place[:, None], k_out + packed[:, None]
        else:
            target, twin = v_pool + place[:, None], v_out + packed[:, None]
        if PROMPTS:
            tl.store(twin + low[None, :], first.to(dtype), mask=inside[:, None])
            tl.store(twin + high[None, :], second.to(dtype), mask=inside[:, None])
    tl.store(target + low[None, :], first.to(dtype), mask=inside[:, None])
    tl.store(target + high[None, :], second.to(dtype), mask=inside[:, None])


@triton.jit
def silu_mul_kernel(
    x, stride, b, adapters, out, n,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, ADAPTERS: tl.constexpr, TILE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """``silu(gate + B h) * (up + B h)``; `x` [n, 2 SIZE, then h of the two parts]."""
    _begin(CHAINED)
    rows = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    dtype = out.dtype.element_ty
    start = x + rows[:, None] * stride + columns[None, :]
    here = inside[:, None] & (columns < SIZE)[None, :]
    gate = tl.load(start, mask=here, other=0.0).to(tl.float32)
    up = tl.load(start + SIZE, mask=here, other=0.0).to(tl.float32)
    if RANK > 0:
        adapter = tl.load(adapters + rows, mask=inside, other=-1)
        column = tl.minimum(columns, SIZE - 1)
        gate = _low_rank(gate, x, stride, 2 * SIZE, b, column, rows, inside, adapter, RANK, ADAPTERS, 2, 0, 2 * SIZE)
        up = _low_rank(up, x, stride, 2 * SIZE, b, SIZE + column, rows, inside, adapter, RANK, ADAPTERS, 2, 1, 2 * SIZE)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate))
    tl.store(out + rows[:, None] * SIZE + columns[None, :], (activated * up).to(dtype), mask=here)


@triton.jit
def _attend_page(query, k_pool, v_pool, place, seen, top, total, mixed, scale):
    """Online softmax (Dao et al. 2022) over the tokens of one page; `seen` [PAGE] are those that count."""
    keys = tl.load(k_pool + place)
    scores = tl.dot(query, tl.trans(keys)) * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    newest = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - newest[:, None])
    shrink = tl.exp2(top - newest)
    total = total * shrink + tl.sum(weights, axis=1)
    # Beyond the end a page holds what was there before; 0 times that must be 0 whatever it is.
    values = tl.load(v_pool + place, mask=seen[:, None], other=0.0)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
    return newest, total, mixed


@triton.jit
def prefix_attention_kernel(
    q, k_pool, v_pool, tiles, tile_table, table_stride, tile_pages, part_sum, part_lse, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
    SIZE: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Attention of up to ROWS rows over the pages that all of them share, read once for them all.

    `tiles` [tiles, ROWS] names the rows (-1: none), `tile_table` their pages, `tile_pages` how many; each program does a share of the
    pages and leaves its sum and log-sum-exp (base 2) to `decode_attention_kernel`.
    """
    _begin(CHAINED)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    pages = tl.load(tile_pages + tile)
    if pages > 0:
        member = tl.arange(0, PADDED)
        column = tl.arange(0, SIZE)
        token = tl.arange(0, PAGE)
        slot = member // GROUP
        row = tl.load(tiles + tile * ROWS + slot, mask=slot < ROWS, other=-1).to(tl.int64)
        real = row >= 0
        head = kv_head * GROUP + member % GROUP
        query = tl.load(q + (row * HEADS + head)[:, None] * SIZE + column[None, :], mask=real[:, None], other=0.0)
        share = (pages + SPLITS - 1) // SPLITS
        last = tl.minimum(split * share + share, pages)
        top = tl.full((PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        mixed = tl.zeros((PADDED, SIZE), tl.float32)
        for i in tl.range(split * share, last):
            page = tl.load(tile_table + tile * table_stride + i).to(tl.int64)
            place = (page * KV_HEADS + kv_head) * PAGE * SIZE + token[:, None] * SIZE + column[None, :]
            top, total, mixed = _attend_page(query, k_pool, v_pool, place, token >= 0, top, total, mixed, scale)
        some = tl.maximum(total, 1e-37)
        place = (row * HEADS + head) * SPLITS + split
        tl.store(part_sum + place[:, None] * SIZE + column[None, :], mixed / some[:, None], mask=real[:, None])
        tl.store(part_lse + place, tl.where(total > 0, top + tl.log2(some), float("-inf")), mask=real)


@triton.jit
def decode_attention_kernel(
    q, k_pool, v_pool, table, table_stride, positions, shared, prefix_sum, prefix_lse, out, part_sum, part_lse, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, PREFIX_SPLITS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Attention of one new token of a row over its pages, for the query heads of one key head; the first `shared` pages of a row were
    read by `prefix_attention_kernel`, whose shares are joined here.

    With SPLITS > 1 each program does a share of the pages and leaves its sum and log-sum-exp to `combine_kernel`.
    """
    _begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    member = tl.arange(0, PADDED)
    column = tl.arange(0, SIZE)
    token = tl.arange(0, PAGE)
    head = kv_head * GROUP + tl.minimum(member, GROUP - 1)
    query = tl.load(q + (row * HEADS + head[:, None]) * SIZE + column[None, :])
    length = tl.load(positions + row) + 1
    before = 0
    if PREFIX_SPLITS > 0:
        before = tl.load(shared + row)
    pages = (length + PAGE - 1) // PAGE - before
    share = (pages + SPLITS - 1) // SPLITS
    first = before + split * share
    last = tl.minimum(first + share, before + pages)
    top = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    mixed = tl.zeros((PADDED, SIZE), tl.float32)
    if PREFIX_SPLITS > 0 and (before > 0) & (split == 0):
        for s in tl.static_range(PREFIX_SPLITS):
            place = (row * HEADS + head) * PREFIX_SPLITS + s
            lse = tl.load(prefix_lse + place)
            newest = tl.maximum(top, lse)
            weight, shrink = tl.exp2(lse - newest), tl.exp2(top - newest)
            total = total * shrink + weight
            mixed = mixed * shrink[:, None]
            mixed += tl.load(prefix_sum + place[:, None] * SIZE + column[None, :]) * weight[:, None]
            top = newest
    for i in tl.range(first, last):
        page = tl.load(table + row * table_stride + i).to(tl.int64)
        place = (page * KV_HEADS + kv_head) * PAGE * SIZE + token[:, None] * SIZE + column[None, :]
        seen = i * PAGE + token < length
        top, total, mixed = _attend_page(query, k_pool, v_pool, place, seen, top, total, mixed, scale)
    real = member < GROUP
    if SPLITS == 1:
        target = out + (row * HEADS + head[:, None]) * SIZE + column[None, :]
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    else:
        some = tl.maximum(total, 1e-37)
        place = (row * HEADS + head) * SPLITS + split
        tl.store(part_sum + place[:, None] * SIZE + column[None, :], mixed / some[:, None], mask=real[:, None])
        tl.store(part_lse + place, tl.where(total > 0, top + tl.log2(some), float("-inf")), mask=real)


@triton.jit
def combine_kernel(part_sum, part_lse, out, SIZE: tl.constexpr, SPLITS: tl.constexpr, CHAINED: tl.constexpr):
    """Join the shares of one (row, head): weights are ``2 ** (lse - max)``."""
    _begin(CHAINED)
    item = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, SIZE)
    lse = tl.load(part_lse + item * SPLITS + split)
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    sums = tl.load(part_sum + (item * SPLITS + split[:, None]) * SIZE + column[None, :])
    mixed = tl.sum(sums * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + item * SIZE + column, mixed.to(out.dtype.element_ty))


@triton.jit
def partial_softmax_kernel(
    logits,
    temperatures,
    block_max,
    block_sum,
    block_best,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Per block of the vocabulary: the largest tempered logit, the sum of exponentials under it, and where it stands."""
    _begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * VOCAB + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperatures + row)
    top = tl.max(x, axis=0)
    place = row * tl.num_programs(1) + block
    tl.store(block_max + place, top)
    tl.store(block_sum + place, tl.sum(tl.exp(x - top), axis=0))
    tl.store(block_best + place, block * BLOCK + tl.argmax(x, axis=0))


@triton.jit
def draw_kernel(
    logits, temperatures, greedy, seeds, counts, positions, limit, block_max, block_sum, block_best, ids, result,
    n, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Inverse of the cumulative distribution at a uniform number that depends on (seed, count) alone; first the block, then within it.

    Writes the id to `ids` [n], (id, bits of its log-probability) to `result` [2, n], and moves the row on by one position.
    """
    _begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    there = block < BLOCKS
    tops = tl.load(block_max + row * BLOCKS + block, mask=there, other=float("-inf"))
    sums = tl.load(block_sum + row * BLOCKS + block, mask=there, other=0.0)
    top = tl.max(tops, axis=0)
    mass = tl.where(there, sums * tl.exp(tops - top), 0.0).to(tl.float64)
    below = tl.cumsum(mass, axis=0)
    whole = tl.sum(mass, axis=0)
    uniform = tl.rand(tl.load(seeds + row), tl.load(counts + row)).to(tl.float64)
    # Kept below the total whatever the rounding, so that a sum above it exists and belongs to a possible id.
    point = tl.minimum(uniform * whole, whole * (1.0 - 1e-12))
    chosen = tl.min(tl.where((below > point) & (mass > 0), block, PADDED - 1), axis=0)
    chosen = tl.minimum(chosen, BLOCKS - 1)
    before = tl.sum(tl.where(block < chosen, mass, 0.0), axis=0)
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    x = tl.load(logits + row * VOCAB + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32) / temperature
    weight = tl.exp(x - top).to(tl.float64)
    inner = tl.cumsum(weight, axis=0)
    inside = tl.minimum(point - before, tl.sum(weight, axis=0) * (1.0 - 1e-12))
    picked = tl.min(tl.where((inner > inside) & (weight > 0), column, VOCAB), axis=0)
    if tl.load(greedy + row) != 0:
        picked = tl.min(
            tl.where(there & (tops == top), tl.load(block_best + row * BLOCKS + block, mask=there, other=VOCAB), VOCAB),
            axis=0,
        )
    picked = tl.minimum(
        picked, VOCAB - 1
    )  # nothing fits only where the logits are NaN: any id, with a NaN log-probability
    value = tl.load(logits + row * VOCAB + picked).to(tl.float32) / temperature
    logprob = value - top - tl.log(tl.sum(mass, axis=0)).to(tl.float32)
    tl.store(ids + row, picked.to(tl.int64))
    tl.store(result + row, picked.to(tl.int32))
    tl.store(result + n + row, logprob.to(tl.int32, bitcast=True))
    tl.store(counts + row, tl.load(counts + row) + 1)
    position = tl.load(positions + row) + 1
    tl.store(positions + row, tl.minimum(position, limit - 1))
