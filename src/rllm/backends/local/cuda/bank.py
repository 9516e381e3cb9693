"""Every published adapter beside the base's weights, laid out for one product a block.

Knows the decoder and adapters' matrices; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rllm.backends.local.cuda.space import lay_out, padded_bias
from rllm.backends.local.model import BLOCKS, HEAD, Decoder, FloatLogits, FusedLinear, LowRank
from rllm.lora.scatter import Scatter

LEAST_RANK = 16
"""The least inner size of a matrix unit's product."""
ROW_STEP = 64
"""Weights' rows come in multiples of this, so that products stay well tiled."""
# Blocks whose B is met in a product of many rows at once, [adapters, out, rank]; the others are read row by row, [adapters, rank, out].
TILED = ("qkv", "gate_up")


@dataclass
class BlockBank:
    """One fused block of one layer: `weight` [out + tail, in], of which the first rows are the base's; B of every adapter."""

    weight: Tensor
    bias: Tensor | None
    b: Tensor
    rank: int


class AdapterBank:
    """A of every loaded adapter stands below the base's rows, in parts (q, k, v) of `rank` rows each; unused rows are 0."""

    def __init__(self, model: Decoder):
        self.model = model
        self.numbers: dict[str, int] = {}
        self.ranks: dict[str, int] = dict.fromkeys([*BLOCKS, "head"], 0)
        self.capacity = 0
        self.blocks: dict[tuple[int, str], BlockBank] = {}
        self.head: tuple[Tensor, Tensor] | None = None
        self._moves = model.moves
        # For every number the ranks it was written with, and how.
        self._plans: dict[int, tuple[Mapping[tuple[int, str], tuple[int, ...]], Scatter]] = {}
        self._lay_out(0, self.ranks)

    def number(self, name: str) -> int:
        """Which adapter a row names on the device; -1 is none."""
        return self.numbers.get(name, -1)

    def ensure(self, adapters: Mapping[str, LowRank | None], names: Iterable[str], in_use: Iterable[str]) -> bool:
        """Hold these adapters beside those in use; what is neither may go. Numbers of those in use stay. True if what graphs were
        captured over has moved."""
        missing = {name: p for name in names if name not in self.numbers and (p := adapters.get(name)) is not None}
        if not missing:
            return False
        kept = {*names, *in_use}
        self.numbers = {name: number for name, number in self.numbers.items() if name in kept}
        moved = self._reserve(len(self.numbers) + len(missing), missing.values(), adapters)
        free = iter(sorted(set(range(self.capacity)) - set(self.numbers.values())))
        for name, pairs in missing.items():
            self.numbers[name] = next(free)
            self._write(self.numbers[name], pairs)
        return moved

    def publish(self, adapters: Mapping[str, LowRank | None]) -> bool:
        """Every adapter held takes its new values; those no longer published go. True as for `ensure`."""
        held = {name: pairs for name in self.numbers if (pairs := adapters.get(name)) is not None}
        self.numbers = {name: number for name, number in self.numbers.items() if name in held}
        moved = self._reserve(len(held), held.values(), adapters)
        if not moved:  # else they were written just now
            for name, pairs in held.items():
                self._write(self.numbers[name], pairs)
        return moved

    def equals(self, name: str, pairs: LowRank) -> bool:
        """Whether what products read for an adapter is `pairs`, bit for bit; true of one that is not held."""
        number = self.numbers.get(name)
        if number is None:
            return True
        known = self._plans[number]
        read = torch.zeros_like(pairs.flat)
        plan = self._plan(number, pairs)
        Scatter(plan.targets, plan.sources, target=pairs.flat).run(target=read)
        return known[0] == pairs.ranks and torch.equal(read, pairs.flat)

    def _reserve(self, count: int, fresh: Iterable[LowRank], adapters: Mapping[str, LowRank | None]) -> bool:
        """Room for `count` adapters as large as the largest of `fresh`; those held are written again where it had to grow."""
        fresh = list(fresh)
        ranks = {block: self._rank_of(block, fresh) for block in self.ranks}
        fits = count <= self.capacity and all(ranks[block] <= self.ranks[block] for block in ranks)
        if fits and self._moves == self.model.moves:
            return False
        self._lay_out(max(count, self.capacity), {b: max(ranks[b], self.ranks[b]) for b in ranks})
        for name, number in self.numbers.items():
            pairs = adapters[name]
            assert pairs is not None
            self._write(number, pairs)
        return True

    def _rank_of(self, block: str, adapters: Iterable[LowRank]) -> int:
        """Rows that each part of a block needs for the largest of these adapters."""
        layers = [HEAD[0]] if block == "head" else range(self.model.config.n_layers)
        ranks = [rank for pairs in adapters for layer in layers for rank in _part_ranks(pairs, layer, block)]
        most = max(ranks, default=0)
        if block in TILED:
            return 0 if not most else max(LEAST_RANK, 1 << (most - 1).bit_length())
        return -(-most // 8) * 8

    @torch.inference_mode(False)  # the sampler's thread asks for it
    @torch.no_grad()
    def _lay_out(self, capacity: int, ranks: dict[str, int]) -> None:
        """Room below the weights for so many adapters of such ranks. The base's rows move, once, and stay one copy."""
        self.capacity, self.ranks = capacity, ranks
        self._plans.clear()
        config, device, dtype = self.model.config, self.model.device, self.model.dtype
        for i, layer in enumerate(self.model.layers):
            for block in BLOCKS:
                linear: FusedLinear = getattr(layer, block)
                rows = len(linear.weight)
                tail = capacity * len(BLOCKS[block]) * ranks[block]
                tail += -(rows + tail) % ROW_STEP if tail else 0
                held = 0 if linear.space is None else len(linear.space.sampled) - rows
                if tail != held:
                    lay_out(linear, tail=tail)
                    self.model.moves += 1
                weight = linear.weight.data if linear.space is None else linear.space.sampled
                shape = (capacity, rows, ranks[block]) if block in TILED else (capacity, ranks[block], rows)
                b = torch.zeros(shape, dtype=dtype, device=device)
                self.blocks[i, block] = BlockBank(weight, padded_bias(linear), b, ranks[block])
        self._moves = self.model.moves
        r, size = ranks["head"], (config.hidden_size, config.vocab_size)
        self.head = None
        if r and capacity:
            a = torch.zeros(capacity, r, size[0], dtype=dtype, device=device)
            self.head = (a, torch.zeros(capacity, size[1], r, dtype=dtype, device=device))

    def _write(self, number: int, pairs: LowRank) -> None:
        """The matrices of `pairs` become adapter `number`; one launch where it had the same ranks before."""
        known = self._plans.get(number)
        if known is None or known[0] != pairs.ranks:
            self._clear(number)
            known = self._plans[number] = (pairs.ranks, self._plan(number, pairs))
        known[1].run(source=pairs.flat)

    def _clear(self, number: int) -> None:
        for (_, block), bank in self.blocks.items():
            if bank.rank:
                first, rows = self._rows_of(bank, block, number)
                bank.weight[first : first + rows] = 0
                bank.b[number] = 0
        for matrices in self.head or ():
            matrices[number] = 0

    def _rows_of(self, bank: BlockBank, block: str, number: int) -> tuple[int, int]:
        """(first row of an adapter's A below a weight, rows)."""
        parts = len(BLOCKS[block])
        return sum(self.model.config.block_rows(block)) + number * parts * bank.rank, parts * bank.rank

    def _plan(self, number: int, pairs: LowRank) -> Scatter:
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for (layer, block), bank in self.blocks.items():
            pair = pairs.pair(layer, block)
            if pair is None:
                continue
            a, b = pair
            first, _ = self._rows_of(bank, block, number)
            column = row = 0
            rows_of = self.model.config.block_rows(block)
            for part, (rank, height) in enumerate(zip(_part_ranks(pairs, layer, block), rows_of, strict=True)):
                if rank:
                    start = first + part * bank.rank
                    sources += [a[column : column + rank], b[row : row + height, column : column + rank]]
                    here = bank.b[number]
                    own = here[row : row + height, :rank] if block in TILED else here[:rank, row : row + height].t()
                    targets += [bank.weight[start : start + rank], own]
                column, row = column + rank, row + height
        pair = pairs.pair(*HEAD)
        if self.head is not None and pair is not None:
            rank = len(pair[0])
            sources += [*pair]
            targets += [self.head[0][number, :rank], self.head[1][number, :, :rank]]
        return Scatter(sources, targets, source=pairs.flat)

    def add_head(self, logits: Tensor, hidden: Tensor, adapters: Tensor) -> Tensor:
        """Logits [n, vocab] with the output head's update of each row's adapter."""
        assert self.head is not None
        for number, (a, b) in enumerate(zip(*self.head, strict=True)):
            h = F.linear(hidden, a) * (adapters == number).unsqueeze(1)
            logits = logits + FloatLogits.apply(h, b)
        return logits


def _part_ranks(pairs: LowRank, layer: int, block: str) -> tuple[int, ...]:
    """Rank of each matrix stacked in a block; all 0 where it has no update."""
    parts = 1 if block == "head" else len(BLOCKS[block])
    pair = pairs.pair(layer, block)
    if pair is None:
        return (0,) * parts
    return pairs.part_ranks(layer, block)
