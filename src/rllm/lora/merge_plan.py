"""What becomes of every tensor when an adapter is merged: which tensor of the base it comes from, and what is added to it.

Knows names, shapes and the sum; reads one tensor at a time and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from rllm.errors import ModelError
from rllm.lora.checkpoint import TensorPlace

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Update = tuple[Tensor, Tensor, float]
"""A [rank, in], B [out, rank] and the scale of ``B A``."""


@dataclass(frozen=True)
class Source:
    """Where one tensor of the merged model comes from: a tensor of the base, an update if it is adapted, and
    the dtype it is cast to (None: it keeps its own)."""

    place: TensorPlace
    name: str
    update: Update | None
    dtype: torch.dtype | None

    def nbytes(self) -> int:
        """Bytes in the merged model."""
        own = self.place.end - self.place.start
        return own if self.dtype is None else self.place.numel * self.dtype.itemsize


def plan(
    places: Mapping[str, TensorPlace],
    matrices: Mapping[str, Update],
    ties: Mapping[str, str],
    dtype: torch.dtype | None,
) -> tuple[dict[str, Source], bool]:
    """(sources of the merged tensors by name, whether an adapted weight had to be untied from another).

    `ties` maps a weight that has no tensor of its own to the one it shares. Adapting it adds to it alone: it gets a tensor of its own.
    """

    def cast(place: TensorPlace) -> torch.dtype | None:
        return dtype if place.dtype in FLOATS and dtype is not None and FLOATS[place.dtype] != dtype else None

    sources = {name: Source(place, name, None, cast(place)) for name, place in places.items()}
    untied = False
    for module, update in matrices.items():
        name = f"{module}.weight"
        own = ties.get(name, name)
        untied |= own != name
        place = places.get(own)
        if place is None:
            raise ModelError(
                f"base: no tensor {own!r} for the adapted module {module}; the adapter may belong to another model, or the checkpoint "
                "names its tensors in an older way: save it again with transformers' save_pretrained()"
            )
        a, b, _ = update
        if place.dtype not in FLOATS:
            raise ModelError(
                f"base: {own} is stored as {place.dtype}; merging needs the unquantised checkpoint in {', '.join(FLOATS)}"
            )
        if place.shape != (b.shape[0], a.shape[1]):
            raise ModelError(
                f"base: {own} has shape {list(place.shape)}, the adapter's update of {module} [{b.shape[0]}, {a.shape[1]}]; is it an "
                "adapter of another base?"
            )
        sources[name] = Source(place, own, update, cast(place))
    return sources, untied


def merged_weight(weight: Tensor, update: Update) -> Tensor:
    """``W + scale * B A`` in float32; W [out, in], A [rank, in], B [out, rank]."""
    a, b, scale = update
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def read_tensor(source: Source) -> Tensor:
    """The tensor of the base."""
    with safe_open(source.place.file, framework="pt") as file:
        return file.get_tensor(source.name)
