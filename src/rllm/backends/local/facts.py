"""What the start banner says of the local backend: parameters, targets, dtypes, the base's fingerprint, memory.

Reads the parts; changes nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rllm.backends.local.adapters import target_counts
from rllm.backends.local.engine import Engine
from rllm.backends.local.language_model import LanguageModel
from rllm.backends.local.learner import Learner
from rllm.config.schema import Config, LoraSettings
from rllm.lora.adapter import LoraAdapter
from rllm.lora.match import OUTPUT_HEAD, adapted_modules, by_pattern

FLOAT32_BYTES = 4
# AdamW keeps two moments a parameter, in float32 like the parameters it steps.
ADAM_MOMENTS = 2


def describe(config: Config, model: LanguageModel, learner: Learner, engine: Engine) -> dict[str, Any]:
    """Facts for the banner and run.json. Raises if what is trained is not what the config asks for."""
    base = model.parameter_count()
    trained = sum(parameter.numel() for parameter in learner.trainable())
    facts: dict[str, Any] = {
        "model": config.model.path,
        "device": str(model.device),
        "dtype": _name(model.dtype),
        "quantization": config.model.quantization,
        "path": model.path,
        "parameters": base,
        "trainable": trained,
        "base_fingerprint": model.fingerprint(),
        "memory_bytes": memory_bytes(config, model, learner, engine),
    }
    if not learner.adapters:
        return facts | {
            "method": "full fine-tuning",
            "dtypes": f"base {_name(model.dtype)}, optimizer float32",
            "learning_rate": config.optim.lr,
        }
    settings = config.lora.adapters()
    adapters = {name: _adapter_facts(model, settings[name], adapter) for name, adapter in learner.adapters.items()}
    for name, adapter in adapters.items():
        if adapter["formula"] is not None and adapter["formula"] != adapter["trainable"]:
            raise AssertionError(
                f"adapter {name!r} trains {adapter['trainable']} parameters, sum of rank * (in + out) is {adapter['formula']}"
            )
    return facts | {
        "method": "; ".join(_method(name, adapter, len(adapters)) for name, adapter in adapters.items()),
        "adapters": adapters,
        "dtypes": f"base {_name(model.dtype)} (frozen{', matrices of the layers in nf4' if model.quantized else ''}), adapter float32 (computed in {_name(model.dtype)}), optimizer float32",
    }


def _adapter_facts(model: LanguageModel, settings: LoraSettings, adapter: LoraAdapter) -> dict[str, Any]:
    return {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "scale": adapter.alpha / (math.sqrt(adapter.rank) if adapter.rslora else adapter.rank),
        "targets": target_counts(adapter),
        "trainable": adapter.parameter_count(),
        # A file decides its ranks itself, so only fresh adapters can be held against the config.
        "formula": None if settings.adapter_path else formula_count(model.linear_shapes(), settings, model.head_name),
    }


def formula_count(shapes: dict[str, tuple[int, int]], settings: LoraSettings, head: str = OUTPUT_HEAD) -> int:
    """``sum of rank * (in + out)`` over the modules that `settings` choose, from the shapes alone."""
    return sum(
        by_pattern(settings.rank_pattern, name, settings.rank) * sum(shapes[name])
        for name in adapted_modules(list(shapes), settings, head)
    )


def memory_bytes(config: Config, model: LanguageModel, learner: Learner, engine: Engine) -> dict[str, int]:
    """Estimate by part; activations and keys/values are the most that they are allowed to take."""
    trained = sum(parameter.numel() for parameter in learner.trainable())
    masters = trained * FLOAT32_BYTES if learner.adapters or learner.masters else 0
    teacher = learner.teacher[0] if learner.teacher is not None else model
    rollout = config.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    sequences = min(rollout.max_batch, 4 * config.data.train_batch_size * rollout.n)
    return {
        "base": model.nbytes,
        **({"teacher": teacher.nbytes} if teacher is not model else {}),
        "trained weights": masters,
        "gradients": trained * FLOAT32_BYTES,
        "optimizer": trained * ADAM_MOMENTS * FLOAT32_BYTES,
        "activations up to": learner.micro_batch_tokens * model.activation_bytes_per_token,
        "keys and values up to": min(engine.kv_bytes, engine.kv_bytes_of(sequences, longest))
        + engine.prefix_cache_bytes,
    }


def _method(name: str, adapter: dict[str, Any], count: int) -> str:
    whose = "" if count == 1 else f"{name}: "
    targets = ", ".join(f"{kind} x{n}" for kind, n in adapter["targets"].items())
    return (
        f"{whose}LoRA rank {adapter['rank']}, alpha {adapter['alpha']:g}, scale {adapter['scale']:g}, "
        f"{adapter['trainable']:,} parameters on {targets}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
