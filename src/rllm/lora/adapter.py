"""The trainable low-rank matrices over a decoder, and how they enter its fused products.

Knows shapes and names; nothing of files, losses or optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rllm.lora.match import by_pattern
from rllm.lora.scatter import Scatter

Pair = tuple[Tensor, Tensor]


Layout = Mapping[tuple[int, str], Sequence[tuple[str, int]]]
"""For (layer, fused block) the (module name, output rows) of the matrices stacked in it, in row order."""


def parts_of(
    pair: Pair, parts: Sequence[tuple[str, int]], ranks: Sequence[int]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(module name, A [rank, in], B [rows, rank]) of every matrix stacked in a block that has an update, as views of the block's pair."""
    a, b = pair
    row = column = 0
    for (name, height), rank in zip(parts, ranks, strict=True):
        if rank:
            yield name, a[column : column + rank], b[row : row + height, column : column + rank]
        row, column = row + height, column + rank


class LowRankPairs:
    """Stacked (A, B) per (layer, block), ready for the decoder. What the sampler holds after a publish.

    All of them are views of `flat`, laid out in the order of the adapter's blocks. `dropout`, in training only, is applied to the inputs
    of A. `sums`, in training only, are float32 tensors of the same layout that take the gradients.
    """

    def __init__(
        self,
        pairs: dict[tuple[int, str], Pair],
        ranks: Mapping[tuple[int, str], tuple[int, ...]],
        flat: Tensor,
        dropout: Callable[[Tensor], Tensor] | None = None,
        sums: dict[tuple[int, str], Pair] | None = None,
    ):
        self._pairs, self.ranks, self.flat, self.dropout, self._sums = pairs, ranks, flat, dropout, sums
        self.riding = False
        # Where gradients go past autograd, something must still ask it for a backward pass.
        self.anchor = torch.zeros((), device=flat.device, requires_grad=True) if sums is not None else None

    def pair(self, layer: int, block: str) -> Pair | None:
        return self._pairs.get((layer, block))

    def part_ranks(self, layer: int, block: str) -> tuple[int, ...]:
        """Rows of A that belong to each matrix stacked in the block; the matching columns of B are 0 outside its rows."""
        return self.ranks[layer, block]

    def sums(self, layer: int, block: str) -> Pair | None:
        """Where the gradients of the pair are added up; None where autograd does that."""
        return self._sums.get((layer, block)) if self._sums is not None else None

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def equals(self, other: LowRankPairs) -> bool:
        """Whether both hold the same numbers, bit for bit."""
        return self.ranks == other.ranks and torch.equal(self.flat, other.flat)


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
        # How the matrices go into a snapshot; made again when one of them is replaced.
        self._filling: tuple[torch.dtype, Scatter] | None = None
        self._accumulator: LowRankPairs | None = None
        self._sums = torch.empty(0)
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
        self._filling = self._accumulator = None

    def alpha_of(self, name: str) -> float:
        """The alpha that gives this module its scale."""
        rank = self.a[_key(name)].shape[0]
        return self.scales[name] * (math.sqrt(rank) if self.rslora else rank)

    def pairs(self, dtype: torch.dtype, training: bool = False) -> LowRankPairs:
        """Stacked pairs in `dtype`; gradients flow back to the float32 matrices. `training` True drops inputs, if any are to be."""
        pairs = {key: self._stack(parts, dtype) for key, parts in self.layout.items()}
        flat = torch.cat([matrix.detach().reshape(-1) for pair in pairs.values() for matrix in pair])
        return LowRankPairs(pairs, self.part_ranks(), flat, self._drop if training and self.dropout else None)

    @torch.no_grad()
    def snapshot(self, dtype: torch.dtype) -> LowRankPairs:
        """The pairs as they are now, apart from the trained tensors: what is published."""
        ranks = self.part_ranks()
        flat = torch.zeros(self._size(ranks), dtype=dtype, device=self._device)
        self._fill(flat)
        return LowRankPairs(self._views(flat, ranks), ranks, flat)

    def accumulating(self, dtype: torch.dtype) -> tuple[LowRankPairs, Callable[[], None]]:
        """Pairs to train on in several backward passes, which add their gradients to `sums` in float32, and what to call after the
        last: it adds the sums to the gradients of the matrices. The pairs stay where they are from call to call; each starts anew."""
        pairs, sums = self.current(dtype), self._sums
        sums.zero_()

        @torch.no_grad()
        def finish() -> None:
            matrices, pieces, scales = self._matched(self._views(sums, pairs.ranks), pairs.ranks)
            gradients = []
            for matrix in matrices:
                if matrix.grad is None:
                    matrix.grad = torch.zeros_like(matrix)
                gradients.append(matrix.grad)
            Scatter(pieces, gradients, scales, add=True).run()

        return pairs, finish

    def current(self, dtype: torch.dtype) -> LowRankPairs:
        """The pairs of `accumulating` as the matrices are now, the sums left alone."""
        if self._accumulator is None or self._accumulator.flat.dtype is not dtype:
            ranks = self.part_ranks()
            flat = torch.zeros(self._size(ranks), dtype=dtype, device=self._device)
            self._sums = torch.zeros(flat.shape, device=self._device)
            self._accumulator = LowRankPairs(
                self._views(flat, ranks), ranks, flat, None, self._views(self._sums, ranks)
            )
        self._fill(self._accumulator.flat)
        self._accumulator.riding = False  # what stands around the weights may be older
        return self._accumulator

    @torch.no_grad()
    def _fill(self, flat: Tensor) -> None:
        """Write the matrices, scales folded in, to their places in `flat`."""
        ranks = self.part_ranks()
        if self._filling is None or self._filling[0] is not flat.dtype:
            scatter = Scatter(*self._matched(self._views(flat, ranks), ranks), target=flat)
            self._filling = (flat.dtype, scatter)
        self._filling[1].run(target=flat)

    def part_ranks(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """For every (layer, block) the rank of each matrix in it, 0 where it has no update."""
        return {
            key: tuple(self.a[_key(name)].shape[0] if _key(name) in self.a else 0 for name, _ in parts)
            for key, parts in self.layout.items()
        }

    @property
    def _device(self) -> torch.device:
        return next(iter(self.a.values())).device

    def _inputs(self, key: tuple[int, str]) -> int:
        return next(self.a[_key(name)].shape[1] for name, _ in self.layout[key] if _key(name) in self.a)

    def _size(self, ranks: Mapping[tuple[int, str], tuple[int, ...]]) -> int:
        return sum(
            sum(ranks[key]) * (self._inputs(key) + sum(rows for _, rows in parts)) for key, parts in self.layout.items()
        )

    def _views(self, flat: Tensor, ranks: Mapping[tuple[int, str], tuple[int, ...]]) -> dict[tuple[int, str], Pair]:
        """(A [R, in], B [rows, R]) of every block as views of `flat`."""
        views: dict[tuple[int, str], Pair] = {}
        place = 0
        for key, parts in self.layout.items():
            rank, inputs, rows = sum(ranks[key]), self._inputs(key), sum(height for _, height in parts)
            a = flat[place : place + rank * inputs].view(rank, inputs)
            place += a.numel()
            b = flat[place : place + rows * rank].view(rows, rank)
            place += b.numel()
            views[key] = (a, b)
        return views

    def _matched(
        self, views: Mapping[tuple[int, str], Pair], ranks: Mapping[tuple[int, str], tuple[int, ...]]
    ) -> tuple[list[Tensor], list[Tensor], list[float]]:
        """(the adapter's matrices, where each stands in `views`, what it is scaled by there)."""
        matrices: list[Tensor] = []
        pieces: list[Tensor] = []
        scales: list[float] = []
        for key, parts in self.layout.items():
            for name, a, b in parts_of(views[key], parts, ranks[key]):
                matrices += self.matrices(name)
                pieces += [a, b]
                scales += [1.0, self.scales[name]]
        return matrices, pieces, scales

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


def _key(name: str) -> str:
    return name.replace(".", "/")  # torch allows no dots in parameter names
