"""What one field alone cannot tell: values that are not built yet, fields that do not go together, and notes worth a line.

Knows the config tree only; loads nothing.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Collection, Mapping

from rllm.config.check_distill import check_distill, distill_notes
from rllm.config.check_tinker import check_tinker, tinker_notes
from rllm.config.check_training import check_training, makes_several_steps, training_notes
from rllm.config.names import (
    AGGREGATIONS,
    ESTIMATOR_WORDS,
    ESTIMATORS,
    GROUP_RELATIVE,
    LOSS_OPTIONS,
    LOSS_WORDS,
    LOSSES,
    REFUSED_ESTIMATORS,
    REFUSED_LOSSES,
    VLLM_MAX_RANK,
)
from rllm.config.schema import Config, ModelConfig
from rllm.errors import ConfigError

FULL_FINETUNING_LR = 2e-6
EXAMPLE_DEFAULT = "example default"
LORA_BATCH_CAP = 64
GSPO_WIDE_CLIP = 0.05
LOGGERS = ("console", "tensorboard", "wandb")
# Values that other tools know and that are planned here: refused by name, not as typos.
KNOWN_LOGGERS = ("mlflow", "swanlab", "clearml", "trackio", "file")


def check(config: Config, provenance: Mapping[str, str] | None = None, training: bool = True) -> list[str]:
    """Raise a `ConfigError` for what cannot be run; return the notes. `training` False leaves out what only training needs."""

    def refuse(key: str, message: str) -> ConfigError:
        origins = (source for name, source in (provenance or {}).items() if key == name or key.startswith(f"{name}."))
        source = next(origins, None)
        return ConfigError(f"{source}: {message}" if source else message)

    _check_names(config, refuse)
    for name in config.trainer.logger:
        _one_of("trainer.logger", name, LOGGERS, dict.fromkeys(KNOWN_LOGGERS, "not built yet"), refuse)
    check_tinker(config, refuse)
    if problem := quantization_problem(config.model, bool(config.lora.adapters())):
        raise refuse("model.quantization", problem)
    if problem := engine_problem(config, training=training and not config.trainer.val_only):
        raise refuse("rollout.engine", problem)
    for name in LOGGERS if training else ():
        if name != "console" and name in config.trainer.logger and importlib.util.find_spec(name) is None:
            raise refuse("trainer.logger", f"trainer.logger: {name} is not installed; pip install 'rllm[{name}]'")
    if not training or config.trainer.val_only:
        return []
    _check_sampling(config, refuse)
    check_training(config, refuse)
    check_distill(config, refuse)
    return _notes(config, provenance or {})


def _check_names(config: Config, refuse: Callable[[str, str], ConfigError]) -> None:
    a = config.algorithm
    _one_of("algorithm.adv_estimator", a.adv_estimator, ESTIMATORS, REFUSED_ESTIMATORS, refuse)
    _one_of("algorithm.loss", a.loss, LOSSES, REFUSED_LOSSES, refuse)
    _one_of("algorithm.loss_agg_mode", a.loss_agg_mode, AGGREGATIONS, {}, refuse)
    for role, own in a.per_role.items():
        key = f"algorithm.per_role.{role}"
        if own.adv_estimator is not None:
            _one_of(f"{key}.adv_estimator", own.adv_estimator, ESTIMATORS, REFUSED_ESTIMATORS, refuse)
        if own.loss is not None:
            _one_of(f"{key}.loss", own.loss, LOSSES, REFUSED_LOSSES, refuse)
        if own.adv_estimator is None and own.loss is None:
            raise refuse(
                "algorithm.per_role", f"{key} says nothing; give it an adv_estimator or a loss, or leave it out"
            )
    used = a.losses()
    allowed = [option for loss in used for option in LOSS_OPTIONS.get(loss, ())]
    for option, value in a.loss_options.items():
        if used <= LOSS_OPTIONS.keys() and option not in allowed:
            raise refuse(
                "algorithm.loss_options",
                f"algorithm.loss_options.{option}: {', '.join(sorted(used))} has no such option; "
                + (f"options are {', '.join(allowed)}" if allowed else "it has none"),
            )
        if option == "beta" and "dro" in used and value <= 0:
            raise refuse("algorithm.loss_options", f"algorithm.loss_options.beta={value:g}: dro needs a beta above 0")


def quantization_problem(model: ModelConfig, lora: bool, device: str | None = None) -> str | None:
    """Why ``model.quantization`` cannot be had, as far as is known: `lora` whether there are adapters, `device` what ``auto`` came to."""
    key = f"model.quantization={model.quantization}"
    if model.quantization == "none":
        return None
    if not lora:
        return f"{key} with lora.rank=0: weights in 4 bits cannot be trained; set lora.rank above 0, or model.quantization=none"
    if (device or model.device) == "cpu":
        return (
            f"{key} needs a CUDA device, model.device={model.device} is the CPU; use cuda, or model.quantization=none"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        return f"{key}: bitsandbytes is not installed; pip install 'rllm[qlora]'"
    return None


def engine_problem(config: Config, device: str | None = None, training: bool = True) -> str | None:
    """Why ``rollout.engine`` cannot be had, as far as is known: `device` what ``auto`` came to."""
    key = f"rollout.engine={config.rollout.engine}"
    if config.rollout.engine == "local":
        return None
    if config.backend != "local":
        return f"{key} with backend={config.backend}: that backend samples itself; leave rollout.engine out"
    if (device or config.model.device) == "cpu":
        return f"{key} needs a CUDA device, model.device={config.model.device} is the CPU; use cuda, or rollout.engine=local"
    if config.model.quantization != "none":
        return f"{key} with model.quantization={config.model.quantization}: vLLM would sample from other weights than are trained; set one of them back"
    if training and not config.lora.trains_adapters:
        return (
            f"{key} with lora.rank=0: only adapters are handed to vLLM; set lora.rank above 0, or rollout.engine=local"
        )
    ranks = [r for own in config.lora.adapters().values() for r in (own.rank, *own.rank_pattern.values())]
    if max(ranks, default=0) > VLLM_MAX_RANK:
        return (
            f"{key} with rank {max(ranks)}: vLLM serves ranks up to {VLLM_MAX_RANK}; lower it, or rollout.engine=local"
        )
    if device is not None and importlib.util.find_spec("vllm") is None:
        return f"{key}: vLLM is not installed; pip install 'rllm[vllm]', or rollout.engine=local"
    return None


def _check_sampling(config: Config, refuse: Callable[[str, str], ConfigError]) -> None:
    r = config.rollout
    a = config.algorithm
    taught = config.distill.enabled and config.distill.mode == "only"
    if a.adv_estimator in GROUP_RELATIVE and r.n < 2 and not a.per_role and not taught:
        single = ", ".join(name for name in ESTIMATORS if name not in GROUP_RELATIVE)
        raise refuse(
            "rollout.n",
            f"rollout.n={r.n} with algorithm.adv_estimator={a.adv_estimator}: a group of one has nothing to compare with, so nothing "
            f"would be trained; set rollout.n to at least 2, or algorithm.adv_estimator to one that allows 1 ({single})",
        )
    if r.temperature == 0:
        raise refuse(
            "rollout.temperature", "rollout.temperature=0: greedy samples are all the same; use a temperature above 0"
        )


def _notes(config: Config, provenance: Mapping[str, str]) -> list[str]:
    notes = [*_algorithm_notes(config), *training_notes(config), *distill_notes(config)]
    notes += tinker_notes(config, several_steps=makes_several_steps(config))
    adapters = config.lora.adapters()
    if not adapters:
        return notes
    in_verl = any("(as actor_rollout_ref." in origin for origin in provenance.values())
    if in_verl and config.lora.per_role == "shared" and provenance.get("lora.rank") in (None, EXAMPLE_DEFAULT):
        notes.append(
            f"lora_rank is not given: LoRA of rank {config.lora.rank} is on, the default here; verl's default is 0, full fine-tuning: "
            "say actor_rollout_ref.model.lora_rank=0 for that"
        )
    if any(settings.dropout for settings in adapters.values()):
        notes.append("lora.dropout: the policy that is trained then differs from the one sampled; 0 is usual in RL")
    if config.optim.lr <= FULL_FINETUNING_LR:
        lr = config.optim.lr
        notes.append(f"optim.lr={lr:g} is a rate for full fine-tuning; LoRA usually wants about 10x: {10 * lr:g}")
    if config.data.train_batch_size > LORA_BATCH_CAP:
        size = config.data.train_batch_size
        notes.append(f"data.train_batch_size={size}: LoRA is said to tolerate large batches less; 32 to 64 is common")
    return notes


def _algorithm_notes(config: Config) -> list[str]:
    a = config.algorithm
    notes: list[str] = []
    if "dr_grpo" in a.estimators() and a.loss_agg_mode != "seq-mean-token-sum-norm":
        notes.append(
            f"algorithm.loss_agg_mode={a.loss_agg_mode} with dr_grpo: the paper's loss is seq-mean-token-sum-norm, which divides by no "
            "length"
        )
    if "gspo" in a.losses() and max(a.clip_ratio_low, a.clip_ratio_high) > GSPO_WIDE_CLIP:
        notes.append(
            f"algorithm.clip_ratio_low={a.clip_ratio_low:g}, clip_ratio_high={a.clip_ratio_high:g} with gspo: ratios of whole rows are "
            "close to 1; the paper clips at 3e-4 and 4e-4"
        )
    if a.gamma != 1.0 and a.stepwise == "broadcast":
        notes.append(
            f"algorithm.gamma={a.gamma:g} has no effect with algorithm.stepwise=broadcast: it discounts the rewards of steps"
        )
    if a.kl_beta > 0 and a.kl_estimator == "k1":
        notes.append(
            "algorithm.kl_estimator=k1: its gradient is 0 in the mean, so it holds nothing back; use k2, k3 or k1+"
        )
    return notes


def _one_of(
    key: str,
    value: str,
    allowed: Collection[str],
    refused: Mapping[str, str],
    refuse: Callable[[str, str], ConfigError],
) -> None:
    if value in allowed:
        return
    choices = f"available are {', '.join(allowed)}"
    if value in refused:
        raise refuse(key, f"{key}={value}: {refused[value]}; {choices}")
    words = {name: name for name in allowed} | {
        word: name for word, name in (ESTIMATOR_WORDS | LOSS_WORDS).items() if name in allowed
    }
    near = difflib.get_close_matches(str(value).lower(), words, n=1)
    hint = f" (did you mean {words[near[0]]!r}?)" if near else ""
    raise refuse(key, f"{key}={value}: unknown{hint}; {choices}")
