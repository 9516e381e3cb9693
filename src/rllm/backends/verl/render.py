"""From our config tree to the overrides of verl's Hydra config, and the refusal of what verl 0.9.1 cannot do.

Knows both trees as data; imports nothing of verl. Keys are those that its FSDP engine reads (``lora_rank``, not ``lora.rank``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm.config.explain import leaves
from rllm.config.fate import fate, passes_to_verl
from rllm.config.names import VLLM_RANKS
from rllm.config.schema import Config, LoraSettings
from rllm.errors import ConfigError

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
REMOVE_PADDING, ATTENTION = f"{MODEL}.use_remove_padding", f"{MODEL}.override_config.attn_implementation"
TENSOR_PARALLEL, MOST_TOKENS = f"{ROLLOUT}.tensor_model_parallel_size", f"{ACTOR}.ppo_max_token_len_per_gpu"
MERGE, LOAD_FORMAT = f"{MODEL}.lora.merge", f"{ROLLOUT}.load_format"
# Up to here a whole copy of the weights in every step costs less than LoRA's own matrices on every sampled token.
MERGE_UP_TO = 8e9
_LOSSES = {"ppo_clip": "vanilla", "gspo": "gspo", "cispo": "cispo"}
_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k1+": "kl+", "k3+": "low_var_kl+"}
# Keys of verl's whose other values would undo what the rest relies on: (the values that do not, why no other). A name that ends in '.'
# stands for all keys below it.
_OURS: dict[str, tuple[tuple[Any, ...], str]] = {
    "trainer.use_v1": ((True,), "rllm plugs into verl's v1 trainer"),
    "trainer.v1.trainer_mode": (("sync",), "steps sample, train and publish in turn"),
    "trainer.v1.": ((), "rllm collects each step's rows itself"),
    "model_engine": (("dp",), "LoRA's keys, checks and files here are those of the FSDP engine"),
    f"{ACTOR}.strategy": (("fsdp2",), "LoRA's keys, checks and files here are those of the FSDP2 engine"),
    "actor_rollout_ref.hybrid_engine": ((True,), "the same GPUs sample and train in turn"),
    f"{MODEL}.lora.rank": ((), "FSDP reads lora_rank alone; set lora.rank"),
    f"{ROLLOUT}.mode": (("async",), "the gateway asks verl's servers call by call"),
    f"{ROLLOUT}.calculate_log_probs": ((True,), "the proof of each publish needs the sampler's log-probabilities"),
    f"{ROLLOUT}.agent.agent_loop_manager_class": ((), "rllm runs the flow in its own"),
    f"{ACTOR}.checkpoint.async_save": ((False,), "a run goes on from steps that were saved for certain"),
}
# Numbers of verl's that fail in the middle of a start, or let it wait for ever: (least, most).
_NUMBERS: dict[str, tuple[float, float]] = {
    "trainer.nnodes": (1, math.inf),
    "trainer.n_gpus_per_node": (1, math.inf),
    f"{ROLLOUT}.agent.num_workers": (1, math.inf),
    TENSOR_PARALLEL: (1, math.inf),
    f"{ROLLOUT}.gpu_memory_utilization": (0.01, 1.0),
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": (1, math.inf),
}
# Fields that verl has no counterpart of, with the value that asks for nothing.
_NOT_THERE: dict[str, tuple[Any, str]] = {
    "model.quantization": ("none", "verl keeps the base as it is"),
    "optim.schedule": (("constant", "cosine"), "verl's FSDP has constant and cosine"),
    "algorithm.rollout_correction.level": ("none", "not wired to verl's own rollout correction"),
    "algorithm.kl_in_reward": (0.0, "use algorithm.kl_beta, the KL term of the loss"),
    "algorithm.rejection_sampling.enable": (False, "every batch is trained as it is sampled"),
    "algorithm.old_logprobs": (("auto", "trainer"), "the trainer's pass is always made: it is the proof of each publish"),
    "algorithm.loss_options": ({}, "its losses take none"),
    "algorithm.max_staleness": (0, "every step samples with the newest policy"),
    "trainer.early_stop.metric": (None, "verl's loop runs to its last step"),
    "rollout.max_tokens_in_flight": (None, "vLLM bounds this itself (rollout.max_batch)"),
    "gateway.port": (0, "each of its workers has an endpoint of its own, at a free port"),
}  # fmt: skip
_NOT_IN_ADAPTER: dict[str, Any] = {
    "train_attn": True,
    "train_mlp": True,
    "train_unembed": False,
}


@dataclass
class Rendered:
    """Overrides of verl's tree in the order in which they are given, and what to tell the user about them."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def overrides(self) -> list[str]:
        """In Hydra's grammar. A key that verl's tree lacks is written with ``+`` by whoever gives it."""
        return [f"{key}={hydra_value(value)}" for key, value in self.values.items()]


def refuse(config: Config, provenance: Mapping[str, str] | None = None) -> None:
    """Raise a `ConfigError` for the first thing asked that verl cannot do and the capability table does not name."""

    def no(key: str, value: Any, why: str) -> ConfigError:
        source = (provenance or {}).get(key)
        return ConfigError(
            f"{f'{source}: ' if source else ''}{key}={json.dumps(value)}: the verl backend cannot do this; {why}"
        )

    for key, (neutral, why) in _NOT_THERE.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value not in (neutral if isinstance(neutral, tuple) else (neutral,)):
            raise no(key, value, why)
    for name, off in _NOT_IN_ADAPTER.items():
        value = getattr(config.lora, name)
        if config.lora.rank and value != off:
            raise no(f"lora.{name}", value, "verl passes on rank, alpha, target_modules and exclude_modules")
    if config.lora.alpha != int(config.lora.alpha):
        raise no("lora.alpha", config.lora.alpha, "verl takes whole numbers")
    dual = config.algorithm.clip_ratio_c
    if config.algorithm.loss == "gspo" and dual not in (0, type(config.algorithm).model_fields["clip_ratio_c"].default):
        raise no("algorithm.clip_ratio_c", dual, "its gspo has no dual clip; leave it out")
    for role, own in config.algorithm.per_role.items():
        if own.loss is not None:
            raise no(f"algorithm.per_role.{role}.loss", own.loss, "all roles share one loss there")
    if config.algorithm.kl_beta and config.algorithm.reference == "initial_adapter" and config.lora.adapter_path:
        raise no(
            "algorithm.reference", "initial_adapter", "its reference is the bare base; set algorithm.reference=base"
        )
    for key, value in config.verl.items():
        _refuse_own(key, value)
    _refuse_layout(config)


def _refuse_own(key: str, value: Any) -> None:
    """Raise a `ConfigError` for a key of verl's that means something here already, or would undo what the rest relies on."""
    name, given = key.lstrip("+~"), f"{key}={json.dumps(value)}"
    theirs = fate(name)
    ours = name if name in dict(leaves(Config)) else theirs.fields[0] if theirs is not None and theirs.fields else None
    if ours is not None and name not in _OURS:
        raise ConfigError(f"{given}: this is {ours} here, and both must agree; set that one, without verl.")
    for found in (name, *(prefix for prefix in _OURS if prefix.endswith(".") and name.startswith(prefix))):
        allowed, why = _OURS.get(found, ((value,), ""))
        if value not in allowed:
            raise ConfigError(f"{given}: not with rllm; {why}. Leave it out")
        if found in _OURS:
            break
    if not passes_to_verl(name) and theirs is not None and not theirs.takes(value):
        raise ConfigError(f"{given}: not with rllm; {theirs.reason}. Leave it out")
    if name == MERGE and not isinstance(value, (bool, type(None))):
        raise ConfigError(f"{given}: allowed are true and false; leave it out for what suits the model")
    if name in _NUMBERS:
        least, most = _NUMBERS[name]
        whole = most == math.inf
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise ConfigError(
                f"{given}: allowed: {f'whole number >= {least}' if whole else f'number from {least} to {most:g}'}"
            )


def _refuse_layout(config: Config) -> None:
    """Numbers that do not go together, which verl would find out when the workers are there, or in the middle of a step."""
    gpus = config.verl.get("trainer.nnodes", 1) * config.verl.get("trainer.n_gpus_per_node", 1)
    parallel = config.verl.get(TENSOR_PARALLEL, 1)
    if gpus % parallel:
        raise ConfigError(
            f"{TENSOR_PARALLEL}={parallel}: {gpus} GPUs (trainer.nnodes x trainer.n_gpus_per_node) cannot be shared out to engines of {parallel}"
        )
    longest, most = _longest_row(config), config.verl.get(MOST_TOKENS)
    if isinstance(most, int) and most < longest:
        raise ConfigError(
            f"{MOST_TOKENS}={most}: a row may have {longest} tokens (model.max_model_len, or data.max_prompt_length + the longest "
            "response), and verl splits none; raise it, or leave it out"
        )


def _longest_row(config: Config) -> int:
    """Tokens of the longest conversation that a call can end."""
    response = config.rollout.max_tokens or config.data.max_response_length
    return config.model.max_model_len or config.data.max_prompt_length + response


def render(
    config: Config,
    model: str,
    steps: int,
    folder: str,
    parameters: float | None = None,
    flash_attention: bool = True,
    positions: int | None = None,
) -> Rendered:
    """Overrides for verl's ``main_ppo``. `model`: folder or hub id; `steps`: of the whole run; `folder`: of the run; `parameters` and
    `positions`: of the model, as far as they are known; `flash_attention`: whether it is installed where the run starts. What the user set
    in verl's own words comes last, so it wins. Raises `ConfigError` for what verl or the model cannot do."""
    refuse(config)
    longest = _longest(config, positions)
    done = Rendered()
    for part in (
        _model(config, model),
        _data(config),
        _rollout(config, longest),
        _actor(config, longest),
        _trainer(config, steps, folder),
    ):
        done.values |= part
    if config.lora.trains_adapters:
        done.values |= _lora(config.lora)
        _choose_merge(config, parameters, done)
    if not flash_attention and not {REMOVE_PADDING, ATTENTION, f"+{ATTENTION}"}.intersection(config.verl):
        # verl asks transformers for it by name, and rows without padding between them need it.
        done.values |= {f"+{ATTENTION}": "sdpa", REMOVE_PADDING: False}
        done.notes.append(
            f"verl: FlashAttention is not installed here, so {ATTENTION}=sdpa and {REMOVE_PADDING}=false, which is slower"
        )
    done.values |= {key: value for key, value in config.verl.items() if (key, value) != (MERGE, None)}
    return done


def _model(config: Config, model: str) -> dict[str, Any]:
    dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    values: dict[str, Any] = {f"{MODEL}.path": model, f"{ROLLOUT}.dtype": dtype}
    # FSDP holds what it trains in fp32 and computes in `dtype`. In bfloat16 the adapters' Adam steps would be rounded away.
    values |= {f"{ACTOR}.fsdp_config.dtype": dtype, f"{ACTOR}.fsdp_config.model_dtype": "fp32"}
    if dtype == "float32":  # dtype alone leaves FSDP's own mixed precision at bfloat16
        values[f"+{ACTOR}.fsdp_config.mixed_precision"] = dict.fromkeys(
            ("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"
        )
    return values | {f"{ACTOR}.strategy": "fsdp2", REMOVE_PADDING: True}


def _lora(lora: LoraSettings) -> dict[str, Any]:
    values: dict[str, Any] = {
        f"{MODEL}.lora_rank": lora.rank,
        f"{MODEL}.lora_alpha": int(lora.alpha),
        f"{MODEL}.target_modules": lora.target_modules,
        f"{MODEL}.exclude_modules": lora.exclude_modules,
    }
    if lora.adapter_path:  # read only where lora_rank is above 0, so both are given
        values[f"{MODEL}.lora_adapter_path"] = str(Path(lora.adapter_path).resolve())
    return values


def _choose_merge(config: Config, parameters: float | None, done: Rendered) -> None:
    """Whether vLLM gets merged weights or the adapter, and what follows from it."""
    given = config.verl.get(MERGE)
    merge = bool(given) if given is not None else parameters is None or parameters <= MERGE_UP_TO
    size = "a model of unknown size" if parameters is None else f"{parameters / 1e9:.1f}B parameters"
    done.values[MERGE] = merge
    if merge:
        why = f"one copy of the weights per step ({size}) costs less than LoRA kernels on every sampled token"
        done.notes.append(
            f"verl: {MERGE}=true" + ("" if given is not None else f": {why}; {MERGE}=false sends the adapter")
        )
        return
    # The base must be vLLM's own from the start: with dummy weights every first update carries all of it, and layered_summon fails.
    done.values |= {LOAD_FORMAT: "safetensors", f"{ROLLOUT}.layered_summon": True, f"{ROLLOUT}.enforce_eager": False}
    # verl rounds the rank up to one of these.
    rounded = next(rank for rank in VLLM_RANKS if rank >= config.lora.rank)
    why = "" if given is not None else f" (a full copy of {size} in every step would cost more)"
    done.notes.append(
        f"verl: {MERGE}=false{why}: adapters go to vLLM, which reserves rank {rounded} for rank {config.lora.rank}"
    )
    if "dummy" in str(config.verl.get(LOAD_FORMAT, "")):
        raise ConfigError(
            f"{LOAD_FORMAT}={config.verl[LOAD_FORMAT]} with {MERGE}=false: vLLM must load the base itself; set it to safetensors, or "
            "leave it out"
        )


def _data(config: Config) -> dict[str, Any]:
    d = config.data
    return {
        "data.train_batch_size": d.train_batch_size,
        "data.max_prompt_length": d.max_prompt_length,
        "data.max_response_length": config.rollout.max_tokens or d.max_response_length,
        "data.shuffle": d.shuffle,
        "data.seed": config.trainer.seed if d.seed is None else d.seed,
        "data.dataloader_num_workers": 0,
    }


def _longest(config: Config, positions: int | None) -> int:
    """Tokens of the longest sequence: what the config says, or prompt and response limits as far as the model's positions go."""
    wanted = config.model.max_model_len
    if wanted is not None and positions is not None and wanted > positions:
        raise ConfigError(f"model.max_model_len={wanted}: {config.model.path} can do at most {positions} tokens")
    both = config.data.max_prompt_length + (config.rollout.max_tokens or config.data.max_response_length)
    return wanted or min(both, positions or both)


def _rollout(config: Config, longest: int) -> dict[str, Any]:
    r = config.rollout
    return {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.mode": "async",
        f"{ROLLOUT}.n": r.n,
        f"{ROLLOUT}.temperature": r.temperature,
        f"{ROLLOUT}.top_p": 1.0,
        f"{ROLLOUT}.max_num_seqs": r.max_batch,
        f"{ROLLOUT}.max_model_len": longest,  # vLLM refuses more than the model has positions
        TENSOR_PARALLEL: 1,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.val_kwargs.n": r.n_val,
        f"{ROLLOUT}.val_kwargs.temperature": r.temperature if r.val_temperature is None else r.val_temperature,
        f"{ROLLOUT}.seed": config.trainer.seed,
    }


def _actor(config: Config, longest: int) -> dict[str, Any]:
    a, o = config.algorithm, config.optim
    kl = a.kl_beta > 0 and a.reference != "none"
    values: dict[str, Any] = {
        f"{ACTOR}.optim.lr": o.lr,
        f"{ACTOR}.optim.betas": [o.beta1, o.beta2],
        f"{ACTOR}.optim.weight_decay": o.weight_decay,
        f"{ACTOR}.optim.override_optimizer_config": {"eps": o.eps},
        f"{ACTOR}.optim.lr_scheduler_type": o.schedule,
        f"{ACTOR}.optim.lr_warmup_steps": -1 if o.warmup_steps is None else o.warmup_steps,
        # verl takes its ratio where the steps are 0; here the steps win.
        f"{ACTOR}.optim.lr_warmup_steps_ratio": o.warmup_ratio if o.warmup_steps is None else 0.0,
        f"{ACTOR}.optim.min_lr_ratio": o.min_lr_ratio,
        f"{ACTOR}.optim.clip_grad": o.grad_clip or 1e9,
        f"{ACTOR}.grad_clip": o.grad_clip or 1e9,
        f"{ACTOR}.policy_loss.loss_mode": _LOSSES[a.loss],
        f"{ACTOR}.loss_agg_mode": a.loss_agg_mode,
        f"{ACTOR}.loss_scale_factor": a.loss_scale_factor,
        f"{ACTOR}.clip_ratio_low": a.clip_ratio_low,
        f"{ACTOR}.clip_ratio_high": a.clip_ratio_high,
        f"{ACTOR}.clip_ratio_c": a.clip_ratio_c or 1e9,
        f"{ACTOR}.use_kl_loss": kl,
        f"{ACTOR}.kl_loss_coef": a.kl_beta,
        f"{ACTOR}.kl_loss_type": _KL[a.kl_estimator],
        f"{ACTOR}.entropy_coeff": a.entropy_coeff,
        f"{ACTOR}.ppo_epochs": a.ppo_epochs,
        f"{ACTOR}.ppo_mini_batch_size": min(
            a.mini_batch_size or config.data.train_batch_size, config.data.train_batch_size
        ),
        f"{ACTOR}.use_dynamic_bsz": True,
        MOST_TOKENS: max(16384, longest),
    }
    if a.loss_agg_mode == "seq-mean-token-sum-norm" and a.loss_scale_factor is None:
        values[f"{ACTOR}.loss_scale_factor"] = config.rollout.max_tokens or config.data.max_response_length
    return values


def _trainer(config: Config, steps: int, folder: str) -> dict[str, Any]:
    t, adapters = config.trainer, config.lora.trains_adapters
    # All weights have no file of their own but verl's, so the last step is always saved, and as a model folder too.
    whole = {} if adapters else {f"{ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"]}
    return whole | {
        # Advantages are rllm's own, so that they are those of the local backend; this names a group's estimator for verl's checks.
        "algorithm.adv_estimator": "grpo",
        "trainer.use_v1": True,
        "trainer.total_training_steps": steps,
        # Its epochs leave out a last batch that is not full, so they are no measure of the steps.
        "trainer.total_epochs": max(steps, 1),
        "trainer.test_freq": t.test_freq or -1,
        "trainer.save_freq": t.save_freq or (-1 if adapters or not steps else steps),
        "trainer.val_before_train": t.val_before_train or t.val_only,
        "trainer.val_only": t.val_only,
        "trainer.logger": t.logger,
        "trainer.project_name": t.project_name,
        "trainer.experiment_name": t.experiment_name or Path(folder).name,
        "trainer.default_local_dir": str(Path(folder) / "checkpoints"),
        "trainer.resume_mode": "auto" if t.resume else "disable",
        # Rewards come with the rows, so verl's own reward workers have nothing to do.
        "reward.num_workers": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
    }


def preview(config: Config) -> str:
    """What verl would be given, for people to read: nothing is loaded, so the steps and the folder of the run are still open."""
    model = config.model.path
    facts: dict[str, Any] = {"parameters": parameters_of(Path(model)), "positions": positions_of(Path(model))}
    done = render(config, model, config.trainer.total_steps or 0, f"{config.trainer.run_dir}/RUN", **facts)
    return "\n".join(["", "# for verl 0.9.1", *(f"# {note}" for note in done.notes), *done.overrides()])


def hydra_value(value: Any) -> str:
    """`value` in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value) if not isinstance(value, float) or math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(hydra_value(item) for item in value) + "]"
    return "'" + _escaped(str(value)) + "'"


def _escaped(text: str) -> str:
    """Inside single quotes: a quote is escaped, and so are the backslashes just before one or before the end."""

    def parts() -> Iterator[str]:
        slashes = 0
        for character in text:
            if character == "'":
                yield "\\" * slashes + "\\'"
            else:
                yield character
            slashes = slashes + 1 if character == "\\" else 0
        yield "\\" * slashes

    return "".join(parts())


def parameters_of(folder: Path) -> float | None:
    """Parameters of a dense decoder by its config.json; infinity for a mixture of experts; None where that does not tell."""
    about = _about(folder)
    if any(about.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return math.inf
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
    if not all(isinstance(about.get(name), int) for name in names):
        return None
    hidden, layers, inner, words, heads = (about[name] for name in names)
    width = about.get("head_dim") or hidden // heads
    attention = 2 * hidden * width * (heads + (about.get("num_key_value_heads") or heads))
    embeddings = words * hidden * (1 if about.get("tie_word_embeddings") else 2)
    return float(layers * (attention + 3 * hidden * inner) + embeddings)


def positions_of(folder: Path) -> int | None:
    """How many tokens a model may see at once by its config.json, where that tells."""
    found = _about(folder).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return about.get("text_config", about)
