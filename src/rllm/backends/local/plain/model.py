"""Any causal language model of transformers, by its own forward pass, behind the interface of `LanguageModel`.

Slower than our decoder, and as correct as transformers is. Knows its modules by name and nothing of architectures.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from rllm.backends.local.language_model import Attend, LanguageModel, LowRank
from rllm.backends.local.model import PackedCausal

Decoding = Literal["batched", "single", "recompute"]
"""How tokens are sampled: all rows in one padded batch, each row with a cache of its own, or every row read anew for each token."""

# The adapter that linear layers add. The sampler's and the trainer's thread run the same modules at the same time, each with its own.
_ADAPTER: ContextVar[LowRank | None] = ContextVar("adapter", default=None)


@dataclass(frozen=True)
class PlainLimits:
    """See `language_model.Limits`."""

    vocab_size: int
    max_position: int
    attention_window: int | None = None


@dataclass(frozen=True)
class Traits:
    """What `checks.examine` found out about a model by running it on a few tokens.

    `decoding`: the fastest way that gives the same as reading the whole row. `called`: the linear layers that text goes through.
    `cache_bytes` and `activation_bytes`: memory a token takes in the cache, and in training for the backward pass.
    """

    decoding: Decoding
    called: frozenset[str]
    cache_bytes: int
    activation_bytes: int


class PlainModel(LanguageModel):
    """`hf` with low-rank updates added to its linear layers from outside.

    Where the head can be run apart from the layers, hidden states are theirs and logits are made when asked for; otherwise what
    `forward` returns are the logits already, for every token. Dropout is off throughout.
    """

    shares_prompts = False
    pads = True
    config: PlainLimits

    def __init__(self, hf: PreTrainedModel, limits: PlainLimits):
        super().__init__()
        self.hf = hf.eval().requires_grad_(False)
        self.config = limits
        self.traits = Traits("recompute", frozenset(), 0, 0)
        self._linears = {name: module for name, module in hf.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
        for name, module in self._linears.items():
            module.register_forward_hook(partial(_add_low_rank, name))
        self.conv1d = any(isinstance(module, Conv1D) for module in self._linears.values())
        head = hf.get_output_embeddings()
        self.head_name = next((name for name, module in hf.named_modules() if module is head), self.head_name)
        self.join_head()

    def split_head(self, body: str) -> None:
        """Run the module called `body` for hidden states, and the rest of the model over what it gives for logits."""
        head = copy.copy(self.hf)
        head._modules = {**self.hf._modules, body: _Given()}
        self._run_apart(getattr(self.hf, body), head)

    def join_head(self) -> None:
        """Run the whole model for hidden states."""
        self._run_apart(self.hf, None)

    def _run_apart(self, body: nn.Module, head: nn.Module | None) -> None:
        # In tuples, so that they are not parts of this module: their weights are those of `hf`.
        self._body, self._head = (body,), (head,)
        self._accepted = frozenset(inspect.signature(body.forward).parameters)

    @property
    def path(self) -> str:
        how = {
            "batched": "decoding in padded batches",
            "single": "decoding one row at a time",
            "recompute": "decoding without a cache, so that every token reads its row anew",
        }[self.traits.decoding]
        return (
            f"plain path: {type(self.hf).__name__} by transformers' own forward, {how}; correct, but slower than the fast decoder, most of "
            "all in sampling on a GPU"
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def activation_bytes_per_token(self) -> int:
        return self.traits.activation_bytes

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, lora: LowRank | None = None) -> Tensor:
        """Hidden states [N, width] of packed tokens. Rows are filled up on the right: no token of a causal model sees what follows it, so
        they need no mask, and any model with absolute, relative or no positions counts them from 0."""
        assert isinstance(attend, PackedCausal)
        hidden = self.run(attend.pad(ids), lora)
        flat = hidden.flatten(0, 1)
        return flat.index_select(0, attend.slots) if attend.ragged else flat

    def run(
        self,
        ids: Tensor,
        lora: LowRank | None,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
        last_only: bool = False,
    ) -> Tensor:
        """Hidden states [rows, T, width] of `ids` [rows, T]. With a `cache`, T more tokens of rows of which `mask` [rows, cached + T] says
        where tokens stand; the cache takes them up. With `last_only` those before the last token may be left out."""
        (body,), accepted = self._body, self._accepted
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
        if mask is not None:
            arguments["attention_mask"] = mask
        if positions is not None and "position_ids" in accepted:
            arguments["position_ids"] = positions
        if cache is not None:
            arguments["cache" if "cache" in accepted else "past_key_values"] = cache
        if last_only and body is self.hf and "logits_to_keep" in accepted:
            arguments["logits_to_keep"] = 1
        with adapted(lora):
            output = body(**arguments)
        return output.logits if body is self.hf else output.last_hidden_state

    def logits(self, hidden: Tensor, lora: LowRank | None = None) -> Tensor:
        (head,) = self._head
        if head is None:
            return hidden.float()
        with adapted(lora):
            return head(inputs_embeds=hidden.unsqueeze(0)).logits.squeeze(0).float()

    def new_cache(self) -> Any:
        """An empty cache of the kind that the architecture wants."""
        return DynamicCache(config=self.hf.config)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.hf.named_parameters()

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Linear layers as PEFT counts them: ``nn.Linear``, and ``Conv1D``, which keeps its weight as [in, out]. Experts that an architecture
        keeps as one tensor are none."""
        return {
            name: (
                (module.weight.shape[0], module.weight.shape[1])
                if isinstance(module, Conv1D)
                else (module.weight.shape[1], module.weight.shape[0])
            )
            for name, module in self._linears.items()
        }

    def block_layout(self) -> dict[tuple[int, str], list[tuple[str, int]]]:
        return {(0, name): [(name, outputs)] for name, (_, outputs) in self.linear_shapes().items()}

    def idle(self, modules: list[str]) -> list[str]:
        return [name for name in modules if name not in self.traits.called]


@contextmanager
def adapted(lora: LowRank | None) -> Iterator[None]:
    """Linear layers run in here, in this thread, add what `lora` says."""
    token = _ADAPTER.set(lora)
    try:
        yield
    finally:
        _ADAPTER.reset(token)


def _add_low_rank(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """Hook of a linear layer: ``W x + b + B (A x)``, the scale inside B. A router derived from one may return other things: it is left."""
    lora = _ADAPTER.get()
    if lora is None or not isinstance(output, Tensor) or output.shape[:-1] != args[0].shape[:-1]:
        return None
    pair = lora.pair(0, name)
    if pair is None:
        return None
    x = args[0].to(pair[0].dtype)
    if lora.dropout is not None:
        x = lora.dropout(x)
    return output + F.linear(F.linear(x, pair[0]), pair[1]).to(output.dtype)


class _Output(BaseModelOutputWithPast):
    """Hidden states, and None for whatever else an architecture's layers return."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Given(nn.Module):
    """In place of the layers: hands on the hidden states that it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)
