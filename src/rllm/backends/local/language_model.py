"""What the learner, the sampler and the files ask of a model, whichever way it computes: `model.Decoder` or `plain.model.PlainModel`.

Knows no architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Dropout = Callable[[Tensor], Tensor]
# Weights whose int64 products the fingerprint holds at once (64 MiB).
FINGERPRINT_ELEMENTS = 8 * 2**20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Attend(Protocol):
    """Attention of one layer over tokens the caller has laid out.

    `q` [N, heads, head_dim], `k` and `v` [N, kv_heads, head_dim], already rotated; returns [N, heads, head_dim].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class LowRank(Protocol):
    """The low-rank updates in force: for (layer, fused block) the pair ``A`` [R, in], ``B`` [out, R] (scaling inside B), or None.

    `dropout`, if any, is applied to what goes into A. `riding`: A and B also stand around the weights (`Space`).
    """

    dropout: Dropout | None
    anchor: Tensor | None
    riding: bool
    ranks: Mapping[tuple[int, str], tuple[int, ...]]
    flat: Tensor

    def pair(self, layer: int, block: str) -> tuple[Tensor, Tensor] | None: ...

    def part_ranks(self, layer: int, block: str) -> tuple[int, ...]: ...

    def sums(self, layer: int, block: str) -> tuple[Tensor, Tensor] | None: ...


class Limits(Protocol):
    """Sizes that anyone may ask for. `attention_window`: a longer sequence would not see its beginning; None where that is handled."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position(self) -> int: ...

    @property
    def attention_window(self) -> int | None: ...


class LanguageModel(nn.Module):
    """A causal language model over packed tokens. Parameters are frozen until `full_finetuning()`."""

    fused = False
    """Whether the CUDA kernels run it."""
    quantized = False
    """Whether the matrices of its layers are kept in 4 bits."""
    shares_prompts = True
    """Whether rows may pass a prompt that they have in common once (`packing.SharedPrompts`)."""
    pads = False
    """Whether it fills rows up to the longest (on the right)."""
    head_name = "lm_head"
    """The output head among `linear_shapes`."""
    conv1d = False
    """Whether its matrices are kept as [in, out], which PEFT calls fan_in_fan_out."""

    config: Limits

    @property
    def path(self) -> str:
        """How it computes, in words for the start of a run."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def activation_bytes_per_token(self) -> int:
        """Bytes kept per token for the backward pass."""
        raise NotImplementedError

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, lora: LowRank | None = None) -> Tensor:
        """Final hidden states [N, hidden] of packed tokens `ids` [N] at `positions` [N]."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, lora: LowRank | None = None) -> Tensor:
        """[N, vocab] in float32, from what `forward` returned for N tokens."""
        raise NotImplementedError

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, weights) for every weight of the model."""
        raise NotImplementedError

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Hugging Face name -> (inputs, outputs) of every linear layer, the output head included, in forward order."""
        raise NotImplementedError

    def block_layout(self) -> dict[tuple[int, str], list[tuple[str, int]]]:
        """For every (layer, fused block) the (Hugging Face name, output rows) of the matrices stacked in it."""
        raise NotImplementedError

    def idle(self, modules: list[str]) -> list[str]:
        """Those of `modules` that text does not go through, so that an adapter of them does nothing."""
        return []

    def full_finetuning(self) -> None:
        """Make every weight trainable."""
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def parameter_count(self) -> int:
        """Weights of the model, however few bits each is kept in."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def nbytes(self) -> int:
        """Memory of the weights as they are kept; what is tied counts once."""
        return sum({t.data_ptr(): t.nbytes for t in self.state_dict().values()}.values())

    @torch.no_grad()
    def fingerprint(self) -> str:
        """16 hex digits that change with any bit of the weights. Only one number a row leaves the device."""
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in self.state_dict().items():
            bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
            rows = bits.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
            # Weights by place make a swap of two values visible; int64 wraps, which does no harm.
            places = torch.arange(1, rows.shape[1] + 1, device=rows.device)
            chunk = max(1, FINGERPRINT_ELEMENTS // max(1, rows.shape[1]))
            sums = torch.cat([(part * places).sum(1) for part in rows.split(chunk)])
            digest.update(name.encode() + sums.cpu().numpy().tobytes())
        return digest.hexdigest()
