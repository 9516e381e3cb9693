"""The packaged model in float64 by transformers, with low-rank updates written out: shares no code with what it checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Updated(nn.Module):
    """``W x + scale B (A x)``."""

    def __init__(self, linear: nn.Module, a: Tensor, b: Tensor, scale: float):
        super().__init__()
        self.linear, self.scale = linear, scale
        self.a, self.b = (nn.Parameter(matrix.detach().cpu().double().clone()) for matrix in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (x @ self.a.T @ self.b.T)


class Float64Model:
    """The model with the adapter that a training run has now. `matrices`: module -> (A, B)."""

    def __init__(self, run: Any, alpha: float = 32.0):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from rllm.backends.local.loading import DEFAULT_MODEL

        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float64)
        self.model.requires_grad_(False)
        self.matrices: dict[str, tuple[Tensor, Tensor]] = {}
        adapter = run.learner.adapters["run"]
        for name in adapter.modules_adapted:
            parent, _, leaf = name.rpartition(".")
            a, b = adapter.matrices(name)
            updated = Updated(self.model.get_submodule(name), a, b, alpha / a.shape[0])
            setattr(self.model.get_submodule(parent), leaf, updated)
            self.matrices[name] = (updated.a, updated.b)

    def logprobs(self, ids: list[int], targets: Tensor) -> Tensor:
        """Of `targets` [N] or [N, K], with gradient."""
        logits = self.model(torch.tensor([ids])).logits[0]
        wide = targets.reshape(len(ids), -1)
        return torch.log_softmax(logits, dim=-1).gather(1, wide).reshape(targets.shape)

    def gradient_gap(self, run: Any) -> float:
        """Norm of the difference to the run's gradients, as a share of their norm."""
        adapter = run.learner.adapters["run"]
        gaps, sizes = [], []
        for name, pair in self.matrices.items():
            for mine, theirs in zip(pair, adapter.matrices(name), strict=True):
                assert mine.grad is not None and theirs.grad is not None, name
                gaps.append((mine.grad - theirs.grad.cpu()).flatten())
                sizes.append(mine.grad.flatten())
        return float(torch.cat(gaps).norm() / torch.cat(sizes).norm())
