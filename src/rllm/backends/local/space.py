"""What lies around a base weight in memory, so that low-rank terms are part of the product with it.

The weight's rows come after the A of the adapter in training and before the A of the adapters being sampled; its columns come before
the B of the adapter in training. One copy of the weight serves every product:

    wide  [rows, columns + side]    [x, x A^T] -> x W^T + (x A^T) B^T         forward pass
    tall  [rank + rows, columns]    [g B, g]   -> g W + (g B) A               backward pass
    sampled [rows + tail, columns]  x -> x W^T beside x A^T of every adapter  sampling
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Space:
    """`whole` [rank + rows + tail, columns + side, padded]; see the module."""

    whole: Tensor
    rows: int
    columns: int
    rank: int
    side: int

    @property
    def a(self) -> Tensor:
        return self.whole[: self.rank, : self.columns]

    @property
    def b(self) -> Tensor:
        """[rows, side]; of no columns where there is nothing beside the weight."""
        return self.whole[self.rank : self.rank + self.rows, self.columns : self.columns + self.side]

    @property
    def weight(self) -> Tensor:
        return self.whole[self.rank : self.rank + self.rows, : self.columns]

    @property
    def wide(self) -> Tensor:
        return self.whole[self.rank : self.rank + self.rows, : self.columns + self.side]

    @property
    def tall(self) -> Tensor:
        return self.whole[: self.rank + self.rows, : self.columns]

    @property
    def sampled(self) -> Tensor:
        return self.whole[self.rank :, : self.columns]
