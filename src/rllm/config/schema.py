"""The one config tree. Field descriptions are the user's reference (`rllm train --help` prints them).

Knows nothing about files, the command line or other tools' spellings: see `load.py` and `aliases.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rllm.config.names import TEMPLATE_RESERVED
from rllm.config.schema_algorithm import AlgorithmConfig
from rllm.config.schema_distill import DistillConfig
from rllm.config.schema_tinker import TinkerConfig
from rllm.config.section import Fraction, Section

ROLE_NAME = r"[A-Za-z0-9._-]{1,64}"
# Names that mean something else where an adapter is named.
RESERVED_ROLES = ("base", "initial")
# A division of logits by less overflows float32 for ordinary models; 0 is greedy.
MIN_TEMPERATURE = 1e-5
LATEST_RUN = "latest"
"""The link to the newest run, beside the run folders."""


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

    @property
    def trains_adapters(self) -> bool:
        """False: all weights are trained. The shared `rank` alone does not say it where roles have adapters of their own."""
        return self.per_role != "shared" or self.rank > 0

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
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Settings of the chat template where a call does not give them, e.g. {enable_thinking: false}",
    )
    max_tokens: int | None = Field(
        default=None, gt=0, description="Most tokens per completion; default: data.max_response_length"
    )
    engine: Literal["local", "vllm"] = Field(
        default="local",
        description="What samples on this machine: the engine that is built in, or vLLM with the adapters loaded after every step (CUDA, LoRA)",
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
    reasoning: Literal["content", "split"] = Field(
        default="content",
        description="Where callers find <think> blocks: in the content, or split off as reasoning_content (the tokens are the same)",
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

    @field_validator("temperature", "val_temperature")
    @classmethod
    def _greedy_or_warm(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"input should be 0 (greedy) or at least {MIN_TEMPERATURE:g}")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not name.isidentifier() or name in TEMPLATE_RESERVED:
                raise ValueError(
                    f"{name!r} is no setting of a template's own; allowed are names that the template reads"
                )
        return value


class OptimConfig(Section):
    lr: float = Field(
        default=1e-3, gt=0, description="Learning rate of AdamW; LoRA wants about 10x that of full fine-tuning"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW beta1")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW beta2")
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
    save_freq: int = Field(
        default=0,
        ge=0,
        description="Save the adapter, and the state to resume from, every N steps (0: only at the end)",
    )
    resume: str | None = Field(
        default=None,
        description="Go on with the run in this folder as if it had not stopped; auto: with the one of trainer.experiment_name, if it has "
        "a state",
    )
    val_before_train: bool = Field(default=True, description="Validate before the first step")
    val_only: bool = Field(default=False, description="Validate once and stop")
    early_stop: EarlyStopConfig = Field(default_factory=EarlyStopConfig)
    logger: list[str] = Field(
        default_factory=lambda: ["console"], description="console, tensorboard, wandb (metrics.jsonl is always written)"
    )
    overlap: bool = Field(
        default=False,
        description="Train groups whose episodes are finished while others still run (on CPU, where flows wait for their tools); the "
        "gradient is the same but for the order of its sums",
    )
    publish_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest difference of log-probabilities between sampler and trainer that a run goes on with, measured after "
        "every publish; default: 1e-3 in float32, 0.3 in bfloat16",
    )
    project_name: str = Field(default="rllm", description="Project of the run in W&B (logger wandb)")
    experiment_name: str | None = Field(default=None, description="Name of the run folder; default: date and time")
    run_dir: str = Field(default="runs", description="Folder that holds the run folders")
    seed: int = Field(default=0, ge=0, description="Seed of everything: adapter init, task order, sampling")
    log_episodes: bool = Field(default=True, description="Write episodes.jsonl")

    @field_validator("logger", mode="before")
    @classmethod
    def _one_logger(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("experiment_name")
    @classmethod
    def _names_a_folder(cls, value: str | None) -> str | None:
        if value is not None and ("/" in value or value in ("", ".", "..", LATEST_RUN)):
            raise ValueError(f"{value!r} cannot name a folder of its own; use letters, digits, '.', '_' and '-'")
        return value


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
    distill: DistillConfig = Field(default_factory=DistillConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    tinker: TinkerConfig = Field(default_factory=TinkerConfig)
    backend: Literal["local", "tinker", "verl"] = Field(
        default="local",
        description="What holds the weights: local (this process) | tinker (a server of Tinker's API) | verl (verl 0.9.1 on Ray: one machine or many)",
    )
    verl: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of verl's own config that have no name here, e.g. {trainer.nnodes: 2}; only with backend=verl, which passes "
        "them on as they are",
    )

    @field_validator("verl")
    @classmethod
    def _flat_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Nested sections as dotted keys, which is how verl's tree is overridden."""
        return {key: item for name, inner in value.items() for key, item in _dotted(name, inner)}


def _dotted(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, item in value.items():
        yield from _dotted(f"{name}.{key}", item)
