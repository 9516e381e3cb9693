"""The rest of verl's and rLLM's config trees: keys that change nothing here, and keys taken at some values only, with the reason.

Data. What maps to a field of ours, and the keys that scripts set most, are in `aliases.py`. Written for verl 0.9.1 and rLLM 0.3.
A name that ends in '.' stands for all keys below it; a longer name wins over a shorter one.
"""

from __future__ import annotations

from typing import Any

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"

ENGINE = "the sampler is chosen by rollout.engine; its own settings are not taken from here"
PLACEMENT = "placement on several workers does not arise in one process"
EVALUATOR = "rewards come from the evaluator"
MEMORY = "memory is bounded by micro-batches here"
NO_CRITIC = "no critic is trained with group-relative advantages"
TEXT_ONLY = "tasks are text here"
PROFILING = "times of each part of a step are in metrics.jsonl"
ROWS = "datasets are read by rllm; flows see the task itself"
SEED = "one seed is behind everything: set trainer.seed"
_TEACHER = "on-policy distillation is the section distill here: distill.teacher or distill.base_url"
GATEWAY = "the gateway records every call in memory, by its id"

TREE_NO_EFFECT: dict[str, str] = {
    # verl: trainer, workers, services
    "distillation.": _TEACHER,
    "global_profiler.": PROFILING,
    "skip.": "every step makes its own rollouts",
    "transfer_queue.": PLACEMENT,
    "model_engine": PLACEMENT,
    "reward.": EVALUATOR,
    "sandbox_fusion.": EVALUATOR,
    "hydra.": "a run is a folder under trainer.run_dir",
    "trainer.use_v1": "there is one trainer here",
    "trainer.v1.": "there is one trainer here; it samples, trains and publishes in turn",
    "trainer.rollout_data_dir": "every episode is in episodes.jsonl",
    "trainer.validation_data_dir": "every episode is in episodes.jsonl",
    "trainer.default_hdfs_dir": "a run is a folder under trainer.run_dir",
    "trainer.del_local_ckpt_after_load": "nothing of a run is ever deleted",
    "trainer.max_critic_ckpt_to_keep": NO_CRITIC,
    "trainer.esi_redundant_time": PLACEMENT,
    "trainer.ray_wait_register_center_timeout": PLACEMENT,
    "actor_rollout_ref.nccl_timeout": PLACEMENT,
    # verl: actor
    f"{ACTOR}.rollout_n": "the group size is rollout.n",
    f"{ACTOR}.profiler.": PROFILING,
    f"{ACTOR}.qat.": "weights are trained as they are",
    f"{ACTOR}.fsdp_config.dtype": "set model.dtype",
    f"{ACTOR}.fsdp_config.model_dtype": "set model.dtype; what is trained is float32",
    f"{ACTOR}.fsdp_config.seed": SEED,
    f"{ACTOR}.data_loader_seed": SEED,
    f"{ACTOR}.tau_pos": "only the SAPO loss reads it",
    f"{ACTOR}.tau_neg": "only the SAPO loss reads it",
    f"{ACTOR}.policy_loss.": "it belongs to a loss that is not chosen here",
    f"{ACTOR}.freeze_vision_tower": TEXT_ONLY,
    f"{ACTOR}.calculate_entropy": "the entropy is always measured",
    f"{ACTOR}.calculate_sum_pi_squared": "only measured there, never trained on",
    f"{ACTOR}.use_prefix_grouper": "a prompt that many share is read once already",
    f"{ACTOR}.shuffle": "mini-batches are shuffled, by the seed of the run",
    f"{ACTOR}.use_fused_kernels": ENGINE,
    f"{ACTOR}.use_remove_padding": "rows are always packed without padding",
    f"{ACTOR}.pad_to_length": "rows are always packed without padding",
    f"{ACTOR}.entropy_from_logits_with_chunking": MEMORY,
    f"{ACTOR}.entropy_from_logits_chunk_size": MEMORY,
    f"{ACTOR}.entropy_checkpointing": MEMORY,
    f"{ACTOR}.optim.total_training_steps": "the steps of the run: trainer.total_steps or trainer.total_epochs",
    # verl: sampling
    f"{ROLLOUT}.nnodes": PLACEMENT,
    f"{ROLLOUT}.n_gpus_per_node": PLACEMENT,
    f"{ROLLOUT}.expert_parallel_size": PLACEMENT,
    f"{ROLLOUT}.pipeline_model_parallel_size": PLACEMENT,
    f"{ROLLOUT}.disaggregation.": PLACEMENT,
    f"{ROLLOUT}.checkpoint_engine.": "publishing copies the adapter inside the process",
    f"{ROLLOUT}.seed": SEED,
    f"{ROLLOUT}.full_determinism": "each call samples by a seed of its own, whatever is batched with it",
    f"{ROLLOUT}.cudagraph_capture_sizes": ENGINE,
    f"{ROLLOUT}.logprobs_mode": "log-probabilities are of the distribution sampled from, temperature included",
    f"{ROLLOUT}.scheduling_policy": ENGINE,
    f"{ROLLOUT}.multi_stage_wake_up": ENGINE,
    f"{ROLLOUT}.router_config_path": ENGINE,
    f"{ROLLOUT}.skip_tokenizer_init": ENGINE,
    f"{ROLLOUT}.moe_load_balance_metrics_interval": ENGINE,
    f"{ROLLOUT}.profiler.": PROFILING,
    f"{ROLLOUT}.prometheus.": "set trainer.logger",
    f"{ROLLOUT}.trace.": "every call and token is in episodes.jsonl",
    f"{ROLLOUT}.multi_turn.": "a flow makes as many calls as it likes",
    f"{ROLLOUT}.mtp": ENGINE,
    f"{ROLLOUT}.mtp.": ENGINE,
    f"{ROLLOUT}.qat": ENGINE,
    f"{ROLLOUT}.qat.": ENGINE,
    f"{ROLLOUT}.quantization_config_file": "set model.quantization",
    # verl: model
    f"{MODEL}.use_liger": ENGINE,
    f"{MODEL}.fused_kernel_options.": ENGINE,
    f"{MODEL}.tiled_mlp.": MEMORY,
    f"{MODEL}.mtp.": ENGINE,
    f"{MODEL}.lora.merge": "the policy is the same whether the adapter is merged or applied; the sampler does what is faster",
    f"{MODEL}.lora.lora_A_init_method": "A starts as PEFT starts it, B as zero",
    f"{MODEL}.lora.a2a_experimental": PLACEMENT,
    f"{MODEL}.lora.dtype": "adapters are trained in float32",
    f"{MODEL}.lora.fully_sharded_loras": PLACEMENT,
    f"{MODEL}.lora.freeze_vision_model": "with LoRA the whole base is frozen",
    f"{MODEL}.lora.freeze_vision_projection": "with LoRA the whole base is frozen",
    f"{MODEL}.lora.freeze_language_model": "with LoRA the whole base is frozen",
    # verl: data and algorithm
    "data.tokenizer": "the tokenizer is the model's",
    "data.use_shm": ROWS,
    "data.return_raw_input_ids": ROWS,
    "data.return_full_prompt": ROWS,
    "data.return_multi_modal_inputs": TEXT_ONLY,
    "data.image_key": TEXT_ONLY,
    "data.video_key": TEXT_ONLY,
    "data.audio_key": TEXT_ONLY,
    "data.image_patch_size": TEXT_ONLY,
    "data.mm_processor_kwargs": TEXT_ONLY,
    "data.mm_processor_kwargs.": TEXT_ONLY,
    "data.validation_shuffle": "the order of validation tasks changes nothing",
    "data.filter_overlong_prompts_workers": ROWS,
    "data.trust_remote_code": "no code of a model folder is ever run",
    "data.tool_config_path": "flows carry their own tools",
    "data.function_tool_path": "flows carry their own tools",
    "data.custom_cls.name": ROWS,
    "algorithm.pf_ppo.": "only algorithm.use_pf_ppo reads it",
    "algorithm.filter_groups.max_inflight_gen_batches": "one batch is sampled at a time; rollout.max_concurrency bounds its episodes",
    # rLLM
    "trainer.episode_log_dir": "every episode is in episodes.jsonl of the run's folder",
    "rllm.accumulate_reasoning": "the chat template decides",
    "rllm.filter_token_mismatch": "the tokens trained are those that were sampled, always",
    "rllm.distill.": _TEACHER,
    "rllm.sdk.": GATEWAY,
    "rllm.rollout.val.max_tokens": "validation samples with rollout.max_tokens",
    "rllm.workflow.warm_queue_size": "every episode gets a fresh workflow",
    "rllm.workflow.workflow_args.": "a workflow's own arguments go to AgentTrainer(workflow_args=...)",
    "rllm.gateway.": GATEWAY,
    "rllm.async_training.": "steps are synchronous",
    "rllm.episode_logging.": "every episode is in episodes.jsonl of the run's folder",
    "rllm.remote_runtime.": "flows run in this process",
    # rLLM's Tinker backend
    "fuse_forward_backward_and_optim_step": "with backend=tinker both are always under way at once",
    "rollout_engine.": "the model's own chat template renders every call",
    "training.resume_mode": "trainer.resume=auto or trainer.resume=<folder of a run> goes on with a run",
}

# Keys taken at the values that say what is done here anyway: (those values, why no other).
TREE_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "custom_reward_function.path": ((None, ""), f"{EVALUATOR}: write the function with @rllm.evaluator"),
    "reward.custom_reward_function.path": ((None, ""), f"{EVALUATOR}: write the function with @rllm.evaluator"),
    "reward_model.enable": ((None, False), f"{EVALUATOR}; it may ask a model of its own"),
    "reward.reward_model.enable": ((None, False), f"{EVALUATOR}; it may ask a model of its own"),
    "distillation.enabled": ((False,), _TEACHER),
    "rllm.distill.enable": ((False,), _TEACHER),
    "rllm.remote_runtime.enabled": ((False,), "flows run in this process"),
    "trainer.checkpoint_callback_class": ((None,), "a run saves by trainer.save_freq"),
    "trainer.v1.sampler.custom_sampler.path": ((None,), "rows are used in the step that sampled them"),
    "critic.enable": ((None, False), NO_CRITIC),
    f"{ACTOR}.optim.optimizer": (("AdamW", None), "the optimizer is AdamW"),
    f"{ACTOR}.optim.optimizer_impl": (("torch.optim", None), "the optimizer is AdamW"),
    f"{ACTOR}.optim.override_optimizer_config": ((None, {}), "the optimizer is AdamW with the keys of optim"),
    f"{ACTOR}.optim.zero_indexed_step": ((True, None), "steps of the schedule count from 0"),
    f"{ACTOR}.qat.enable": ((False,), "weights are trained as they are"),
    f"{ROLLOUT}.do_sample": ((True,), "greedy samples of one task are all the same"),
    f"{ROLLOUT}.over_sample_rate": ((0,), "every episode that was started is used or counted as failed"),
    f"{ROLLOUT}.quantization": ((None,), "set model.quantization"),
    f"{ROLLOUT}.enable_rollout_routing_replay": ((False,), "routers are run as they are, none is replayed"),
    f"{ROLLOUT}.agent.agent_loop_config_path": ((None,), "an agent is a function with @rllm.rollout"),
    f"{ROLLOUT}.agent.custom_async_server.path": ((None,), ENGINE),
    f"{MODEL}.hf_config_path": ((None,), "config, tokenizer and weights are in model.path"),
    f"{MODEL}.tokenizer_path": ((None,), "config, tokenizer and weights are in model.path"),
    f"{MODEL}.custom_chat_template": ((None,), "the chat template is the one in model.path"),
    f"{MODEL}.external_lib": ((None,), "no code of a model folder is ever run"),
    f"{MODEL}.override_config": ((None, {}), "the model is as its config.json says"),
    f"{MODEL}.mtp.enable": ((False,), "multi-token prediction is not built"),
    f"{MODEL}.lora.dropout_position": (("pre",), "dropout acts on the adapter's inputs"),
    f"{MODEL}.lora.lora_B_init_method": (("zero",), "a fresh adapter changes nothing, so B starts as zero"),
    "data.custom_cls.path": ((None,), f"{ROWS}: give AgentTrainer(train_dataset=...)"),
    "data.train_max_samples": ((-1, None), "give a smaller data.train_files"),
    "algorithm.use_pf_ppo": ((False,), "samples are not reweighted"),
    "rllm.workflow.workflow_args.gamma": ((0,), "returns are not discounted"),
    "rllm.workflow.workflow_args.reward_bonus_coeff": ((0,), "rewards are not shaped"),
    "training.num_minibatches": ((1,), "say how many tasks an optimizer step takes: algorithm.mini_batch_size"),
}
