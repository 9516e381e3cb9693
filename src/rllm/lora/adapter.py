"""The trainable low-rank matrices over a decoder, and how they enter its fused products.

Knows shapes and names; nothing of files, losses or optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rllm.lora.match import by_pattern

Pair = tuple[Tensor, Tensor]


Layout = Mapping[tuple[int, str], Sequence[tuple[str, int]]]
"""For (layer, fused block) the (module name, output rows) of the matrices stacked in it, in row order."""


class LowRankPairs:
    """Stacked (A, B) per (layer, block), ready for the decoder. What the sampler holds after a publish.

    `dropout`, in training only, is applied to the inputs of A.
    """

    def __init__(
        self,
        pairs: dict[tuple[int, str], Pair],
        ranks: Mapping[tuple[int, str], tuple[int, ...]],
        dropout: Callable[[Tensor], Tensor] | None = None,
    ):
        self._pairs, self._ranks, self.dropout = pairs, ranks, dropout

    def pair(self, layer: int, block: str) -> Pair | None:
        return self._pairs.get((layer, block))

    def part_ranks(self, layer: int, block: str) -> tuple[int, ...]:
        """Rows of A that belong to each matrix stacked in the block; the matching columns of B are 0 outside its rows."""
        return self._ranks[layer, block]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self._pairs.values())

    def equals(self, other: LowRankPairs) -> bool:
        """Whether both hold the same numbers, bit for bit."""
        return self._pairs.keys() == other._pairs.keys() and all(
            torch.equal(mine, theirs)
            for key in self._pairs
            for mine, theirs in zip(self._pairs[key], other._pairs[key], strict=True)
        )


class LoraAdapter(nn.Module):
    """``W + scale * B A`` for every module in `modules` (Hu et al. 2021, sec. 4.1), kept in float32.

    A [rank, in] starts Kaiming-uniform with a = sqrt(5), as PEFT does, from its own seeded generator; B [out, rank] starts at 0, so a
    fresh adapter changes nothing. ``scale = alpha / rank``, or ``alpha / sqrt(rank)`` with `rslora` (Kalajdzievski 2023).
    `rank_pattern` and `alpha_pattern` give some modules a rank or alpha of their own. `dropout` is the share of inputs dropped in
    training; the matrices that share an input share the mask.
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
        rank_pattern: Mapping[str, int] | None = None,
        alpha_pattern: Mapping[str, float] | None = None,
        rslora: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.rank, self.alpha, self.rslora, self.modules_adapted = rank, alpha, rslora, list(modules)
        self.dropout = dropout
        chosen = set(modules)
        self.layout = {key: parts for key, parts in layout.items() if any(name in chosen for name, _ in parts)}
        generator = torch.Generator().manual_seed(seed)
        self._dropout_generator = torch.Generator(device).manual_seed(seed)
        self.a = nn.ParameterDict()
        self.b = nn.ParameterDict()
        self.scales: dict[str, float] = {}
        for name in modules:
            inputs, outputs = shapes[name]
            own = by_pattern(rank_pattern or {}, name, rank)
            bound = 1.0 / math.sqrt(inputs)  # kaiming_uniform_(a=sqrt(5)) over fan_in
            a = (torch.rand(own, inputs, generator=generator) * 2.0 - 1.0) * bound
            self.a[_key(name)] = nn.Parameter(a.to(device))
            self.b[_key(name)] = nn.Parameter(torch.zeros(outputs, own, device=device))
            self.scales[name] = by_pattern(alpha_pattern or {}, name, alpha) / (math.sqrt(own) if rslora else own)

    def matrices(self, name: str) -> Pair:
        """(A [rank, in], B [out, rank]) of one module, unscaled."""
        return self.a[_key(name)], self.b[_key(name)]

    def set_matrices(self, name: str, a: Tensor, b: Tensor, scale: float) -> None:
        """Replace one module's matrices (of any rank) and its scale, e.g. by those of a file."""
        device = self.a[_key(name)].device
        self.a[_key(name)] = nn.Parameter(a.float().to(device))
        self.b[_key(name)] = nn.Parameter(b.float().to(device))
        self.scales[name] = scale

    def alpha_of(self, name: str) -> float:
        """The alpha that gives this module its scale."""
        rank = self.a[_key(name)].shape[0]
        return self.scales[name] * (math.sqrt(rank) if self.rslora else rank)

    def pairs(self, dtype: torch.dtype, training: bool = False) -> LowRankPairs:
        """Stacked pairs in `dtype`; gradients flow back to the float32 matrices. `training` True drops inputs, if any are to be."""
        pairs = {key: self._stack(parts, dtype) for key, parts in self.layout.items()}
        return LowRankPairs(pairs, self._part_ranks(), self._drop if training and self.dropout else None)

    def leaves(self, dtype: torch.dtype) -> tuple[LowRankPairs, Callable[[], None]]:
        """Pairs to train on in several backward passes, and what to call after them: it adds their gradients, summed in float32, to
        those of the matrices. Stacking is then done once, not in each pass."""
        with torch.no_grad():
            stacked = {key: self._stack(parts, dtype) for key, parts in self.layout.items()}
        leaves = {key: (a.requires_grad_(), b.requires_grad_()) for key, (a, b) in stacked.items()}
        sums: dict[Tensor, Tensor] = {}

        def add(leaf: Tensor) -> None:
            assert leaf.grad is not None
            if leaf in sums:
                sums[leaf] += leaf.grad
            else:
                sums[leaf] = leaf.grad.float()
            leaf.grad = None

        for pair in leaves.values():
            for leaf in pair:
                leaf.register_post_accumulate_grad_hook(add)

        @torch.no_grad()
        def finish() -> None:
            for key, parts in self.layout.items():
                a, b = (sums.get(leaf) for leaf in leaves[key])
                row = column = 0
                for name, height in parts:
                    if _key(name) in self.a:
                        mine_a, mine_b = self.matrices(name)
                        rank = mine_a.shape[0]
                        if a is not None and b is not None:
                            _add_gradient(mine_a, a[column : column + rank])
                            _add_gradient(mine_b, b[row : row + height, column : column + rank] * self.scales[name])
                        column += rank
                    row += height

        return LowRankPairs(leaves, self._part_ranks(), self._drop if self.dropout else None), finish

    @torch.no_grad()
    def snapshot(self, dtype: torch.dtype) -> LowRankPairs:
        """The pairs as they are now, apart from the trained tensors: what is published."""
        return LowRankPairs(
            {
                key: (a.clone(), b.clone())
                for key, (a, b) in ((key, self._stack(parts, dtype)) for key, parts in self.layout.items())
            },
            self._part_ranks(),
        )

    def _part_ranks(self) -> dict[tuple[int, str], tuple[int, ...]]:
        return {
            key: tuple(self.a[_key(name)].shape[0] if _key(name) in self.a else 0 for name, _ in parts)
            for key, parts in self.layout.items()
        }

    def _stack(self, parts: Sequence[tuple[str, int]], dtype: torch.dtype) -> Pair:
        """A of the block's matrices one above the other; B block-diagonal, the scale folded in."""
        present = [name for name, _ in parts if _key(name) in self.a]
        a = torch.cat([self.a[_key(name)] for name in present])
        blocks = [
            self.b[_key(name)] * self.scales[name] if _key(name) in self.b else a.new_zeros(rows, 0)
            for name, rows in parts
        ]
        return a.to(dtype), torch.block_diag(*blocks).to(dtype)

    def _drop(self, x: Tensor) -> Tensor:
        """Inverted dropout from the adapter's own generator, so that a run can be repeated."""
        kept = torch.rand(x.shape, generator=self._dropout_generator, device=x.device) >= self.dropout
        return x * kept.to(x.dtype).mul_(1.0 / (1.0 - self.dropout))

    def parameter_count(self) -> int:
        """``sum over modules of rank * (in + out)``."""
        return sum(parameter.numel() for parameter in self.parameters())


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad += gradient


def _key(name: str) -> str:
    return name.replace(".", "/")  # torch allows no dots in parameter names
