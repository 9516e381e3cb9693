"""Adapters over the decoder: made from the config or a PEFT folder, and saved with proof that PEFT reads them the same way.

Knows decoder, adapter and files; nothing of sampling or optimizers.
"""

from __future__ import annotations

import logging
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rllm.algorithms.spec import DEFAULT_ADAPTER
from rllm.backends.local.language_model import LanguageModel
from rllm.backends.local.loading import TOKENIZER_FILES
from rllm.backends.local.model import PackedCausal
from rllm.config.schema import LoraConfig, LoraSettings
from rllm.errors import ModelError
from rllm.lora.adapter import LoraAdapter
from rllm.lora.checkpoint import fingerprint
from rllm.lora.files import (
    CARD,
    CARD_FINGERPRINT,
    check_written,
    load_into,
    model_card,
    read_adapter,
    verify_with_peft,
    write_adapter,
)
from rllm.lora.match import adapted_modules, leaf_names, unmatched_excludes
from rllm.version import __version__

logger = logging.getLogger(__name__)
# Loading a second copy of the base to check a saved adapter is worth it up to here; above, the file itself is read back.
VERIFY_MAX_PARAMETERS = 500_000_000
VERIFY_TOLERANCE = 1e-4
_VERSIONED = ("torch", "transformers", "peft")
_TARGET_KEYS = ("target_modules", "exclude_modules", "train_attn", "train_mlp", "train_unembed")


def create_adapters(model: LanguageModel, lora: LoraConfig, seed: int) -> dict[str, LoraAdapter]:
    """Every adapter that `lora` asks for by name. Each has its own A, which depends on `seed` and its name alone."""
    return {
        name: create_adapter(model, settings, seed if name == DEFAULT_ADAPTER else seed + zlib.crc32(name.encode()))
        for name, settings in lora.adapters().items()
    }


def create_adapter(model: LanguageModel, settings: LoraSettings, seed: int) -> LoraAdapter:
    """The adapter that `settings` ask for: fresh, or the one of ``adapter_path``, whose rank, scale and modules then count."""
    shapes = model.linear_shapes()
    names = list(shapes)
    for entry in unmatched_excludes(names, settings.exclude_modules):
        logger.warning(
            "lora.exclude_modules: %r matches no module; the model has %s", entry, ", ".join(leaf_names(shapes))
        )
    saved, matrices = read_adapter(Path(settings.adapter_path).expanduser()) if settings.adapter_path else ({}, {})
    untouched = all(getattr(settings, key) == LoraSettings.model_fields[key].default for key in _TARGET_KEYS)
    if saved and untouched and set(matrices) <= set(names):
        modules = [name for name in names if name in matrices]
    else:
        modules = adapted_modules(names, settings, model.head_name)
    if idle := model.idle(modules):
        logger.warning(
            "lora.target_modules: text does not go through %d of the %d modules (e.g. %s): their adapters stay as they start (lora.exclude_modules leaves them out)",
            len(idle), len(modules), idle[0],
        )  # fmt: skip
    adapter = LoraAdapter(
        shapes,
        modules,
        model.block_layout(),
        rank=settings.rank,
        alpha=settings.alpha,
        seed=seed,
        device=model.device,
        rank_pattern=settings.rank_pattern,
        alpha_pattern=settings.alpha_pattern,
        rslora=settings.use_rslora,
        dropout=settings.dropout,
    )
    if saved:
        folder = Path(settings.adapter_path or "").expanduser()
        load_into(adapter, folder, matrices)
        if saved["r"] != settings.rank or saved["lora_alpha"] != settings.alpha:
            logger.warning(
                "lora.adapter_path: rank %s and alpha %s are taken from %s", saved["r"], saved["lora_alpha"], folder
            )
        adapter.rank, adapter.alpha, adapter.rslora = saved["r"], saved["lora_alpha"], bool(saved.get("use_rslora"))
    return adapter


@dataclass(frozen=True)
class SaveContext:
    """What a saved adapter is told to say of itself: its base, and facts for the model card (step, metrics, ...)."""

    model: LanguageModel
    folder: Path
    model_name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@torch.no_grad()
def save_adapter(adapter: LoraAdapter, path: Path, settings: LoraSettings, context: SaveContext) -> float | None:
    """Write `adapter` to `path` as a PEFT folder with tokenizer files and a model card, and check it by reloading.

    Returns the largest difference between the logits here and those of PEFT; None where the model is too large to load twice, not in
    float32 or quantised, and the file was only read back and compared.
    """
    model, folder = context.model, context.folder
    base = str(folder) if context.model_name == "default" else context.model_name
    write_adapter(
        adapter, path, base=base, settings=settings, names=list(model.linear_shapes()), fan_in_fan_out=model.conv1d
    )
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, path / name)
    check_written(adapter, path)
    gap = _verified_gap(adapter, path, context)
    (path / CARD).write_text(_model_card(adapter, settings, context, gap))
    return gap


def _verified_gap(adapter: LoraAdapter, path: Path, context: SaveContext) -> float | None:
    model = context.model
    small = model.parameter_count() <= VERIFY_MAX_PARAMETERS
    if not small or model.dtype != torch.float32 or model.quantized:  # PEFT would put it on the original base
        return None
    ids = torch.arange(min(32, model.config.vocab_size), device=model.device)
    attend = PackedCausal([len(ids)], model.device)
    pairs = adapter.pairs(model.dtype)
    logits = model.logits(model(ids, attend.positions, attend, pairs), pairs)
    gap = verify_with_peft(path, context.folder, ids.unsqueeze(0), logits)
    # Rounding grows with what is rounded: 1e-4 of the largest logit where that is above 1.
    allowed = VERIFY_TOLERANCE * max(1.0, logits.abs().max().item())
    if not gap <= allowed:
        raise ModelError(
            f"the adapter saved to {path} gives other logits when PEFT loads it: largest difference {gap:.2e}, "
            f"allowed {allowed:.0e}; do not use it"
        )
    return gap


def _model_card(adapter: LoraAdapter, settings: LoraSettings, context: SaveContext, gap: float | None) -> str:
    """A stub that says what the adapter is; people add what it is for."""
    checked = (
        "tensors read back and equal" if gap is None else f"reloaded with PEFT, largest logit difference {gap:.1e}"
    )
    scale = "alpha / sqrt(rank)" if adapter.rslora else "alpha / rank"
    kinds = ", ".join(f"{kind} x{count}" for kind, count in target_counts(adapter).items())
    rows = {
        "base": context.model_name + (", trained on it in 4 bits (nf4)" if context.model.quantized else ""),
        CARD_FINGERPRINT: fingerprint(context.folder),
        "rank": adapter.rank,
        "alpha": f"{adapter.alpha:g} (scale {scale})",
        "target modules": f"{settings.target_modules} ({kinds})",
        "trainable parameters": f"{adapter.parameter_count():,}",
        **{name: value for name, value in context.facts.items() if not isinstance(value, Mapping)},
        "check": checked,
        "versions": ", ".join([f"rllm {__version__}", *(f"{name} {version(name)}" for name in _VERSIONED)]),
    }
    return model_card(context.model_name, "LoRA adapter trained with rllm", rows, context.facts)


def target_counts(adapter: LoraAdapter) -> dict[str, int]:
    """How many modules of each kind (last part of the name) are adapted."""
    kinds = [name.rpartition(".")[2] for name in adapter.modules_adapted]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
