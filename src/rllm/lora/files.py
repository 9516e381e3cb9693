"""Adapter folders in PEFT's format: written atomically, read exactly, checked by reloading.

Knows the format; nothing of the decoder or of training.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rllm.config.schema import Config
from rllm.errors import ModelError
from rllm.lora.adapter import LoraAdapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Features of PEFT's LoRA that change the maths and are not built here: name -> the value that means "off".
_REFUSED: dict[str, Any] = {
    "use_dora": False,
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "layer_replication": None,
    "lora_bias": False,
    "use_qalora": False,
    "trainable_token_indices": None,
    "target_parameters": None,
}


def write_adapter(
    adapter: LoraAdapter, folder: Path, *, base: str, target: str | list[str], exclude: str | list[str] | None
) -> None:
    """Write `adapter` as a PEFT folder. Refuses values that are not finite. The folder appears complete or not at all."""
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
        "target_modules": target if isinstance(target, str) else list(target),
        "exclude_modules": exclude,
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != adapter.rank},
        "alpha_pattern": {
            name: adapter.scales[name] * ranks[name]
            for name in adapter.modules_adapted
            if abs(adapter.scales[name] * ranks[name] - adapter.alpha) > 1e-9
        },
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }
    staging = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
    (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


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
    matrices: dict[str, tuple[Tensor, Tensor, float]] = {}
    for key in [k for k in tensors if k.endswith(".lora_A.weight")]:
        name = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        a, b = tensors.pop(key), tensors.pop(key.replace(".lora_A.", ".lora_B."), None)
        if b is None:
            raise ModelError(f"lora.adapter_path: {folder / WEIGHTS} has lora_A but no lora_B for {name}")
        matrices[name] = (a, b, _scale(config, name, a.shape[0]))
    if tensors:
        raise ModelError(f"lora.adapter_path: {folder / WEIGHTS} holds the unexpected tensor {next(iter(tensors))!r}")
    return config, matrices


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
    alpha = next(
        (
            value
            for pattern, value in (config.get("alpha_pattern") or {}).items()
            if name == pattern or name.endswith("." + pattern)
        ),
        config["lora_alpha"],
    )
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


def match_config_to_adapter(config: Config) -> Config:
    """A copy of `config` whose rank, alpha and targets are those of the folder ``lora.adapter_path``, for using it as it is."""
    assert config.lora.adapter_path is not None
    saved, matrices = read_adapter(Path(config.lora.adapter_path))
    lora = config.lora.model_copy(
        update={
            "rank": saved["r"],
            "alpha": saved["lora_alpha"],
            "target_modules": sorted(matrices),
            "exclude_modules": None,
        }
    )
    return config.model_copy(update={"lora": lora})
