"""The layers of a micro-batch as two captured graphs, one forward and one backward.

A micro-batch is a thousand kernels, and a host that queues them one by one takes longer than the device that runs them. Shapes in a
graph are fixed, so ragged micro-batches are filled up with tokens that no loss looks at.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rllm.backends.local.cuda.capture import capture
from rllm.backends.local.cuda.train import Sums, fused_layers, layer_backward, layer_forward
from rllm.backends.local.model import Above, Decoder, DecoderLayer, LowRank, PackedCausal
from rllm.backends.local.transfer import to_device

TOKEN_STEP = 512
LEAST_LENGTH, LEAST_SEQUENCES, LEAST_GROUPS = 256, 8, 4
MOST_GRAPHS = 24


class Shape(NamedTuple):
    """Of a captured pass. `groups`: most ranges of tokens that see others above, 0 for none."""

    tokens: int
    sequences: int
    longest: int
    ragged: bool
    groups: int = 0


@dataclass
class FixedLayout:
    """A packed layout of a fixed shape, as attention and rotation read it; where it lies stays the same, what it says changes."""

    positions: Tensor
    bounds: Tensor
    longest: int
    n: int
    ragged: bool
    above: Above | None = None

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> FixedLayout:
        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        above = None
        if shape.groups:
            bounds = (zeros(shape.groups + 1), zeros(shape.groups + 1))
            # Bounds so high start some programs that end at once.
            above = Above(*bounds, shape.tokens, shape.tokens)
        bounds = zeros(shape.sequences + 1)
        return cls(zeros(shape.tokens), bounds, shape.longest, shape.sequences, shape.ragged, above)

    def load(self, layout: PackedCausal) -> None:
        """Take over a layout; the tokens left over are sequences of their own, none longer than the longest may be."""
        n = len(layout.positions)
        self.positions[:n].copy_(layout.positions)
        self.bounds[: layout.n + 1].copy_(layout.bounds)
        rest = len(self.bounds) - layout.n - 1
        if rest:
            ends = [min(n + self.longest * (i + 1), len(self.positions)) for i in range(rest)]
            self.bounds[layout.n + 1 :].copy_(to_device(ends, self.bounds.device, torch.int32))
        if self.above is not None and layout.above is not None:
            for mine, theirs in ((self.above.queries, layout.above.queries), (self.above.keys, layout.above.keys)):
                mine[: len(theirs)].copy_(theirs)
                mine[len(theirs) :] = theirs[-1]

    def note(self, layer: int, k: Tensor, v: Tensor) -> None:
        """As `PackedCausal.note`; nobody reads keys and values of a training pass."""


def shape_of(layout: PackedCausal) -> Shape:
    """The shape of the graph that a micro-batch runs in."""
    tokens = len(layout.positions)
    if not layout.ragged:
        return Shape(tokens, layout.n, layout.longest, False)
    # Few shapes: capturing one costs as much as some runs. A bound that is too high costs attention next to nothing.
    padded, longest = -(-tokens // TOKEN_STEP) * TOKEN_STEP, max(LEAST_LENGTH, _power_of_two(layout.longest))
    sequences = layout.n + -(-(padded - tokens) // longest)
    groups = max(LEAST_GROUPS, _power_of_two(len(layout.above.keys) - 1)) if layout.above is not None else 0
    return Shape(padded, max(LEAST_SEQUENCES, _power_of_two(sequences)), longest, True, groups)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class LayerGraphs:
    """Runs a model's layers on micro-batches in training; a shape seen for the second time is captured, those used least go."""

    def __init__(self, model: Decoder):
        self.model = model
        self._graphs: OrderedDict[Any, CapturedLayers] = OrderedDict()
        self._seen: Counter[Any] = Counter()
        self._memory: Any = None
        self._moves = model.moves
        # What enters the layers, and what leaves them or its gradient; graphs of all shapes read and write there.
        self._buffers = torch.empty(2, 0, model.config.hidden_size, device=model.device)

    def __call__(
        self, ids: Tensor, layout: PackedCausal, lora: LowRank | None, weights: Sums | None, rows: Tensor
    ) -> Tensor:
        """The residual after the last layer at tokens `rows` [M, hidden], in float32. Gradients go to the sums of `lora`, or to
        `weights` and autograd's of the embeddings."""
        x = F.embedding(ids, self.model.embed)
        captured = self._captured(layout, lora, weights)
        if captured is None:
            return fused_layers(self.model, x, layout, lora, weights).index_select(0, rows)
        if not torch.is_grad_enabled():
            captured.load(x, layout)
            return captured.forward().index_select(0, rows)
        return _Replay.apply(x, captured, layout, rows, lora.anchor if lora is not None else None)

    def _captured(self, layout: PackedCausal, lora: LowRank | None, weights: Sums | None) -> CapturedLayers | None:
        if self._moves != self.model.moves:
            self._graphs.clear()
            self._seen.clear()
            self._memory, self._moves = None, self.model.moves
        key = (shape_of(layout), id(lora), lora is not None and lora.riding, True)
        if not torch.is_grad_enabled() and key not in self._graphs:
            key = (*key[:3], False)
        if key not in self._graphs:
            self._seen[key] += 1
            if self._seen[key] < 2:
                return None
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.popitem(last=False)
            if self._buffers.shape[1] < key[0][0]:
                self._buffers = self._buffers.new_zeros(2, key[0][0], self._buffers.shape[2])
            buffers = self._buffers[:, : key[0][0]]
            self._graphs[key] = CapturedLayers(self.model, buffers, key[0], lora, weights, self._memory, key[3])
            self._memory = self._graphs[key].memory
        self._graphs.move_to_end(key)
        return self._graphs[key]


class CapturedLayers:
    """Forward and, if `both`, backward of all layers at one shape. They share their memory with those of other shapes: a backward pass must follow
    its forward pass before another one is run."""

    def __init__(
        self, model: Decoder, buffers: Tensor, shape: Shape, lora: LowRank | None, weights: Sums | None, memory: Any,
        both: bool = True,
    ):  # fmt: skip
        """`buffers` [2, N, hidden], float32: for what enters; for what leaves and then its gradient."""
        # Graphs hold addresses; what lies there must live as long: the adapter and its sums, and the weights' memory.
        self.model, self.lora, self.weights, self.both = model, lora, weights, both
        self._held = [parameter.data for parameter in model.parameters()]
        self.layout = FixedLayout.of(shape, model.device)
        self.x, self.last = buffers
        self.layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        self.tables = model.rotary_tables()
        self._kept: list[list[Any]] = []
        self.d_x = self.x
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.memory = memory
        if model.device.type == "cuda":
            self._capture()

    @torch.no_grad()
    def _capture(self) -> None:
        self.layout.bounds[1:] = len(self.x)  # any valid layout will do
        passes = (self._forward, self._backward)[: 1 + self.both]
        self._graphs, _, self.memory = capture(passes, self.memory)

    def load(self, x: Tensor, layout: PackedCausal) -> None:
        self.x[: len(x)].copy_(x)
        self.layout.load(layout)

    def forward(self) -> Tensor:
        """The residual after the last layer, of what `x` and `layout` hold, in `last`."""
        self._graphs[0].replay() if self._graphs else self._forward()
        return self.last

    def backward(self) -> Tensor:
        """The gradient of `x` from what `last` now holds as that of the result; meaningful where weights are trained."""
        self._graphs[1].replay() if self._graphs else self._backward()
        return self.d_x

    def _forward(self) -> None:
        x = self.x
        for layer in self.layers:
            x, kept = layer_forward(layer, x, self.tables, self.layout, self.lora)  # type: ignore[arg-type]
            if self.both:
                self._kept.append(kept)
            del kept
        self.last.copy_(x)

    def _backward(self) -> None:
        grad: Tensor | None = self.last
        for layer in reversed(self.layers):
            assert grad is not None
            grad, _ = layer_backward(
                layer,
                grad,
                self._kept.pop(),
                self.tables,
                self.layout,
                self.lora,
                self.weights,
                layer.index > 0,  # type: ignore[arg-type]
            )
        if grad is not None and self.weights is not None:
            self.d_x = grad


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, captured: CapturedLayers, layout: PackedCausal, rows: Tensor, anchor: Tensor | None
    ) -> Tensor:
        ctx.captured, ctx.n = captured, len(x)
        ctx.save_for_backward(rows)
        captured.load(x, layout)
        return captured.forward().index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        captured: CapturedLayers = ctx.captured
        (rows,) = ctx.saved_tensors
        captured.last.zero_().index_add_(0, rows, grads[0])  # the end of a shared prompt comes several times
        d_x = captured.backward()[: ctx.n]
        return (d_x.clone() if ctx.needs_input_grad[0] else None, None, None, None, None)
