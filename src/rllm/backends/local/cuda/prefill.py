"""Prompts read on CUDA: packed, of any mix of adapters, keys and values into pages, as captured graphs for a few sizes.

Between two decoding steps a prompt is often a few hundred tokens, for which queueing kernels takes longer than running them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rllm.backends.local.cuda.bank import AdapterBank
from rllm.backends.local.cuda.blocks import BankedLayers
from rllm.backends.local.cuda.capture import SAMPLING, capture
from rllm.backends.local.cuda.graphs import FixedLayout, Shape
from rllm.backends.local.cuda.pages import PAGE, PagePool
from rllm.backends.local.cuda.train import attention
from rllm.backends.local.model import Decoder, PackedCausal
from rllm.backends.local.transfer import to_device

MOST_GRAPHS = 32
# More tokens than this are enough work for the device to hide the queueing of kernels, and come in too many sizes.
MOST_TOKENS = 8192


@dataclass
class _Inputs:
    """Of every token: id, adapter's number, page; and how they see each other."""

    ids: Tensor
    adapters: Tensor
    pages: Tensor
    layout: FixedLayout


class Prefill:
    """Reads prompts into pages."""

    def __init__(self, model: Decoder, bank: AdapterBank, pool: PagePool):
        self.model = model
        self._layers = BankedLayers(model, bank, pool)
        self._graphs: OrderedDict[tuple[int, int, int], tuple[torch.cuda.CUDAGraph, _Inputs, Tensor]] = OrderedDict()
        self._memory = None

    def forget_graphs(self) -> None:
        self._graphs.clear()
        self._memory = None

    def run(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int], pages: Sequence[Sequence[int]]) -> Tensor:
        """Logits [prompts, vocab] after the last token of each; `adapters` are numbers of the bank, `pages` those to fill."""
        device, lengths = self.model.device, [len(prompt) for prompt in prompts]
        layout = PackedCausal(lengths, device)
        table = torch.zeros(len(pages), max(map(len, pages)), dtype=torch.int32)
        for i, row in enumerate(pages):
            table[i, : len(row)] = torch.tensor(row)
        counts = torch.tensor(lengths)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        places = torch.cat([torch.arange(length) for length in lengths]) // PAGE
        numbers = torch.tensor(list(adapters), dtype=torch.int32)
        values = (
            torch.tensor([token for prompt in prompts for token in prompt]),
            numbers[rows],
            table[rows, places],
        )
        hidden = self._hidden(values, layout)
        return self._layers.logits(hidden.index_select(0, layout.last), to_device(numbers, device))

    def _hidden(self, values: tuple[Tensor, Tensor, Tensor], layout: PackedCausal) -> Tensor:
        shape = _shape(layout)
        n = len(values[0])
        if n > MOST_TOKENS or self.model.device.type != "cuda":
            inputs = self._empty((n, layout.n, layout.longest))
            self._load(inputs, values, layout)
            return self._forward(inputs)
        if shape not in self._graphs:
            self._capture(shape)
        self._graphs.move_to_end(shape)
        graph, inputs, hidden = self._graphs[shape]
        self._load(inputs, values, layout)
        graph.replay()
        return hidden

    def _empty(self, shape: tuple[int, int, int]) -> _Inputs:
        n, device = shape[0], self.model.device
        return _Inputs(
            torch.zeros(n, dtype=torch.int64, device=device),
            torch.full((n,), -1, dtype=torch.int32, device=device),
            torch.zeros(n, dtype=torch.int32, device=device),
            FixedLayout.of(Shape(*shape, True), device),
        )

    def _load(self, inputs: _Inputs, values: tuple[Tensor, Tensor, Tensor], layout: PackedCausal) -> None:
        """Tokens left over belong to no adapter and go to the spare page."""
        n, device = len(values[0]), self.model.device
        for target, source, rest in zip((inputs.ids, inputs.adapters, inputs.pages), values, (0, -1, 0), strict=True):
            target[:n].copy_(to_device(source, device))
            target[n:] = rest
        inputs.layout.load(layout)

    def _forward(self, inputs: _Inputs) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            assert k is not None and v is not None
            return attention(q, k, v, inputs.layout)[0]

        return self._layers.run(
            inputs.ids, inputs.layout.positions, inputs.adapters, inputs.pages, attend, prompts=True
        )

    def _capture(self, shape: tuple[int, int, int]) -> None:
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        inputs = self._empty(shape)
        inputs.layout.bounds[1:] = shape[0]  # any valid layout will do
        # In the run before, only the spare page is written.
        read = partial(self._forward, inputs)
        graphs, hidden, self._memory = capture([read], self._memory, warm_up=True, priority=SAMPLING)
        self._graphs[shape] = (graphs[0], inputs, hidden[0])


def _shape(layout: PackedCausal) -> tuple[int, int, int]:
    """(tokens, sequences, longest sequence) of the graph that takes these prompts: few shapes, little waste."""
    n = len(layout.positions)
    step = 64 if n <= 512 else 256 if n <= 2048 else 1024
    tokens, longest = -(-n // step) * step, max(64, 1 << (layout.longest - 1).bit_length())
    sequences = layout.n + -(-(tokens - n) // longest)
    return tokens, max(8, 1 << (sequences - 1).bit_length()), longest
