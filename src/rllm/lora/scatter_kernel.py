"""The kernel of `scatter`. Needs Triton, so it is imported where a CUDA tensor asks for it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scatter_kernel(
    table, scales, source, target, source_like, target_like,
    HAS_SOURCE: tl.constexpr, HAS_TARGET: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Matrix i: address (or offset in bytes) of source and target, elements, columns, strides of both."""
    matrix = tl.program_id(0)
    row = table + matrix * 8
    start, goal = tl.load(row), tl.load(row + 1)
    count, columns = tl.load(row + 2), tl.load(row + 3)
    a0, a1, b0, b1 = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    if HAS_SOURCE:
        start += source.to(tl.int64, bitcast=True)
    if HAS_TARGET:
        goal += target.to(tl.int64, bitcast=True)
    a = start.to(tl.pointer_type(source_like.dtype.element_ty))
    b = goal.to(tl.pointer_type(target_like.dtype.element_ty))
    scale = tl.load(scales + matrix)
    for first in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        item = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = item < count
        y, x = item // columns, item % columns
        value = tl.load(a + y * a0 + x * a1, mask=inside).to(tl.float32) * scale
        place = b + y * b0 + x * b1
        if ADD:
            value += tl.load(place, mask=inside).to(tl.float32)
        tl.store(place, value.to(target_like.dtype.element_ty), mask=inside)
