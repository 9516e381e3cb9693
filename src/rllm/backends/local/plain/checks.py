"""What a model does, found out by running it on a few tokens: so that no list of architectures is needed, and none can be wrong.

Knows the ways to run a `PlainModel`; nothing of files or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rllm.backends.local.language_model import Dropout, LowRank
from rllm.backends.local.plain.model import Decoding, PlainModel, Traits, adapted
from rllm.errors import ModelError

# Mean difference of logits, as a share of how far they are spread: float32, and dtypes in which the same sum in another order is another.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
NARROW_TOLERANCE = 0.2
TOKENS = 9
MEASURED_TOKENS = 32
ROW_TOKENS = 2048


@torch.no_grad()
def examine(model: PlainModel) -> Traits:
    """Split the head off where that changes nothing, and say what was found. Raises `ModelError` for a model that is not causal, or whose
    logits are not finite."""
    generator = torch.Generator().manual_seed(0)
    low, high = min(3, model.config.vocab_size - 2), min(model.config.vocab_size, 1000)
    ids = torch.randint(low, high, (2, TOKENS), generator=generator).to(model.device)
    recorder = _Recorder()
    try:
        whole = _whole(model, ids, recorder)
    except Exception as error:  # whatever a forward pass raises
        raise ModelError(
            f"model.path: {type(model.hf).__name__} cannot read {TOKENS} tokens: {type(error).__name__}: {error}; is config.json the right one?"
        ) from error
    if not torch.isfinite(whole).all():
        raise ModelError(
            f"model.path: {type(model.hf).__name__} gives logits that are not finite; is the checkpoint whole?"
        )
    _check_causal(model, ids, whole)
    _try_to_split(model, ids, whole)
    decoding, cache_bytes = _decoding(model, ids, whole)
    return Traits(decoding, frozenset(recorder.seen), cache_bytes, _activation_bytes(model, ids))


def _whole(model: PlainModel, ids: Tensor, lora: LowRank | None = None) -> Tensor:
    """Logits [rows, T, vocab] by the model's own forward."""
    with adapted(lora):
        return model.hf(input_ids=ids, use_cache=False).logits.float()


def _same(model: PlainModel, found: Tensor, wanted: Tensor) -> bool:
    spread = (wanted - wanted.mean(-1, keepdim=True)).abs().mean()
    gap = (found - wanted).abs().mean()
    return bool(gap <= TOLERANCE.get(model.dtype, NARROW_TOLERANCE) * spread + 1e-7)


def _check_causal(model: PlainModel, ids: Tensor, whole: Tensor) -> None:
    changed = ids.clone()
    changed[:, -1] = torch.where(ids[:, -1] == ids[:, 0], ids[:, 1], ids[:, 0])
    if not _same(model, _whole(model, changed)[:, :-1], whole[:, :-1]):
        raise ModelError(
            f"model.path: {type(model.hf).__name__} lets tokens see those that come after them, so it is no causal language model; "
            "choose a decoder-only checkpoint"
        )


def _try_to_split(model: PlainModel, ids: Tensor, whole: Tensor) -> None:
    for body in dict.fromkeys((model.hf.base_model_prefix, "model", "transformer")):
        if not isinstance(model.hf._modules.get(body), torch.nn.Module):
            continue
        model.split_head(body)
        try:
            logits = model.logits(model.run(ids, None).flatten(0, 1))
            if _same(model, logits.view_as(whole), whole):
                return
        except Exception:  # an architecture whose head asks more of its layers; it runs as a whole
            pass
        model.join_head()


def _decoding(model: PlainModel, ids: Tensor, whole: Tensor) -> tuple[Decoding, int]:
    """The fastest way to decode that gives the logits of the whole row, and the bytes of a token in the cache."""
    try:
        logits, cache = _decode(model, ids[:1], pads=0)
    except Exception:  # no cache, or one of its own that is not handed over
        return "recompute", 0
    if not _same(model, logits, whole[:1, -1]):
        return "recompute", 0
    cache_bytes = sum(t.nbytes for layer in cache.layers for t in _tensors(layer)) // TOKENS
    if getattr(model.hf, "_is_stateful", False) or not mergeable(cache) or "chunked_attention" in _layer_types(model):
        return "single", cache_bytes
    try:
        logits, _ = _decode(model, ids, pads=4)
    except Exception:
        return "single", cache_bytes
    expected = torch.stack((whole[0, -1], _whole(model, ids[1:, 4:])[0, -1]))
    return ("batched" if _same(model, logits, expected) else "single"), cache_bytes


def _decode(model: PlainModel, ids: Tensor, pads: int) -> tuple[Tensor, Any]:
    """Logits [rows, vocab] of the last token, which is read after the others are in the cache. The last row lacks its first `pads`."""
    mask = torch.ones_like(ids)
    mask[-1, :pads] = 0
    positions = (mask.cumsum(-1) - 1).clamp_(min=0)
    cache = model.new_cache()
    told = mask if pads else None
    model.run(ids[:, :-1], None, mask=told if told is None else told[:, :-1], positions=positions[:, :-1], cache=cache)
    hidden = model.run(ids[:, -1:], None, mask=told, positions=positions[:, -1:], cache=cache)
    return model.logits(hidden[:, -1]), cache


def mergeable(cache: Any) -> bool:
    """Whether the rows of two such caches can be put together: keys and values by token, and nothing else."""
    # Layers without a cache of their own; older transformers have none.
    dummy = getattr(cache_utils, "DummyLayer", DynamicLayer)
    known = (DynamicLayer, DynamicSlidingWindowLayer, dummy)
    return all(type(layer) in known for layer in cache.layers)


def _layer_types(model: PlainModel) -> list[str]:
    return list(getattr(model.hf.config.get_text_config(decoder=True), "layer_types", None) or ())


def _tensors(layer: Any) -> list[Tensor]:
    found = [value for value in vars(layer).values() if isinstance(value, Tensor)]
    return [
        t for value in vars(layer).values() if isinstance(value, dict) for t in value.values() if isinstance(t, Tensor)
    ] + found


def _activation_bytes(model: PlainModel, ids: Tensor) -> int:
    """Bytes that autograd keeps per token of a row of `ROW_TOKENS`, weights aside: ``a T + b T^2`` through two short rows, as attention
    that keeps its weights takes more per token in longer ones."""
    short = min(MEASURED_TOKENS, max(1, model.config.max_position // 2))
    one, two = (_kept_bytes(model, ids, tokens) for tokens in (short, 2 * short))
    square = max(0.0, (two - 2 * one) / (2 * short**2))
    linear = one / short - square * short
    return max(1, round(linear + square * min(ROW_TOKENS, model.config.max_position)))


def _kept_bytes(model: PlainModel, ids: Tensor, count: int) -> int:
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    row = ids.flatten().repeat(-(-count // ids.numel()))[:count].unsqueeze(0)
    # Every layer then sees inputs with a gradient, as it does where the first of them is adapted.
    embeddings = model.hf.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda module, args, output: output.detach().requires_grad_())
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model.run(row, None)
    finally:
        handle.remove()
    del hidden  # not earlier: memory that is used again would count once
    return sum(kept.values())


class _Recorder:
    """Adds nothing, and notes which linear layers ask."""

    dropout: Dropout | None = None
    anchor: Tensor | None = None
    riding = False
    flat = torch.empty(0)

    def __init__(self) -> None:
        self.ranks: Mapping[tuple[int, str], tuple[int, ...]] = {}
        self.seen: set[str] = set()

    def pair(self, layer: int, block: str) -> None:
        self.seen.add(block)

    def part_ranks(self, layer: int, block: str) -> tuple[int, ...]:
        return ()

    def sums(self, layer: int, block: str) -> None:
        return None
