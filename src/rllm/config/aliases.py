"""Other tools' spellings of our keys: each names exactly one field, or is accepted without effect for a stated reason.

Data, and the few rules that need more than a table. Knows no files and no schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.config.foreign import ACTOR, MODEL, ROLLOUT
from rllm.config.foreign import ENGINE as _ENGINE
from rllm.config.foreign import EVALUATOR as _EVALUATOR
from rllm.config.foreign import MEMORY as _MEMORY
from rllm.config.foreign import NO_CRITIC as _NO_CRITIC
from rllm.config.foreign import PLACEMENT as _PLACEMENT
from rllm.config.foreign import ROWS as _ROWS
from rllm.config.names import ESTIMATOR_WORDS, LOSS_WORDS, VLLM_MAX_RANK
from rllm.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """One setting as somebody gave it. `raw` is the text of a command-line value before it was read as YAML."""

    source: str
    key: str
    value: Any
    raw: str | None = None


ALIASES: dict[str, str] = {
    f"{MODEL}.path": "model.path",
    f"{MODEL}.lora_rank": "lora.rank",
    f"{MODEL}.lora_alpha": "lora.alpha",
    f"{MODEL}.target_modules": "lora.target_modules",
    f"{MODEL}.exclude_modules": "lora.exclude_modules",
    f"{MODEL}.lora_adapter_path": "lora.adapter_path",
    f"{MODEL}.lora.rank": "lora.rank",
    f"{MODEL}.lora.alpha": "lora.alpha",
    f"{MODEL}.lora.target_modules": "lora.target_modules",
    f"{MODEL}.lora.exclude_modules": "lora.exclude_modules",
    f"{MODEL}.lora.adapter_path": "lora.adapter_path",
    f"{MODEL}.lora.dropout": "lora.dropout",
    f"{ACTOR}.optim.lr": "optim.lr",
    f"{ACTOR}.optim.weight_decay": "optim.weight_decay",
    f"{ACTOR}.optim.clip_grad": "optim.grad_clip",
    f"{ACTOR}.grad_clip": "optim.grad_clip",
    f"{ACTOR}.clip_ratio_low": "algorithm.clip_ratio_low",
    f"{ACTOR}.clip_ratio_high": "algorithm.clip_ratio_high",
    f"{ACTOR}.loss_agg_mode": "algorithm.loss_agg_mode",
    f"{ACTOR}.kl_loss_coef": "algorithm.kl_beta",
    f"{ACTOR}.use_kl_loss": "algorithm.kl_beta",  # see fate.settle_kl
    f"{ACTOR}.ppo_mini_batch_size": "algorithm.mini_batch_size",
    f"{ACTOR}.ppo_epochs": "algorithm.ppo_epochs",
    f"{ACTOR}.optim.lr_warmup_steps": "optim.warmup_steps",
    f"{ACTOR}.optim.lr_warmup_steps_ratio": "optim.warmup_ratio",
    f"{ACTOR}.optim.lr_scheduler_type": "optim.schedule",
    f"{ACTOR}.optim.warmup_style": "optim.schedule",
    f"{ACTOR}.optim.min_lr_ratio": "optim.min_lr_ratio",
    f"{ACTOR}.kl_loss_type": "algorithm.kl_estimator",
    f"{ACTOR}.clip_ratio_c": "algorithm.clip_ratio_c",
    f"{ACTOR}.entropy_coeff": "algorithm.entropy_coeff",
    f"{ACTOR}.loss_scale_factor": "algorithm.loss_scale_factor",
    f"{ACTOR}.policy_loss.loss_mode": "algorithm.loss",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.top_p": "rollout.top_p",
    f"{ROLLOUT}.n": "rollout.n",
    f"{ROLLOUT}.response_length": "data.max_response_length",
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.max_model_len": "model.max_model_len",
    f"{ROLLOUT}.max_num_seqs": "rollout.max_batch",
    f"{ROLLOUT}.val_kwargs.n": "rollout.n_val",
    f"{ROLLOUT}.val_kwargs.temperature": "rollout.val_temperature",
    "data.val_max_samples": "data.val_size",
    "data.apply_chat_template_kwargs": "rollout.chat_template_kwargs",  # keys inside it: see fate.settle_inside
    "reward_model.overlong_buffer.len": "algorithm.overlong_buffer",  # see fate.settle_overlong
    "reward_model.overlong_buffer.penalty_factor": "algorithm.overlong_penalty",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": "algorithm.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": "algorithm.overlong_penalty",
    "reward.reward_kwargs.overlong_buffer_cfg.len": "algorithm.overlong_buffer",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": "algorithm.overlong_penalty",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.grpo_std",
    "algorithm.use_kl_in_reward": "algorithm.kl_in_reward",  # see fate.settle_kl
    "algorithm.rollout_correction.rollout_is": "algorithm.rollout_correction.level",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.rollout_correction.cap",
    "algorithm.rollout_correction.bypass_mode": "algorithm.old_logprobs",
    "algorithm.filter_groups.enable": "algorithm.rejection_sampling.enable",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.rejection_sampling.max_batches",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.resume_from_path": "trainer.resume",
    "training.resume_from_path": "trainer.resume",
    "trainer.default_local_dir": "trainer.run_dir",
    "rllm.model.name": "model.path",
    "rllm.model.lora_rank": "lora.rank",
    "rllm.data.train_batch_size": "data.train_batch_size",
    "rllm.data.max_prompt_length": "data.max_prompt_length",
    "rllm.data.max_response_length": "data.max_response_length",
    "rllm.data.seed": "data.seed",
    "rllm.rollout.n": "rollout.n",
    "rllm.rollout.n_val": "rollout.n_val",
    "rllm.rollout.train.temperature": "rollout.temperature",
    "rllm.rollout.train.top_p": "rollout.top_p",
    "rllm.rollout.train.max_tokens": "rollout.max_tokens",
    "rllm.rollout.val.temperature": "rollout.val_temperature",
    "rllm.trainer.total_epochs": "trainer.total_epochs",
    "rllm.trainer.total_batches": "trainer.total_steps",
    "rllm.trainer.test_freq": "trainer.test_freq",
    "rllm.trainer.save_freq": "trainer.save_freq",
    "rllm.trainer.val_before_train": "trainer.val_before_train",
    "rllm.trainer.val_only": "trainer.val_only",
    "rllm.trainer.logger": "trainer.logger",
    "rllm.trainer.project_name": "trainer.project_name",
    "rllm.trainer.experiment_name": "trainer.experiment_name",
    "rllm.algorithm.adv_estimator": "algorithm.adv_estimator",
    "rllm.algorithm.norm_adv_by_std_in_grpo": "algorithm.grpo_std",
    "rllm.algorithm.use_precomputed_advantage": "algorithm.adv_estimator",  # see fate.settle_advantages
    "rllm.stepwise_advantage.enable": "algorithm.stepwise",  # see fate.settle_advantages
    "rllm.stepwise_advantage.mode": "algorithm.stepwise",
    "rllm.algorithm.kl_beta": "algorithm.kl_beta",
    "rllm.algorithm.loss_fn": "algorithm.loss",
    "rllm.algorithm.loss_agg_mode": "algorithm.loss_agg_mode",
    "rllm.algorithm.eps_clip_high": "algorithm.clip_ratio_high",
    "rllm.rejection_sample.filter_uniform_groups": "algorithm.zero_std",
    "rllm.algorithm.lr_schedule": "optim.schedule",
    "rllm.algorithm.warmup_steps": "optim.warmup_steps",
    "rllm.algorithm.warmup_steps_ratio": "optim.warmup_ratio",
    "rllm.algorithm.rollout_correction.tis_mode": "algorithm.rollout_correction.level",
    "rllm.algorithm.rollout_correction.tis_cap": "algorithm.rollout_correction.cap",
    "rllm.algorithm.rollout_correction.bypass_mode": "algorithm.old_logprobs",
    "rllm.compact_filtering.enable": "algorithm.filter.enable",
    "rllm.compact_filtering.mask_max_prompt_length_exceeded": "algorithm.filter.max_prompt_length_exceeded",
    "rllm.compact_filtering.mask_max_response_length_exceeded": "algorithm.filter.max_response_length_exceeded",
    "rllm.compact_filtering.mask_max_turns_exceeded": "algorithm.filter.max_turns_exceeded",
    "rllm.compact_filtering.mask_env_done": "algorithm.filter.env_done",
    "rllm.compact_filtering.mask_unknown": "algorithm.filter.unknown",
    "rllm.mask_truncated_samples": "algorithm.mask_truncated",
    "rllm.rejection_sample.enable": "algorithm.rejection_sampling.enable",
    "rllm.gateway.host": "gateway.host",
    "rllm.gateway.port": "gateway.port",
    "rllm.episode_logging.log_episodes": "trainer.log_episodes",
    "rllm.workflow.retry_limit": "rollout.retries",
    "rllm.workflow.n_parallel_tasks": "rollout.max_concurrency",
    "rllm.workflow.workflow_args.timeout": "rollout.episode_timeout_s",
    # rLLM's Tinker backend
    "tinker_base_url": "tinker.base_url",
    "model.name": "model.path",
    "model.lora_rank": "lora.rank",
    "model.train_attn": "lora.train_attn",
    "model.train_mlp": "lora.train_mlp",
    "model.train_unembed": "lora.train_unembed",
    "training.group_size": "rollout.n",
    "training.learning_rate": "optim.lr",
    "training.beta1": "optim.beta1",
    "training.beta2": "optim.beta2",
    "training.eps": "optim.eps",
    "training.max_length": "model.max_model_len",
    "training.default_local_dir": "trainer.run_dir",
    "validation.group_size": "rollout.n_val",
}

# One key of another tool that sets several of ours. The keys for one of them alone win over it, as they do there.
SPREAD: dict[str, tuple[str, ...]] = {
    f"{ACTOR}.optim.betas": ("optim.beta1", "optim.beta2"),
    f"{ACTOR}.clip_ratio": ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    "rllm.algorithm.eps_clip": ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
}
# Those of them whose value is a list, one for each; of the others one number is for all.
PAIRS = frozenset({f"{ACTOR}.optim.betas"})

# Values that those tools use for "off" or "default", in our words.
TRANSLATED: dict[str, dict[Any, Any]] = {
    "trainer.test_freq": {-1: 0},
    "trainer.save_freq": {-1: 0},
    "trainer.total_steps": {-1: None},
    "data.val_size": {-1: None},
    "optim.warmup_steps": {-1: None},
    "algorithm.adv_estimator": {**ESTIMATOR_WORDS},
    "algorithm.loss": {**LOSS_WORDS},
    "algorithm.loss_agg_mode": {"sum-norm": "seq-mean-token-sum-norm"},
    "algorithm.kl_estimator": {
        "kl": "k1",
        "kl+": "k1+",
        "mse": "k2",
        "mse+": "k2",
        "k2+": "k2",
        "low_var_kl": "k3",
        "low_var_kl+": "k3+",
    },
}
FLAGS: dict[str, dict[bool, str]] = {
    "algorithm.grpo_std": {True: "sample", False: "none"},
    "algorithm.zero_std": {True: "drop", False: "keep"},
    "algorithm.old_logprobs": {True: "sampler", False: "auto"},
}

_NO_GPU_SHARE = "one process trains and samples, with either rollout.engine, and shares its memory out itself"
_ONE_UPDATE = "micro-batches never change the result here"
_KL_IN_REWARD = (
    "the KL in the reward is switched on by algorithm.use_kl_in_reward, or weighed by algorithm.kl_in_reward"
)

_OVERLONG = "where it is not true, the length of the buffer is left out too: algorithm.overlong_buffer is 0"
_OVERLONG_LOG = "overlong/penalty and overlong/share are always logged"
_OVERLONG_LIMIT = "the limit is rollout.max_tokens or data.max_response_length"
# Keys (or prefixes ending in '.') that verl and rLLM scripts carry and that change nothing here, with the reason.
NO_EFFECT: dict[str, str] = {
    f"{ROLLOUT}.name": _ENGINE,
    f"{ROLLOUT}.mode": _ENGINE,
    f"{ROLLOUT}.dtype": "set model.dtype",
    f"{ROLLOUT}.load_format": _ENGINE,
    f"{ROLLOUT}.layered_summon": _ENGINE,
    f"{ROLLOUT}.enforce_eager": _ENGINE,
    f"{ROLLOUT}.free_cache_engine": _ENGINE,
    f"{ROLLOUT}.enable_chunked_prefill": _ENGINE,
    f"{ROLLOUT}.enable_prefix_caching": _ENGINE,
    f"{ROLLOUT}.max_num_batched_tokens": _ENGINE,
    f"{ROLLOUT}.disable_log_stats": _ENGINE,
    f"{ROLLOUT}.engine_kwargs.": _ENGINE,
    f"{ROLLOUT}.calculate_log_probs": "log-probabilities of sampled tokens are always kept",
    f"{ROLLOUT}.gpu_memory_utilization": _NO_GPU_SHARE,
    f"{ROLLOUT}.tensor_model_parallel_size": _PLACEMENT,
    f"{ROLLOUT}.data_parallel_size": _PLACEMENT,
    f"{ROLLOUT}.log_prob_micro_batch_size": _ONE_UPDATE,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": _ONE_UPDATE,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": _ONE_UPDATE,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": _ONE_UPDATE,
    f"{ROLLOUT}.val_kwargs.do_sample": "set rollout.val_temperature=0 for greedy validation",
    f"{ROLLOUT}.val_kwargs.top_p": "validation samples with rollout.top_p",
    f"{ROLLOUT}.val_kwargs.top_k": "validation samples from all tokens",
    f"{ROLLOUT}.agent.": "episodes are bounded by rollout.max_concurrency",
    f"{ACTOR}.strategy": _PLACEMENT,
    f"{ACTOR}.fsdp_config.": _PLACEMENT,
    f"{ACTOR}.ppo_micro_batch_size": _ONE_UPDATE,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": _ONE_UPDATE,
    f"{ACTOR}.ppo_max_token_len_per_gpu": _ONE_UPDATE,
    f"{ACTOR}.use_dynamic_bsz": _ONE_UPDATE,
    f"{ACTOR}.ulysses_sequence_parallel_size": _PLACEMENT,
    f"{ACTOR}.use_torch_compile": _ENGINE,
    f"{ACTOR}.checkpoint.": "a run saves the adapter (or, without LoRA, the model)",
    "actor_rollout_ref.ref.": "the reference policy is the same model with the adapter off",
    "actor_rollout_ref.hybrid_engine": _NO_GPU_SHARE,
    f"{MODEL}.use_remove_padding": "rows are always packed without padding",
    f"{MODEL}.use_fused_kernels": _ENGINE,
    f"{MODEL}.enable_gradient_checkpointing": _MEMORY,
    f"{MODEL}.enable_activation_offload": _MEMORY,
    f"{MODEL}.use_shm": _NO_GPU_SHARE,
    f"{MODEL}.trust_remote_code": "no code of a model folder is ever run",
    "critic.": _NO_CRITIC,
    "reward_model.": _EVALUATOR,
    f"{ACTOR}.policy_loss.dro_beta": "only the dro loss reads it; there it sets algorithm.loss_options.beta",
    "reward_model.overlong_buffer.enable": _OVERLONG,
    "reward_model.overlong_buffer.log": _OVERLONG_LOG,
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": _OVERLONG,
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": _OVERLONG_LOG,
    "reward_model.reward_kwargs.max_resp_len": _OVERLONG_LIMIT,
    "reward.reward_kwargs.overlong_buffer_cfg.enable": _OVERLONG,
    "reward.reward_kwargs.overlong_buffer_cfg.log": _OVERLONG_LOG,
    "reward.reward_kwargs.max_resp_len": _OVERLONG_LIMIT,
    "custom_reward_function.": _EVALUATOR,
    "algorithm.kl_ctrl.": _KL_IN_REWARD,
    "algorithm.kl_penalty": "the KL in the reward is the difference of log-probabilities (k1)",
    "algorithm.filter_groups.metric": "groups are told apart by their rewards",
    "algorithm.lam": "group-relative advantages use no discount",
    "data.gen_batch_size": "the batch is data.train_batch_size",
    "data.val_batch_size": "validation runs all tasks; rollout.max_concurrency bounds how many at once",
    "data.filter_overlong_prompts": "a prompt that is too long fails that call with its sizes",
    "data.truncation": "prompts are never truncated; one that is too long fails that call",
    "data.return_raw_chat": _ROWS,
    "data.prompt_key": "the text is found in instruction, question, prompt or problem",
    "data.reward_fn_key": _EVALUATOR,
    "data.dataloader_num_workers": _ROWS,
    "trainer.n_gpus_per_node": _PLACEMENT,
    "trainer.nnodes": _PLACEMENT,
    "trainer.balance_batch": _PLACEMENT,
    "trainer.critic_warmup": _NO_CRITIC,
    "trainer.device": "set model.device",
    "trainer.log_val_generations": "every episode is in episodes.jsonl",
    "trainer.max_actor_ckpt_to_keep": "adapters are small; all are kept",
    "trainer.resume_mode": "trainer.resume=auto or trainer.resume=<folder of a run> goes on with a run",
    "ray_kwargs.": _PLACEMENT,
    "ray_init.": _PLACEMENT,
    "rllm.data.val_batch_size": "validation runs all tasks; rollout.max_concurrency bounds how many at once",
    "rllm.rollout.val.top_p": "validation samples with rollout.top_p",
    "rllm.workflow.use_workflow": "flows and workflows run the same way",
    "rllm.workflow.raise_on_error": "rollout.max_failed_fraction decides when failures stop the run",
    "rllm.disable_thinking": "thinking is switched off only where it is true: rollout.chat_template_kwargs={enable_thinking: false}",
    "rllm.agent.": "flows carry their own agents",
    "rllm.env.": "flows carry their own environments",
}

# Keys that are accepted at the values that say what is done here anyway, and refused at any other.
ONLY: dict[str, tuple[Any, ...]] = {
    f"{ROLLOUT}.top_k": (-1, 0, None),
    f"{ROLLOUT}.min_p": (0, None),
    f"{ROLLOUT}.ignore_eos": (False,),
    f"{MODEL}.target_parameters": (None,),
    f"{MODEL}.lora.type": ("lora",),
    "rllm.stepwise_advantage.normalize_by_steps": (False,),
    "rllm.algorithm.router_replay": ("disabled",),
    "rllm.async_training.enable": (False,),
    "rllm.rejection_sample.multiplier": (1,),
    "rllm.rejection_sample.min_partial_solve_tasks": (1,),
    "rllm.rejection_sample.min_trajs_per_group": (2,),
    "rllm.compact_filtering.mask_error": (True,),
    "rllm.compact_filtering.mask_timeout": (True,),
    "algorithm.rollout_correction.rollout_rs": (None,),
    "algorithm.rollout_correction.rollout_rs_threshold": (None,),
    "algorithm.rollout_correction.loss_type": ("ppo_clip",),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (False,),
    f"{ACTOR}.optim.num_cycles": (0.5, None),
    "algorithm.kl_ctrl.type": ("fixed",),
}

# What people call our keys. Only for suggestions: none of these is accepted.
HINTS: dict[str, str] = {
    "alpha": "lora.alpha",
    "batch_size": "data.train_batch_size",
    "epochs": "trainer.total_epochs",
    "eval_freq": "trainer.test_freq",
    "val_freq": "trainer.test_freq",
    "eval_steps": "trainer.test_freq",
    "group_size": "rollout.n",
    "num_generations": "rollout.n",
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "lora_r": "lora.rank",
    "r": "lora.rank",
    "max_grad_norm": "optim.grad_clip",
    "max_steps": "trainer.total_steps",
    "num_train_epochs": "trainer.total_epochs",
    "model": "model.path",
    "model.name": "model.path",
    "model_name": "model.path",
    "trainer.name": "trainer.experiment_name",
    "clip_ratio": "algorithm.clip_ratio_low",
    "max_new_tokens": "rollout.max_tokens",
    "max_completion_length": "data.max_response_length",
    "save_steps": "trainer.save_freq",
    "output_dir": "trainer.run_dir",
    "run_name": "trainer.experiment_name",
}

STEPWISE, STEPWISE_MODE = "rllm.stepwise_advantage.enable", "rllm.stepwise_advantage.mode"
PRECOMPUTED = "rllm.algorithm.use_precomputed_advantage"
VERL_KL_COEF = 0.001
# verl's switches of the two KL terms: (switch, weight there, weight here).
KL_SWITCHES = (
    (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", "algorithm.kl_beta"),
    ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_in_reward"),
)
# Keys that switch a field on and off and are not its value.
SWITCHES = frozenset({STEPWISE, PRECOMPUTED, *(switch for switch, _, _ in KL_SWITCHES)})


def check_engine_rank(entries: Sequence[Entry], ranks: Mapping[str, int]) -> None:
    """A script that names vLLM as its rollout engine must stay one that vLLM can run, so a rank it cannot serve is refused here too."""
    name = next((entry for entry in reversed(entries) if entry.key == f"{ROLLOUT}.name"), None)
    if name is None or name.value != "vllm":
        return
    for key, rank in ranks.items():
        if rank > VLLM_MAX_RANK:
            raise ConfigError(
                f"{key}={rank}: vLLM serves ranks up to {VLLM_MAX_RANK} (its max_lora_rank) and {name.source} says {name.key}=vllm; "
                f"lower the rank, or leave {name.key} out: the built-in sampler has no such limit"
            )


def translated(field: str, key: str, value: Any) -> Any:
    """`value` in our words, where other tools have a word of their own for "off" or "default"."""
    if key in SPREAD and isinstance(value, (list, tuple)):
        fields = SPREAD[key]
        if len(value) != len(fields):
            raise ConfigError(f"{key}={list(value)}: {len(value)} values; expected {len(fields)}: {', '.join(fields)}")
        return value[fields.index(field)]
    if key in PAIRS:
        raise ConfigError(f"{key}={value}: expected a list of {len(SPREAD[key])}: {', '.join(SPREAD[key])}")
    if key != field and isinstance(value, bool) and field in FLAGS:
        return FLAGS[field][value]
    words: Mapping[Any, Any] = TRANSLATED.get(field, {})
    plain = isinstance(value, (int, str)) and not isinstance(value, bool)
    return words[value] if plain and value in words else value
