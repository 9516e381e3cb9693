"""The trainable low-rank matrices over a decoder, and how they enter its fused products.

Knows shapes and names; nothing of files, losses or optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


Layout = Mapping[tuple[int, str], Sequence[tuple[str, int]]]
"""For (layer, fused block) the (module name, output rows) of the matrices stacked in it, in row order."""


class LowRankPairs:
    """Stacked (A, B) per (layer, block), ready for the decoder. What the sampler holds after a publish."""

    def __init__(self, pairs: dict[tuple[int, str], Pair]):
        self._pairs = pairs

    def pair(self, layer: int, block: str) -> Pair | None:
        return self._pairs.get((layer, block))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self._pairs.values())


class LoraAdapter(nn.Module):
    """``W + scale * B A`` for every module in `modules` (Hu et al. 2021, sec. 4.1), kept in float32.

    A [rank, in] starts Kaiming-uniform with a = sqrt(5), as PEFT does, from its own seeded generator; B [out, rank] starts at 0, so a
    fresh adapter changes nothing. ``scale = alpha / rank``.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        modules: Sequence[str],
        layout: Layout,
        *,
        rank: int,
        alpha: float,
        seed: int,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        self.rank, self.alpha, self.modules_adapted = rank, alpha, list(modules)
        chosen = set(modules)
        self.layout = {key: parts for key, parts in layout.items() if any(name in chosen for name, _ in parts)}
        generator = torch.Generator().manual_seed(seed)
        self.a = nn.ParameterDict()
        self.b = nn.ParameterDict()
        for name in modules:
            inputs, outputs = shapes[name]
            bound = 1.0 / math.sqrt(inputs)  # kaiming_uniform_(a=sqrt(5)) over fan_in
            a = (torch.rand(rank, inputs, generator=generator) * 2.0 - 1.0) * bound
            self.a[_key(name)] = nn.Parameter(a.to(device))
            self.b[_key(name)] = nn.Parameter(torch.zeros(outputs, rank, device=device))
        self.scales = {name: alpha / rank for name in modules}

    def matrices(self, name: str) -> Pair:
        """(A [rank, in], B [out, rank]) of one module, unscaled."""
        return self.a[_key(name)], self.b[_key(name)]

    def set_matrices(self, name: str, a: Tensor, b: Tensor, scale: float) -> None:
        """Replace one module's matrices (of any rank) and its scale, e.g. by those of a file."""
        device = self.a[_key(name)].device
        self.a[_key(name)] = nn.Parameter(a.float().to(device))
        self.b[_key(name)] = nn.Parameter(b.float().to(device))
        self.scales[name] = scale

    def pairs(self, dtype: torch.dtype) -> LowRankPairs:
        """Stacked pairs in `dtype`; gradients flow back to the float32 matrices."""
        return LowRankPairs({key: self._stack(parts, dtype) for key, parts in self.layout.items()})

    @torch.no_grad()
    def snapshot(self, dtype: torch.dtype) -> LowRankPairs:
        """The pairs as they are now, apart from the trained tensors: what is published."""
        return LowRankPairs(
            {
                key: (a.clone(), b.clone())
                for key, (a, b) in ((key, self._stack(parts, dtype)) for key, parts in self.layout.items())
            }
        )

    def _stack(self, parts: Sequence[tuple[str, int]], dtype: torch.dtype) -> Pair:
        """A of the block's matrices one above the other; B block-diagonal, the scale folded in."""
        present = [name for name, _ in parts if _key(name) in self.a]
        a = torch.cat([self.a[_key(name)] for name in present])
        blocks = [
            self.b[_key(name)] * self.scales[name] if _key(name) in self.b else a.new_zeros(rows, 0)
            for name, rows in parts
        ]
        return a.to(dtype), torch.block_diag(*blocks).to(dtype)

    def parameter_count(self) -> int:
        """``sum over modules of rank * (in + out)``."""
        return sum(parameter.numel() for parameter in self.parameters())


def _key(name: str) -> str:
    return name.replace(".", "/")  # torch allows no dots in parameter names
