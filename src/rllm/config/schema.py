"""The one config tree. Field descriptions are the user's reference (`rllm train --help` prints them).

Knows nothing about files, the command line or other tools' spellings: see `load.py` and `aliases.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from rllm.config.names import AGGREGATIONS, ESTIMATORS, LOSSES

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
ROLE_NAME = r"[A-Za-z0-9._-]{1,64}"
# Names that mean something else where an adapter is named.
RESERVED_ROLES = ("base", "initial")


class Section(BaseModel):
    """Strict: unknown keys are errors, numbers are finite, and true is not taken for 1."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("true and false have no meaning here")
        return value


class ModelConfig(Section):
    path: str = Field(
        default="default",
        description="Folder or hub id of a causal LM; `default` is the small model inside the package",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Dtype of the base; auto: bfloat16 on CUDA, float32 on CPU"
    )
    device: str = Field(default="auto", description="auto | cpu | cuda | cuda:N")
    quantization: Literal["none", "nf4"] = Field(
        default="none", description="Keep the frozen base in 4 bits (QLoRA): nf4 needs CUDA and bitsandbytes"
    )
    max_model_len: int | None = Field(
        default=None,
        gt=0,
        description="Longest prompt + completion in tokens; default: what the model and data limits allow",
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("no such device")
        return value


class LoraSettings(Section):
    """One adapter: how large it is and on which layers."""

    rank: int = Field(
        default=8, ge=0, le=4096, description="Rank of the adapter; 0 trains all weights (full fine-tuning)"
    )
    alpha: float = Field(
        default=16, gt=0, description="Scale of the update is alpha / rank (use_rslora: alpha / sqrt(rank))"
    )
    target_modules: str | list[str] = Field(
        default="all-linear", description="`all-linear`, a list of names or dotted suffixes, or one full-match regex"
    )
    exclude_modules: str | list[str] | None = Field(
        default=None,
        description="Modules left out: a full-match regex, or a list of names or suffixes; wins over target_modules",
    )
    train_attn: bool = Field(default=True, description="Adapt the attention matrices among the targets")
    train_mlp: bool = Field(default=True, description="Adapt the MLP matrices among the targets")
    train_unembed: bool = Field(default=False, description="Adapt the output head (lm_head) too")
    rank_pattern: dict[str, Annotated[int, Field(gt=0, le=4096)]] = Field(
        default_factory=dict,
        description="Other ranks for some modules: {regex for the end of a dotted name: rank}, first match counts",
    )
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Other alphas for some modules, in the same way"
    )
    use_rslora: bool = Field(default=False, description="Rank-stabilised LoRA: scale is alpha / sqrt(rank)")
    use_dora: bool = Field(default=False, description="DoRA; not built yet, so only false is allowed")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the adapter's inputs dropped in training (0: none, usual in RL)"
    )
    adapter_path: str | None = Field(default=None, description="PEFT LoRA folder to start from")

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _usable_names(cls, value: str | list[str] | None, info: ValidationInfo) -> str | list[str] | None:
        """What no model could match is told before one is loaded."""
        if isinstance(value, str):
            _check_regex(value)
        elif value is not None and info.field_name == "target_modules":
            if "all-linear" in value:
                raise ValueError("all-linear stands alone: write target_modules=all-linear, not in a list")
            if not value:
                raise ValueError(
                    "an empty list trains nothing; write all-linear, a list of names, or lora.rank=0 for full fine-tuning"
                )
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError("an empty name matches nothing")
        return value

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _usable_patterns(cls, value: dict[str, Any]) -> dict[str, Any]:
        for pattern in value:
            _check_regex(pattern)
        return value

    @field_validator("use_dora")
    @classmethod
    def _no_dora(cls, value: bool) -> bool:
        if value:
            raise ValueError("DoRA is not built yet; leave it out for plain LoRA")
        return value


class LoraConfig(LoraSettings):
    per_role: Literal["shared"] | dict[str, LoraSettings] = Field(
        default="shared",
        description="One adapter for all roles (`shared`), or one for each: {solver: {rank: 8}, judge: {}}; what a role does not "
        "say is as above, and a role named `default` stands for all that are not named",
    )

    @model_validator(mode="after")
    def _complete_roles(self) -> LoraConfig:
        """What a role leaves open is as the shared settings say."""
        if self.per_role == "shared":
            return self
        if not self.per_role:
            raise ValueError("lora.per_role names no role; write shared, or {solver: {}, judge: {}}")
        shared = self.model_dump(exclude={"per_role"})
        for role, own in self.per_role.items():
            if not re.fullmatch(ROLE_NAME, role) or role in RESERVED_ROLES:
                raise ValueError(
                    f"lora.per_role: {role!r} cannot be the name of an adapter; use letters, digits, '.', '_', '-', and none of "
                    f"{', '.join(RESERVED_ROLES)}"
                )
            given = {name: getattr(own, name) for name in own.model_fields_set}
            self.per_role[role] = LoraSettings(**{**shared, **given})
            if not self.per_role[role].rank:
                raise ValueError(
                    f"lora.per_role.{role}: rank 0 is full fine-tuning, which is for all roles or none; give it a rank"
                )
        return self

    def adapters(self) -> dict[str, LoraSettings]:
        """The adapters to train by name; none with full fine-tuning."""
        if self.per_role != "shared":
            return dict(self.per_role)
        return {"default": self} if self.rank else {}


def _check_regex(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{pattern!r} is not a valid regular expression ({error}); names of layers go in a list, e.g. [q_proj,v_proj]"
        ) from None


class DataConfig(Section):
    train_files: str | list[str] | None = Field(
        default=None, description="JSONL, JSON, CSV or Parquet file(s), or a built-in dataset name such as `countdown`"
    )
    val_files: str | list[str] | None = Field(default=None, description="The same for validation")
    train_batch_size: int = Field(default=16, gt=0, description="Tasks per training step")
    val_size: int | None = Field(default=None, gt=0, description="Use only the first N validation tasks")
    max_prompt_length: int = Field(
        default=2048, gt=0, description="Longest prompt in tokens; a longer one fails that call with a clear error"
    )
    max_response_length: int = Field(
        default=512, gt=0, description="Most tokens per completion where a call does not say"
    )
    shuffle: bool = Field(default=True, description="Shuffle the training tasks each epoch (seeded)")
    seed: int | None = Field(default=None, description="Seed of the task order; default: trainer.seed")


class RolloutConfig(Section):
    n: int = Field(default=4, gt=0, description="Episodes per training task (the group size)")
    n_val: int = Field(default=1, gt=0, description="Episodes per validation task")
    temperature: float = Field(
        default=1.0, ge=0, description="Sampling temperature in training; enters the log-probabilities on both sides"
    )
    val_temperature: float | None = Field(
        default=None, ge=0, description="Sampling temperature in validation; default: rollout.temperature"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling; must be 1 in training")
    max_tokens: int | None = Field(
        default=None, gt=0, description="Most tokens per completion; default: data.max_response_length"
    )
    max_batch: int = Field(default=128, gt=0, description="Most sequences the sampler decodes at once")
    max_concurrency: int = Field(default=128, gt=0, description="Most episodes running at once")
    max_tokens_in_flight: int | None = Field(
        default=None,
        gt=0,
        description="Most tokens (prompt + most that may be sampled) of the calls being answered at once; others wait",
    )
    episode_timeout_s: float = Field(
        default=600.0, gt=0, description="Deadline of one episode, the evaluator's own run included"
    )
    call_timeout_s: float | None = Field(
        default=None, gt=0, description="Deadline of one model call, waiting included; default: the episode's alone"
    )
    reward_timeout_s: float = Field(default=60.0, gt=0, description="Deadline of one run of the evaluator")
    reward_workers: int = Field(
        default=2,
        ge=0,
        le=256,
        description="Processes that run a sync evaluator, so that one that never returns can be ended; 0: a thread of this process",
    )
    retries: int = Field(default=0, ge=0, description="How often a failed episode is tried again")
    max_failed_fraction: Fraction = Field(
        default=0.5, description="Above this share of failed episodes in a step the run stops with the first traceback"
    )


class OptimConfig(Section):
    lr: float = Field(
        default=1e-3, gt=0, description="Learning rate of AdamW; LoRA wants about 10x that of full fine-tuning"
    )
    beta1: Fraction = Field(default=0.9, description="AdamW beta1")
    beta2: Fraction = Field(default=0.95, description="AdamW beta2")
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay")
    grad_clip: float = Field(default=1.0, ge=0, description="Global gradient norm limit; 0: off")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Course of the learning rate after warm-up"
    )
    warmup_steps: int | None = Field(
        default=None, ge=0, description="Steps in which the rate rises from 0; wins over warmup_ratio"
    )
    warmup_ratio: Fraction = Field(default=0.0, description="Share of the steps in which the rate rises from 0")
    min_lr_ratio: Fraction = Field(default=0.0, description="Share of the peak rate that is left at the end")


class RolloutCorrectionConfig(Section):
    """Importance weights for the difference between sampler and trainer; see `rllm.algorithms.correction`."""

    level: Literal["none", "token", "sequence", "geometric"] = Field(
        default="none",
        description="Weigh by p_trainer / p_sampler: not | per token | product over the row | its geometric mean",
    )
    mode: Literal["truncate", "mask"] = Field(
        default="truncate",
        description="Weights above cap become cap (truncate), or those outside [floor, cap] become 0 (mask)",
    )
    cap: float = Field(default=2.0, gt=0, description="Largest weight")
    floor: float | None = Field(default=None, ge=0, description="Smallest weight that mode=mask keeps; default: 1/cap")


class FilterConfig(Section):
    """Episodes that are not trained, by why they ended. Failed ones (error, timeout) never are."""

    enable: bool = Field(default=False, description="Leave out of training the episodes that ended for these reasons:")
    max_prompt_length_exceeded: bool = Field(default=True, description="the prompt became too long")
    max_response_length_exceeded: bool = Field(default=True, description="the response became too long")
    max_turns_exceeded: bool = Field(default=True, description="the episode used up its turns")
    env_done: bool = Field(default=False, description="the episode ended by itself")
    unknown: bool = Field(default=False, description="nobody said why")


class RejectionSamplingConfig(Section):
    enable: bool = Field(
        default=False,
        description="Sample more batches until data.train_batch_size tasks have rewards that differ (DAPO's dynamic sampling)",
    )
    max_batches: int = Field(
        default=10, ge=0, description="Most batches per step, which then trains what there is (0: no limit)"
    )


class RoleAlgorithm(Section):
    """What one role does otherwise than the others."""

    adv_estimator: str | None = Field(default=None, description="Advantage estimator of the role")
    loss: str | None = Field(default=None, description="Policy loss of the role")


class AlgorithmConfig(Section):
    adv_estimator: str = Field(default="grpo", description=f"Advantage estimator: {' | '.join(ESTIMATORS)}")
    grpo_std: Literal["sample", "population", "none"] = Field(
        default="sample",
        description="Estimators that normalise divide by: sample std (ddof=1) | population std | nothing",
    )
    zero_std: Literal["drop", "keep"] = Field(
        default="drop", description="Groups whose rewards are all equal: drop (counted) or keep with advantage 0"
    )
    stepwise: Literal["broadcast", "per_step"] = Field(
        default="broadcast",
        description="All steps of a trajectory share its advantage | each step's own return is compared with those of its index",
    )
    gamma: Fraction = Field(
        default=1.0, description="Discount of later steps in a step's return (stepwise=per_step; 0: own reward only)"
    )
    per_role: dict[str, RoleAlgorithm] = Field(
        default_factory=dict,
        description="Other estimators or losses for some roles: {judge: reinforce} or {judge: {adv_estimator: rloo, loss: gspo}}",
    )
    loss: str = Field(default="ppo_clip", description=f"Policy loss: {' | '.join(LOSSES)}")
    loss_options: dict[str, float] = Field(
        default_factory=dict, description="Numbers for single losses: {beta: 0.05} of dro, or those of your own loss"
    )
    loss_agg_mode: str = Field(
        default="token-mean", description=f"How token losses become one number: {' | '.join(AGGREGATIONS)}"
    )
    loss_scale_factor: float | None = Field(
        default=None,
        gt=0,
        description="Constant of seq-mean-token-sum-norm; default: the most tokens of a completion",
    )
    clip_ratio_low: float = Field(default=0.2, ge=0, description="Ratios are clipped below 1 by this much")
    clip_ratio_high: float = Field(default=0.2, ge=0, description="Ratios are clipped above 1 by this much")
    clip_ratio_c: float = Field(
        default=3.0, ge=0, description="Dual clip: with A < 0 the loss is at most this times -A; above 1, or 0: off"
    )
    kl_beta: float = Field(default=0.0, ge=0, description="Weight of the KL term to the reference policy (0: none)")
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        default="k3", description="Estimator of the KL term; k1+ and k3+ have the gradient of k2"
    )
    entropy_coeff: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus (0: none)")
    kl_in_reward: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL to the reference policy that is taken off each reward (0: none)",
    )
    reference: Literal["base", "initial_adapter", "none"] = Field(
        default="base",
        description="Reference policy of the KL: the base model | what training started from | no KL at all",
    )
    ppo_epochs: int = Field(default=1, gt=0, description="Passes over the rows of a step")
    mini_batch_size: int | None = Field(
        default=None, gt=0, description="Tasks per optimizer step; default: all of the step in one"
    )
    old_logprobs: Literal["auto", "sampler", "trainer"] = Field(
        default="auto",
        description="What the ratio of the loss is taken to: the sampler's log-probabilities | the trainer's, from a pass before the "
        "update | auto: the trainer's where a step has several optimizer steps",
    )
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    filter: FilterConfig = Field(default_factory=FilterConfig)
    mask_truncated: bool = Field(
        default=False, description="Do not train trajectories of which a completion was cut off at its token limit"
    )
    overlong_buffer: int = Field(
        default=0,
        ge=0,
        description="A completion that reaches into the last N tokens of its limit costs reward (0: off)",
    )
    overlong_penalty: float = Field(default=1.0, gt=0, description="What a completion at its limit costs")
    rejection_sampling: RejectionSamplingConfig = Field(default_factory=RejectionSamplingConfig)

    @field_validator("per_role", mode="before")
    @classmethod
    def _short_roles(cls, value: Any) -> Any:
        """``{judge: reinforce}`` says ``{judge: {adv_estimator: reinforce}}``."""
        if not isinstance(value, dict):
            return value
        return {role: {"adv_estimator": own} if isinstance(own, str) else own for role, own in value.items()}

    @field_validator("clip_ratio_c")
    @classmethod
    def _above_one_or_off(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError("a dual clip at or below 1 would stop every gradient; give more than 1, or 0 for none")
        return value


class EarlyStopConfig(Section):
    metric: str | None = Field(
        default=None, description="Validation metric to watch, e.g. val/countdown/judge_acc; default: no early stop"
    )
    mode: Literal["max", "min"] = Field(default="max", description="Whether more or less of it is better")
    patience: int = Field(
        default=3, gt=0, description="Validations in a row without a new best after which the run stops"
    )
    min_delta: float = Field(default=0.0, ge=0, description="What counts as better: by more than this")
    target: float | None = Field(default=None, description="Stop as soon as the metric is this good")


class TrainerConfig(Section):
    total_steps: int | None = Field(default=None, gt=0, description="Training steps; wins over total_epochs")
    total_epochs: int = Field(
        default=1, gt=0, description="Passes over the training tasks when total_steps is not given"
    )
    test_freq: int = Field(default=0, ge=0, description="Validate every N steps (0: only before and after)")
    save_freq: int = Field(default=0, ge=0, description="Save the adapter every N steps (0: only at the end)")
    val_before_train: bool = Field(default=True, description="Validate before the first step")
    val_only: bool = Field(default=False, description="Validate once and stop")
    early_stop: EarlyStopConfig = Field(default_factory=EarlyStopConfig)
    logger: list[str] = Field(
        default_factory=lambda: ["console"], description="console, tensorboard (metrics.jsonl is always written)"
    )
    publish_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest difference of log-probabilities between sampler and trainer that a run goes on with, measured after "
        "every publish; default: 1e-3 in float32, 0.1 in bfloat16",
    )
    experiment_name: str | None = Field(default=None, description="Name of the run folder; default: date and time")
    run_dir: str = Field(default="runs", description="Folder that holds the run folders")
    seed: int = Field(default=0, ge=0, description="Seed of everything: adapter init, task order, sampling")
    log_episodes: bool = Field(default=True, description="Write episodes.jsonl")

    @field_validator("logger", mode="before")
    @classmethod
    def _one_logger(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class GatewayConfig(Section):
    host: str = Field(default="127.0.0.1", description="Address the OpenAI endpoint listens on")
    port: int = Field(default=0, ge=0, le=65535, description="Port; 0: any free one")


class Config(Section):
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    backend: Literal["local"] = Field(default="local", description="What holds the weights: local")
