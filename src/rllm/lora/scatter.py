"""Many small matrices copied in one launch: adapters are hundreds of them, and a launch each would cost more than the copying.

On CUDA through a Triton kernel that reads a table of addresses; elsewhere one copy after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 1024
MAX_PROGRAMS = 32


class Scatter:
    """Copies ``sources[i] * scales[i]`` to (or, with `add`, onto) ``targets[i]``: 2-D, of equal shapes, any strides, one dtype a side.

    The tables hold addresses, so the tensors must stay where they are. `source` and `target` may name a flat tensor that the views on
    that side lie in; `run` then takes another one of the same layout in its place.
    """

    def __init__(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        scales: Sequence[float] | None = None,
        *,
        source: Tensor | None = None,
        target: Tensor | None = None,
        add: bool = False,
    ):
        self.sources, self.targets, self.add = list(sources), list(targets), add
        self.scales = list(scales) if scales is not None else [1.0] * len(self.sources)
        self.source, self.target = source, target
        self._tables: tuple[Tensor, Tensor] | None = None
        if self.sources and self.sources[0].is_cuda:
            rows = [
                [
                    a.data_ptr() - (source.data_ptr() if source is not None else 0),
                    b.data_ptr() - (target.data_ptr() if target is not None else 0),
                    a.shape[0] * a.shape[1], a.shape[1], *a.stride(), *b.stride(),
                ]
                for a, b in zip(self.sources, self.targets, strict=True)
            ]  # fmt: skip
            device = self.sources[0].device
            self._tables = torch.tensor(rows, device=device), torch.tensor(self.scales, device=device)

    def run(self, source: Tensor | None = None, target: Tensor | None = None) -> None:
        if self._tables is None:
            for a, b, scale in zip(self.sources, self.targets, self.scales, strict=True):
                a = a if source is None else source.as_strided(a.shape, a.stride(), a.storage_offset())
                b = b if target is None else target.as_strided(b.shape, b.stride(), b.storage_offset())
                b.add_(a, alpha=scale) if self.add else b.copy_(a * scale)
            return
        from rllm.lora.scatter_kernel import scatter_kernel

        table, scales = self._tables
        most = max(a.numel() for a in self.sources)
        kernel: Any = scatter_kernel
        kernel[(len(self.sources), min(MAX_PROGRAMS, -(-most // BLOCK)))](
            table, scales, (source if source is not None else self.source), (target if target is not None else self.target),
            self.sources[0], self.targets[0],
            HAS_SOURCE=self.source is not None, HAS_TARGET=self.target is not None, ADD=self.add, BLOCK=BLOCK,
        )  # fmt: skip
