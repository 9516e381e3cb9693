"""Other tools' spellings of our keys: each names exactly one field, or is accepted without effect for a stated reason.

Data only.
"""

from __future__ import annotations

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"

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
    f"{ACTOR}.optim.lr": "optim.lr",
    f"{ACTOR}.optim.weight_decay": "optim.weight_decay",
    f"{ACTOR}.grad_clip": "optim.grad_clip",
    f"{ACTOR}.clip_ratio_low": "algorithm.clip_ratio_low",
    f"{ACTOR}.clip_ratio_high": "algorithm.clip_ratio_high",
    f"{ACTOR}.loss_agg_mode": "algorithm.loss_agg_mode",
    f"{ACTOR}.kl_loss_coef": "algorithm.kl_beta",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.top_p": "rollout.top_p",
    f"{ROLLOUT}.n": "rollout.n",
    f"{ROLLOUT}.response_length": "data.max_response_length",
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.max_model_len": "model.max_model_len",
    f"{ROLLOUT}.max_num_seqs": "rollout.max_batch",
    f"{ROLLOUT}.val_kwargs.n": "rollout.n_val",
    f"{ROLLOUT}.val_kwargs.temperature": "rollout.val_temperature",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.log_val_generations": "trainer.log_episodes",
    "rllm.model.name": "model.path",
    "rllm.model.lora_rank": "lora.rank",
    "rllm.data.train_batch_size": "data.train_batch_size",
    "rllm.data.max_prompt_length": "data.max_prompt_length",
    "rllm.data.max_response_length": "data.max_response_length",
    "rllm.data.seed": "data.seed",
    "rllm.rollout.n": "rollout.n",
    "rllm.rollout.n_val": "rollout.n_val",
    "rllm.rollout.train.temperature": "rollout.temperature",
    "rllm.rollout.val.temperature": "rollout.val_temperature",
    "rllm.rollout.train.max_tokens": "rollout.max_tokens",
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
    "rllm.algorithm.kl_beta": "algorithm.kl_beta",
    "rllm.algorithm.loss_agg_mode": "algorithm.loss_agg_mode",
    "rllm.algorithm.eps_clip_high": "algorithm.clip_ratio_high",
    "rllm.gateway.host": "gateway.host",
    "rllm.gateway.port": "gateway.port",
    "rllm.workflow.retry_limit": "rollout.retries",
    "rllm.workflow.n_parallel_tasks": "rollout.max_concurrency",
    "rllm.workflow.workflow_args.timeout": "rollout.episode_timeout_s",
}

# One key of another tool that sets several of ours.
SPREAD: dict[str, tuple[str, ...]] = {
    f"{ACTOR}.clip_ratio": ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    "rllm.algorithm.eps_clip": ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
}

_NO_GPU_SHARE = "this backend keeps one copy of the model in one process"
_ONE_UPDATE = "all rows of a step make one optimizer step here; micro-batches never change the result"
_PLACEMENT = "placement on several workers does not arise in one process"
_ENGINE = "the sampler is built in; there is no engine to configure"

# Keys (or prefixes ending in '.') that verl and rLLM scripts carry and that change nothing here, with the reason.
NO_EFFECT: dict[str, str] = {
    f"{ROLLOUT}.name": _ENGINE,
    f"{ROLLOUT}.mode": _ENGINE,
    f"{ROLLOUT}.load_format": _ENGINE,
    f"{ROLLOUT}.layered_summon": _ENGINE,
    f"{ROLLOUT}.enforce_eager": _ENGINE,
    f"{ROLLOUT}.free_cache_engine": _ENGINE,
    f"{ROLLOUT}.enable_chunked_prefill": _ENGINE,
    f"{ROLLOUT}.max_num_batched_tokens": _ENGINE,
    f"{ROLLOUT}.gpu_memory_utilization": _NO_GPU_SHARE,
    f"{ROLLOUT}.tensor_model_parallel_size": _PLACEMENT,
    f"{ROLLOUT}.log_prob_micro_batch_size": _ONE_UPDATE,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": _ONE_UPDATE,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": _ONE_UPDATE,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": _ONE_UPDATE,
    f"{ROLLOUT}.val_kwargs.do_sample": "set rollout.val_temperature=0 for greedy validation",
    f"{ROLLOUT}.val_kwargs.top_p": "validation samples with rollout.top_p",
    f"{ROLLOUT}.agent.": "episodes are bounded by rollout.max_concurrency",
    f"{ACTOR}.strategy": _PLACEMENT,
    f"{ACTOR}.fsdp_config.": _PLACEMENT,
    f"{ACTOR}.ppo_mini_batch_size": _ONE_UPDATE,
    f"{ACTOR}.ppo_micro_batch_size": _ONE_UPDATE,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": _ONE_UPDATE,
    f"{ACTOR}.ppo_max_token_len_per_gpu": _ONE_UPDATE,
    f"{ACTOR}.use_dynamic_bsz": _ONE_UPDATE,
    f"{ACTOR}.ulysses_sequence_parallel_size": _PLACEMENT,
    f"{ACTOR}.use_kl_loss": "the KL term is on when algorithm.kl_beta (kl_loss_coef) is above 0",
    f"{ACTOR}.kl_loss_type": "the KL term is on when algorithm.kl_beta (kl_loss_coef) is above 0",
    f"{ACTOR}.use_torch_compile": _ENGINE,
    "actor_rollout_ref.ref.": "the reference policy is the same model with the adapter off",
    "actor_rollout_ref.hybrid_engine": _NO_GPU_SHARE,
    f"{MODEL}.use_remove_padding": "rows are always packed without padding",
    f"{MODEL}.enable_gradient_checkpointing": "memory is bounded by micro-batches here",
    f"{MODEL}.use_shm": _NO_GPU_SHARE,
    f"{MODEL}.trust_remote_code": "no code of a model folder is ever run",
    "critic.": "no critic is trained with group-relative advantages",
    "reward_model.": "rewards come from the evaluator",
    "algorithm.use_kl_in_reward": "the KL term belongs to the loss here (algorithm.kl_beta)",
    "algorithm.kl_ctrl.": "the KL term belongs to the loss here (algorithm.kl_beta)",
    "algorithm.gamma": "group-relative advantages use no discount",
    "algorithm.lam": "group-relative advantages use no discount",
    "data.gen_batch_size": "the batch is data.train_batch_size",
    "data.filter_overlong_prompts": "a prompt that is too long fails that call with its sizes",
    "data.truncation": "prompts are never truncated; one that is too long fails that call",
    "data.return_raw_chat": "flows see the task itself",
    "data.prompt_key": "the text is found in instruction, question, prompt or problem",
    "data.reward_fn_key": "rewards come from the evaluator",
    "trainer.n_gpus_per_node": _PLACEMENT,
    "trainer.nnodes": _PLACEMENT,
    "trainer.critic_warmup": "no critic is trained with group-relative advantages",
    "trainer.device": "set model.device",
    "trainer.resume_mode": "resume is not there yet; lora.adapter_path starts from a saved adapter",
    "trainer.balance_batch": _PLACEMENT,
    "ray_kwargs.": _PLACEMENT,
    "ray_init.": _PLACEMENT,
    "rllm.workflow.use_workflow": "flows and workflows run the same way",
    "rllm.stepwise_advantage.": "every step of a trajectory gets its advantage",
    "rllm.compact_filtering.enable": "failed episodes are never trained",
    "rllm.disable_thinking": "the chat template decides",
    "rllm.mask_truncated_samples": "truncated answers are trained with the reward they got",
    "rllm.agent.": "flows carry their own agents",
    "rllm.env.": "flows carry their own environments",
}


def no_effect_reason(key: str) -> str | None:
    """Why `key` changes nothing here, or None if it is not such a key."""
    if key in NO_EFFECT:
        return NO_EFFECT[key]
    return next((reason for name, reason in NO_EFFECT.items() if name.endswith(".") and key.startswith(name)), None)
