"""What one field alone cannot tell: values that are not built yet, fields that do not go together, and notes worth a line.

Knows the config tree only; loads nothing.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence

from rllm.config.schema import Config
from rllm.errors import ConfigError

FULL_FINETUNING_LR = 2e-6
EXAMPLE_DEFAULT = "example default"
LORA_BATCH_CAP = 64
ESTIMATORS = ("grpo", "reinforce")
LOSSES = ("ppo_clip",)
AGGREGATIONS = ("token-mean",)
LOGGERS = ("console", "tensorboard")
# Values that other tools know and that are planned here: refused by name, not as typos.
KNOWN_ESTIMATORS = (
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
    "remax",
    "opo",
    "prpo",
    "grpo_passk",
)
KNOWN_LOSSES = ("importance_sampling", "cispo", "gspo", "dro", "reinforce", "vanilla", "cross_entropy")
KNOWN_AGGREGATIONS = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum-norm")
KNOWN_LOGGERS = ("wandb", "mlflow", "swanlab", "clearml", "trackio", "file")


def check(config: Config, provenance: Mapping[str, str] | None = None, training: bool = True) -> list[str]:
    """Raise a `ConfigError` for what cannot be run; return the notes. `training` False leaves out what only training needs."""

    def refuse(key: str, message: str) -> ConfigError:
        source = (provenance or {}).get(key)
        return ConfigError(f"{source}: {message}" if source else message)

    a = config.algorithm
    _one_of("algorithm.adv_estimator", a.adv_estimator, ESTIMATORS, KNOWN_ESTIMATORS, refuse)
    _one_of("algorithm.loss", a.loss, LOSSES, KNOWN_LOSSES, refuse)
    _one_of("algorithm.loss_agg_mode", a.loss_agg_mode, AGGREGATIONS, KNOWN_AGGREGATIONS, refuse)
    for name in config.trainer.logger:
        _one_of("trainer.logger", name, LOGGERS, KNOWN_LOGGERS, refuse)
    if a.kl_beta > 0:
        raise refuse("algorithm.kl_beta", f"algorithm.kl_beta={a.kl_beta:g}: the KL term is not built yet; set it to 0")
    if not training or config.trainer.val_only:
        return []
    _check_sampling(config, refuse)
    if "tensorboard" in config.trainer.logger and importlib.util.find_spec("tensorboard") is None:
        raise refuse("trainer.logger", "trainer.logger: tensorboard is not installed; pip install 'rllm[tensorboard]'")
    return _notes(config, provenance or {})


def _check_sampling(config: Config, refuse: Callable[[str, str], ConfigError]) -> None:
    r = config.rollout
    if config.algorithm.adv_estimator == "grpo" and r.n < 2:
        raise refuse(
            "rollout.n",
            f"rollout.n={r.n} with algorithm.adv_estimator=grpo: a group of one has nothing to compare with, so nothing would be "
            "trained; set rollout.n to at least 2, or algorithm.adv_estimator=reinforce",
        )
    if r.temperature == 0:
        raise refuse(
            "rollout.temperature", "rollout.temperature=0: greedy samples are all the same; use a temperature above 0"
        )


def _notes(config: Config, provenance: Mapping[str, str]) -> list[str]:
    notes: list[str] = []
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


def _one_of(
    key: str,
    value: str,
    allowed: Sequence[str],
    planned: Sequence[str],
    refuse: Callable[[str, str], ConfigError],
) -> None:
    if value in allowed:
        return
    choices = f"available are {', '.join(allowed)}"
    if value in planned:
        raise refuse(key, f"{key}={value}: not built yet; {choices}")
    near = difflib.get_close_matches(str(value), [*allowed, *planned], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise refuse(key, f"{key}={value}: unknown{hint}; {choices}")
