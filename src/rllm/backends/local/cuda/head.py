"""The output head in training: log-probabilities of the targets and entropies, never keeping the logits."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from rllm.backends.local.cuda import train_kernels as kernels
from rllm.backends.local.model import Decoder, FloatLogits

LOGPROB_BLOCK = 8192
# Rows of logits held at once; with 151,936 ids 1024 rows are 620 MB in float32.
HEAD_ROWS = 1024


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
