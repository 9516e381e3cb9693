"""The frozen base in 4 bits (QLoRA, Dettmers et al. 2023): the decoder's matrices as NF4 codes, made whole again for each product.

Knows one matrix at a time; nothing of attention, sampling or files.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rllm.backends.local.model import BLOCKS, Decoder, Dropout, FusedLinear

# Values that share a scale; the scales are themselves kept in 8 bits (double quantisation, sec. 3 of the paper).
BLOCK_SIZE = 64


def quantize_decoder(model: Decoder, device: torch.device) -> None:
    """Put `model` on `device` with every fused matrix of its layers in 4 bits; embeddings, norms, biases and output head stay as they
    are. One matrix at a time crosses over, so the device never holds the whole base."""
    for layer in model.layers:
        for block in BLOCKS:
            setattr(layer, block, Nf4Linear(getattr(layer, block), device))
    model.to(device)
    model.fused = False  # the kernels read dense matrices


class Nf4Linear(nn.Module):
    """A frozen `FusedLinear` whose weight [rows, columns] is kept as NF4 codes: ``y = x W^T + b + (x A^T) B^T`` with W dequantised."""

    def __init__(self, dense: FusedLinear, device: torch.device):
        super().__init__()
        # Codes run over the flat matrix, so shapes whose rows are no multiple of the block size do as well.
        self.shape, self.dtype = dense.weight.shape, dense.weight.dtype
        flat = dense.weight.detach().reshape(1, -1).to(device)
        codes, state = _bitsandbytes().quantize_4bit(
            flat, blocksize=BLOCK_SIZE, compress_statistics=True, quant_type="nf4"
        )
        self._state = state
        # As buffers they count in the fingerprint and the memory of the model. A row of codes is a row of the matrix where that comes out.
        self.register_buffer("codes", codes.view(self.shape[0] if self.shape[1] % 2 == 0 else 1, -1))
        for name, tensor in _scales_of(state).items():
            self.register_buffer(name, tensor.view(1, -1))
        self.bias = None if dense.bias is None else nn.Parameter(dense.bias.detach().to(device), requires_grad=False)

    codes: Tensor

    def dequantized(self) -> Tensor:
        """The weight [rows, columns] in the dtype it was quantised from, made anew at every call."""
        return _bitsandbytes().dequantize_4bit(self.codes.view(-1, 1), self._state).view(self.shape).to(self.dtype)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor] | None = None, dropout: Dropout | None = None) -> Tensor:
        if dropout is not None and pair is not None:
            return _FrozenProduct.apply(x, self, None, None) + F.linear(F.linear(dropout(x), pair[0]), pair[1])
        return _FrozenProduct.apply(x, self, *(pair or (None, None)))


class _FrozenProduct(torch.autograd.Function):
    """``x W^T + b + (x A^T) B^T``. The dequantised W lives during the product only; the backward pass makes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Nf4Linear, a: Tensor | None, b: Tensor | None) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x if a is not None else None, a, b)
        y = F.linear(x, linear.dequantized(), linear.bias)
        return y if a is None or b is None else y.addmm_(F.linear(x, a), b.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, a, b = ctx.saved_tensors
        grad_x = grad @ ctx.linear.dequantized() if ctx.needs_input_grad[0] else None
        if a is None:
            return grad_x, None, None, None
        grad_h = grad @ b
        if grad_x is not None:
            grad_x.addmm_(grad_h, a)
        return grad_x, None, grad_h.t() @ x, grad.t() @ F.linear(x, a)


def _scales_of(state: Any) -> dict[str, Tensor]:
    """What a quantisation state holds beside the codes: scales of the blocks, and scales and offset of those scales."""
    scales = {"absmax": state.absmax}
    if state.nested:
        scales |= {"absmax_absmax": state.state2.absmax, "absmax_offset": state.offset}
    return scales


def _bitsandbytes() -> Any:
    """`quantize_4bit` and `dequantize_4bit`, imported when the first matrix is quantised."""
    return importlib.import_module("bitsandbytes.functional")
