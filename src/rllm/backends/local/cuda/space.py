"""Moves base weights into spaces of their own (`rllm.backends.local.space`) and writes the adapter in training around them."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from rllm.backends.local.model import BLOCKS, Decoder, FusedLinear, LowRank
from rllm.backends.local.space import Space
from rllm.lora.scatter import Scatter

ALIGNED = 64
"""Elements at whose multiples rows begin and tails end: 128 bytes in bfloat16."""
RANK_STEP = 8
"""Matrix units want inner sizes in multiples of 16 bytes."""
# Blocks whose input our own kernels write, so that `x A^T` can stand beside it; what enters `o` is written by a library.
SIDED = ("qkv", "gate_up", "down")


@torch.inference_mode(
    False
)  # the sampler's thread asks for it too, and training saves these weights for its backward pass
@torch.no_grad()
def lay_out(linear: FusedLinear, rank: int | None = None, side: int | None = None, tail: int | None = None) -> Space:
    """Move a weight into such a space; what is not given stays as it is. What stood around the weight is then 0."""
    old, (rows, columns) = linear.space, linear.weight.shape
    if old is not None:
        rank = old.rank if rank is None else rank
        side = old.side if side is None else side
        tail = len(old.sampled) - rows if tail is None else tail
    rank, side, tail = rank or 0, side or 0, tail or 0
    weight = linear.weight.data
    whole = weight
    if rank or side or tail:
        width = columns + side if not side else -(-(columns + side) // ALIGNED) * ALIGNED
        whole = torch.zeros(rank + rows + tail, width, dtype=weight.dtype, device=weight.device)
    space = Space(whole, rows, columns, rank, side)
    if whole is not weight:
        space.weight.copy_(weight)
        if weight.is_cuda:  # what still reads the old memory may run on another stream than who gets it next
            torch.cuda.synchronize(weight.device)
    linear.space = space
    linear.weight.data = space.weight
    return space


def padded_bias(linear: FusedLinear) -> Tensor | None:
    """The bias of `Space.sampled`: 0 below the weight's rows."""
    if linear.bias is None or linear.space is None:
        return linear.bias
    return F.pad(linear.bias.data, (0, len(linear.space.sampled) - len(linear.bias)))


def room_of(model: Decoder) -> TrainingRoom:
    """The one room of a model, whoever trains over it."""
    if not isinstance(model.room, TrainingRoom):
        model.room = TrainingRoom(model)
    return model.room


class TrainingRoom:
    """Holds the adapter in training around the base's weights, one at a time. See `room_of`."""

    def __init__(self, model: Decoder):
        self.model = model
        self._held: LowRank | None = None
        # Ranks of what was written last.
        self._around: Mapping[tuple[int, str], tuple[int, ...]] | None = None
        self._moves = model.moves
        # How each adapter is written; made for the weights where they were after so many moves.
        self._plans: WeakKeyDictionary[LowRank, tuple[int, Scatter]] = WeakKeyDictionary()

    def hold(self, pairs: LowRank) -> None:
        """The matrices of `pairs`, as they are now, become those around the weights."""
        self.reserve(pairs.ranks)
        if self._around is not None and self._around != pairs.ranks:
            self._clear()
        if self._held is not None:
            self._held.riding = False
        self._held, self._around, self._moves = pairs, pairs.ranks, self.model.moves
        pairs.riding = True
        plan = self._plans.get(pairs)
        if plan is None or plan[0] != self.model.moves:
            plan = self._plans[pairs] = (self.model.moves, self._plan(pairs))
        plan[1].run(source=pairs.flat)

    def holds(self, pairs: LowRank | None) -> bool:
        return pairs is not None and pairs is self._held and pairs.riding and self._moves == self.model.moves

    def reserve(self, ranks: Mapping[tuple[int, str], tuple[int, ...]]) -> None:
        """Room for these ranks around every weight; weights that have to move do so once."""
        moved = False
        for linear, key in _linears(self.model):
            wanted = -(-sum(ranks.get(key, ())) // RANK_STEP) * RANK_STEP
            has = linear.space.rank if linear.space is not None else 0
            if wanted > has:
                lay_out(linear, wanted, wanted if key[1] in SIDED else 0)
                moved = True
        if moved:
            self.model.moves += 1

    def _clear(self) -> None:
        for linear, _ in _linears(self.model):
            if linear.space is not None:
                linear.space.a.zero_()
                linear.space.b.zero_()

    def _plan(self, pairs: LowRank) -> Scatter:
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for linear, key in _linears(self.model):
            pair, space = pairs.pair(*key), linear.space
            if pair is None or space is None:
                continue
            a, b = pair
            sources.append(a)
            targets.append(space.a[: len(a)])
            if space.side:
                sources.append(b)
                targets.append(space.b[:, : b.shape[1]])
        return Scatter(sources, targets, source=pairs.flat)


def _linears(model: Decoder) -> list[tuple[FusedLinear, tuple[int, str]]]:
    return [(getattr(layer, block), (i, block)) for i, layer in enumerate(model.layers) for block in BLOCKS]
