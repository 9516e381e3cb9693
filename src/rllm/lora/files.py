"""Adapter folders in PEFT's format: written atomically, read exactly, checked by reloading.

Knows the format; nothing of the decoder or of training.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rllm.algorithms.spec import DEFAULT_ADAPTER
from rllm.config.schema import Config, LoraConfig, LoraSettings
from rllm.errors import ModelError
from rllm.lora.adapter import LoraAdapter
from rllm.lora.match import ALL_LINEAR, by_pattern, match_modules

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CARD, CARD_FINGERPRINT = "README.md", "base fingerprint"
_PREFIX = "base_model.model."
# Features of PEFT's LoRA that change the maths and are not built here: name -> the value that means "off".
_REFUSED: dict[str, Any] = {
    "use_dora": False,
    "modules_to_save": None,
    "layer_replication": None,
    "lora_bias": False,
    "use_qalora": False,
    "trainable_token_indices": None,
    "target_parameters": None,
    "alora_invocation_tokens": None,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
}
# Ways to start A and B that leave the base weights alone. The others (PiSSA, OLoRA, CorDA, LoftQ, ...) move part of the base into A and
# B, so that the file means nothing on the base as published.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def write_adapter(
    adapter: LoraAdapter,
    folder: Path,
    *,
    base: str,
    settings: LoraSettings,
    names: Sequence[str],
    fan_in_fan_out: bool = False,
) -> None:
    """Write `adapter` as a PEFT folder; `settings` are those it was made by, `names` all linear layers of the model, `fan_in_fan_out`
    whether these keep their weights as [in, out] (A and B are the same either way). Refuses values that are not finite. The adapter
    appears complete or not at all; other files that `folder` may hold stay."""
    tensors: dict[str, Tensor] = {}
    for name in adapter.modules_adapted:
        for letter, matrix in zip("AB", adapter.matrices(name), strict=True):
            if not torch.isfinite(matrix).all():
                raise ModelError(f"adapter not saved: lora_{letter} of {name} holds values that are not finite")
            tensors[f"{_PREFIX}{name}.lora_{letter}.weight"] = matrix.detach().cpu().contiguous().clone()
    ranks = {name: adapter.matrices(name)[0].shape[0] for name in adapter.modules_adapted}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        **_targets(adapter, settings, names),
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != adapter.rank},
        "alpha_pattern": {
            name: adapter.alpha_of(name)
            for name in adapter.modules_adapted
            if abs(adapter.alpha_of(name) - adapter.alpha) > 1e-9
        },
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "use_rslora": adapter.rslora,
        "use_dora": False,
        "fan_in_fan_out": fan_in_fan_out,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"adapter not saved: {folder} is a file; give a folder")
    staging = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
    (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if not folder.exists():
        staging.rename(folder)
        return
    # Without its config a folder is no adapter: it goes first and comes last.
    (folder / CONFIG).unlink(missing_ok=True)
    for name in (WEIGHTS, CONFIG):
        (staging / name).replace(folder / name)
    staging.rmdir()


def _targets(adapter: LoraAdapter, settings: LoraSettings, names: Sequence[str]) -> dict[str, Any]:
    """The targets as the user gave them where PEFT reads them as we did; else the adapted modules by name. An expression is one that PEFT
    may read otherwise: it tries every module, and one such as ``.*layers\\.1\\..*`` names norms and whole blocks too, which is an error there."""
    target, exclude = settings.target_modules, settings.exclude_modules
    expression = isinstance(target, str) and target != ALL_LINEAR
    if expression or match_modules(names, target, exclude) != adapter.modules_adapted:
        target, exclude = list(adapter.modules_adapted), None
    return {"target_modules": target, "exclude_modules": exclude}


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[Tensor, Tensor, float]]]:
    """(adapter_config, module name -> (A, B, scale)) of a PEFT LoRA folder; what cannot be imported exactly is refused by name."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(f"lora.adapter_path: {folder} has no {name}; give a folder that PEFT or rllm saved")
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    except Exception as error:
        raise ModelError(f"lora.adapter_path: {folder} cannot be read: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"lora.adapter_path: {folder} is a {config.get('peft_type')} adapter; only LORA is supported")
    for feature, off in _REFUSED.items():
        if config.get(feature, off) not in (off, None, [], {}):
            raise ModelError(f"lora.adapter_path: {folder} uses {feature}={config[feature]!r}, which is not supported")
    if config.get("bias", "none") != "none":
        raise ModelError(f"lora.adapter_path: {folder} trains biases (bias={config['bias']!r}), which is not supported")
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        raise ModelError(
            f"lora.adapter_path: {folder} was made with init_lora_weights={config['init_lora_weights']!r}, which changes the base "
            "weights; convert it to a plain adapter with PEFT (save_pretrained(..., path_initial_model_for_weight_conversion=...))"
        )
    for name in ("r", "lora_alpha"):
        if not isinstance(config.get(name), (int, float)) or config[name] <= 0:
            raise ModelError(
                f"lora.adapter_path: {folder / CONFIG}: {name} is {config.get(name)!r}; it must be above 0"
            )
    matrices: dict[str, tuple[Tensor, Tensor, float]] = {}
    for key in [k for k in tensors if k.endswith(".lora_A.weight")]:
        name = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        a, b = tensors.pop(key), tensors.pop(key.replace(".lora_A.", ".lora_B."), None)
        if b is None:
            raise ModelError(f"lora.adapter_path: {folder / WEIGHTS} has lora_A but no lora_B for {name}")
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise ModelError(
                f"lora.adapter_path: {folder / WEIGHTS}: {name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; "
                "they must be [rank, in] and [out, rank]"
            )
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise ModelError(f"lora.adapter_path: {folder / WEIGHTS}: {name} holds values that are not finite")
        matrices[name] = (a, b, _scale(config, name, a.shape[0]))
    if tensors:
        raise ModelError(
            f"lora.adapter_path: {folder / WEIGHTS} holds the unexpected tensor {next(iter(tensors))!r}"
            + (
                "; save it again with PEFT's save_pretrained(..., save_embedding_layers=False)"
                if ".base_layer." in next(iter(tensors))
                else ""
            )
        )
    return config, matrices


def recorded_base(folder: Path) -> tuple[str, str | None]:
    """(name or path, fingerprint) of the base that an adapter says it was trained on: the name as in its config, "" if none; the
    `checkpoint.fingerprint` as in its model card, None if there is none. (A second entry in the metadata of the weights' file would be
    the better place, but their order is left to chance there, and equal adapters must be equal files.)"""
    try:
        name = json.loads((folder / CONFIG).read_text()).get("base_model_name_or_path")
        card = (folder / CARD).read_text() if (folder / CARD).is_file() else ""
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder} cannot be read as an adapter: {error}") from error
    found = re.search(rf"^- {CARD_FINGERPRINT}: ([0-9a-f]{{16}})\s*$", card, re.MULTILINE)
    return name or "", found[1] if found else None


def check_written(adapter: LoraAdapter, folder: Path) -> None:
    """Read the folder back: every matrix and scale must be the adapter's, exactly."""
    _, matrices = read_adapter(folder)
    for name in adapter.modules_adapted:
        a, b = (matrix.cpu() for matrix in adapter.matrices(name))
        saved = matrices.get(name)
        if not (
            saved is not None
            and torch.equal(saved[0], a)
            and torch.equal(saved[1], b)
            and math.isclose(saved[2], adapter.scales[name], rel_tol=1e-12)
        ):
            raise ModelError(f"the adapter saved to {folder} differs from the trained one in {name}; do not use it")


def load_into(adapter: LoraAdapter, folder: Path, matrices: Mapping[str, tuple[Tensor, Tensor, float]]) -> None:
    """Put the matrices of a file into `adapter`, which must adapt exactly the same modules."""
    have, found = set(adapter.modules_adapted), set(matrices)
    if have != found:
        odd = sorted(have ^ found)
        where = "the file lacks" if odd[0] in have else "the file also adapts"
        raise ModelError(
            f"lora.adapter_path: {folder} and lora.target_modules differ in {len(odd)} modules: {where} {odd[0]!r}; "
            "set lora.target_modules as the file has it"
        )
    for name, (a, b, scale) in matrices.items():
        old_a, old_b = adapter.matrices(name)
        if a.shape[1] != old_a.shape[1] or b.shape[0] != old_b.shape[0]:
            raise ModelError(
                f"lora.adapter_path: {folder}: {name} is for a {a.shape[1]} -> {b.shape[0]} layer, the model has "
                f"{old_a.shape[1]} -> {old_b.shape[0]}; is it an adapter of another base?"
            )
        adapter.set_matrices(name, a, b, scale)


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    alpha = by_pattern(config.get("alpha_pattern") or {}, name, config["lora_alpha"])
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def verify_with_peft(folder: Path, base: Path, ids: Tensor, expected: Tensor) -> float:
    """Largest difference between `expected` logits [1, T, vocab] and those of the folder loaded by PEFT over the same base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        peft_model = PeftModel.from_pretrained(model, str(folder)).eval()
        logits = peft_model(input_ids=ids.cpu()).logits
    return float((logits - expected.cpu()).abs().max())


def adapter_folders(path: Path) -> dict[str, Path]:
    """The adapters of `path` by name: the folder itself (``default``), or one subfolder for each role."""
    if (path / CONFIG).is_file():
        return {DEFAULT_ADAPTER: path}
    found = {file.parent.name: file.parent for file in sorted(path.glob(f"*/{CONFIG}"))}
    if not found:
        raise ModelError(f"lora.adapter_path: {path} has no {CONFIG}; give a folder that PEFT or rllm saved")
    return found


def match_config_to_adapter(config: Config) -> Config:
    """A copy of `config` whose ranks, alphas, targets and roles are those of the folder ``lora.adapter_path``, for using it as it is."""
    assert config.lora.adapter_path is not None
    folders = adapter_folders(Path(config.lora.adapter_path))
    settings = {name: _settings_of(folder) for name, folder in folders.items()}
    lora = settings.pop(DEFAULT_ADAPTER) if list(settings) == [DEFAULT_ADAPTER] else {"per_role": settings}
    return config.model_copy(update={"lora": LoraConfig.model_validate(lora)})


def model_card(base: str, title: str, rows: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The text of a folder's `CARD`: a list of `rows`, then a table for each mapping of numbers among `facts`."""
    lines = [f"- {name}: {value}" for name, value in rows.items()]
    for heading, values in facts.items():
        if isinstance(values, Mapping) and values:
            lines += ["", f"## {heading}", "", "| metric | value |", "|---|---|"]
            lines += [f"| {name} | {value:.4g} |" for name, value in values.items() if math.isfinite(value)]
    return f"---\nlibrary_name: peft\nbase_model: {base}\n---\n\n# {title}\n\n" + "\n".join(lines) + "\n"


def adapter_settings(folder: Path) -> LoraSettings:
    """Settings with which an adapter like that of `folder`, and started from it, is made."""
    return LoraSettings.model_validate(_settings_of(folder))


def _settings_of(folder: Path) -> dict[str, Any]:
    saved, matrices = read_adapter(folder)
    return {
        "rank": saved["r"],
        "alpha": saved["lora_alpha"],
        "target_modules": sorted(matrices),
        "use_rslora": bool(saved.get("use_rslora")),
        "adapter_path": str(folder),
    }
