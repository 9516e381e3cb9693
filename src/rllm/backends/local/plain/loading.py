"""From a model folder to a `PlainModel`, and back.

Knows transformers' loaders and what a config says of lengths; nothing of how the model runs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from rllm.backends.local.language_model import LanguageModel
from rllm.backends.local.plain.checks import examine
from rllm.backends.local.plain.model import PlainLimits, PlainModel
from rllm.errors import ModelError
from rllm.lora.checkpoint import weight_files

logger = logging.getLogger(__name__)
# For architectures without an end: state-space models, ALiBi.
UNBOUNDED = 2**24
# Keep their state in the modules, where the sampler's and the trainer's thread would overwrite each other's.
REFUSED = ("recurrent_gemma",)


def load_plain(folder: Path, hf_config: Any, dtype: torch.dtype, device: torch.device) -> PlainModel:
    """The model of `folder` as transformers loads it, examined on a few tokens. Raises `ModelError` where transformers has no causal
    language model of its type, tensors are missing or of another shape, or it is not causal."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    kind = hf_config.model_type
    if type(hf_config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"model.path: {folder} is of type {kind!r}, for which transformers has no causal language model; choose a decoder-only "
            "checkpoint"
        )
    if kind in REFUSED:
        raise ModelError(
            f"model.path: {folder} is of type {kind!r}, which keeps the state of its rows inside its layers: it cannot be sampled "
            "and trained at the same time"
        )
    weight_files(folder)
    for part in {id(c): c for c in (hf_config, hf_config.get_text_config(decoder=True))}.values():
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = False
    hf_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # the loaders raise many kinds
        why = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"model.path: {folder} cannot be loaded by transformers: {type(error).__name__}: {why}"
        ) from error
    hf, report = loaded
    for what, names in (("lacks", report["missing_keys"]), ("has another shape of", report["mismatched_keys"])):
        if names:
            raise ModelError(f"model.path: {folder} {what} {len(names)} tensors, e.g. {_first(names)!r}")
    if report["unexpected_keys"]:
        logger.warning(
            "model.path: %s holds %d tensors that %s does not use, e.g. %s",
            folder, len(report["unexpected_keys"]), type(hf).__name__, _first(report["unexpected_keys"]),
        )  # fmt: skip
    model = PlainModel(hf.to(device), _limits(hf))
    model.traits = examine(model)
    return model


def _first(names: Any) -> str:
    name = min(names)
    return name if isinstance(name, str) else name[0]


def _limits(hf: Any) -> PlainLimits:
    return PlainLimits(hf.get_output_embeddings().weight.shape[0], longest_of(hf.config))


def longest_of(hf_config: Any) -> int:
    """Tokens of the longest row that a model reads alike in one pass and token by token. Rope types that rotate a long row differently
    from its beginning end where they start to: keys in a cache would be those of the shorter row."""
    text = hf_config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    longest = next((n for name in names if isinstance(n := getattr(text, name, None), int) and n > 0), UNBOUNDED)
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            own = part.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            longest = min(longest, own or longest)
    return longest


def save_plain(model: LanguageModel, out: Path, dtype: torch.dtype | None) -> None:
    """Weights and config as transformers writes them."""
    assert isinstance(model, PlainModel)
    tensors = None
    if dtype is not None and dtype != model.dtype:
        tensors = {
            name: t.detach().to(dtype) if t.is_floating_point() else t for name, t in model.hf.state_dict().items()
        }
    model.hf.save_pretrained(out, state_dict=tensors)
