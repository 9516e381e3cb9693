"""What stands between the products of a layer, each as one step of autograd: as few passes over memory as torch alone allows.

Memory, not arithmetic, is what these cost, on CPU as much as the products around them. So forward and backward write in place where they
can and keep no more than their inputs. Knows tensors only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last axis (Zhang and Sennrich 2019), statistics in float32. `weight` [..., size] is as
    wide as some last axes of `x`."""
    if x.is_cuda:  # one fused kernel there; on CPU torch takes it apart, more slowly than this
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(weight.dtype) * weight
    if torch.is_grad_enabled():
        return RmsNorm.apply(x, weight, eps)
    return _scaled(x, _inverse_rms(x, eps), weight)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [N, size] of the two halves [N, 2 size] (Shazeer 2020)."""
    if torch.is_grad_enabled():
        return SwiGlu.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) in the half-split layout; x [N, heads, head_dim], cos and sin [N, 1, head_dim].

    The sign of the rotation is in `sin`, whose first half is negative (see `Decoder.rotary_tables`).
    """
    if torch.is_grad_enabled():
        return Rotate.apply(x, cos, sin)
    return _rotated(x, cos, sin)


class RmsNorm(torch.autograd.Function):
    """With ``r = 1 / sqrt(mean(x^2) + eps)`` and g the gradient of ``x r``: ``dx = r g - x r^3 mean(x g)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        r = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, r)
        return _scaled(x, r, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (x, weight, r) = grads, ctx.saved_tensors
        d_x = d_weight = None
        if ctx.needs_input_grad[1]:
            shares = (x.float() * r).to(weight.dtype).mul_(grad)
            d_weight = shares.reshape(-1, *weight.shape).sum(0, dtype=torch.float32).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            g = (grad * weight).float()
            h = x.float()
            slope = (g * h).sum(-1, keepdim=True).mul_(r.pow(3)).div_(-x.shape[-1])
            # A float32 product is this function's own; a narrower one was copied by float() and is too.
            d_x = g.mul_(r).addcmul_(h, slope).to(x.dtype)
        return d_x, d_weight, None


class SwiGlu(torch.autograd.Function):
    """Keeps `gate_up` only; the gradient of both halves is written into one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,), (gate_up,) = grads, ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        d_gate, d_up = result.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=d_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        return result


class Rotate(torch.autograd.Function):
    """A rotation's gradient is turned back: by `sin` of the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """[..., 1] in float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _scaled(x: Tensor, r: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * r).to(weight.dtype).mul_(weight)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    result = x * cos
    result[..., :half].addcmul_(x[..., half:], sin[..., :half])
    result[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return result
