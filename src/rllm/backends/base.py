"""The contract between the trainer and whatever holds the weights, and the one table of what each backend can do.

Knows no torch. The primitives are Tinker's: sample, forward_backward, optim_step, publish, save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rllm.algorithms.spec import BASE, DEFAULT_ADAPTER, INITIAL_ADAPTER, TEACHER, Datum, Losses, LossSpec, initial_of
from rllm.config.names import VLLM_MAX_RANK
from rllm.config.schema import Config, LoraSettings
from rllm.errors import ConfigError
from rllm.lora.groups import module_groups

__all__ = [
    "BASE",
    "CAPABILITIES",
    "DEFAULT_ADAPTER",
    "INITIAL_ADAPTER",
    "TEACHER",
    "AdamParams",
    "Backend",
    "Capabilities",
    "Completion",
    "Datum",
    "LossSpec",
    "Losses",
    "OnToken",
    "OverlappingBackend",
    "PipelinedBackend",
    "Probe",
    "SamplingParams",
    "Scored",
    "initial_of",
    "refuse_impossible",
]

FinishReason = Literal["stop", "length"]
OnToken = Callable[[int, float], None]
"""Hears each token as it is sampled: (id, log-probability)."""

# An odd constant (the golden ratio's digits) that gives every completion of a request a seed of its own.
SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion. `seed` None: the engine draws one. `max_tokens` counts the end-of-turn token, which does not end the
    completion where `ignore_eos`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def of_choice(self, i: int) -> SamplingParams:
        """The same for completion `i` of several with one prompt: a seed gives each one of its own, the first that of a single one."""
        return self if self.seed is None or i == 0 else replace(self, seed=(self.seed + i * SEED_STEP) % 2**63)


@dataclass
class Completion:
    """What was sampled. `logprobs[i]` belongs to `ids[i]` under the *tempered* distribution (temperature 0 reports the
    untempered log-probability of the argmax); `versions[i]` is the policy version that sampled it. The end-of-turn token,
    when one was sampled, is the last of `ids`."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


@dataclass
class Scored:
    """What a policy says of given tokens, without temperature: entry t speaks of `ids[t]` after `ids[:t]`, so there is none for the
    first. `ranks` count from 1, the likeliest; `best_ids` and `best_logprobs` are the likeliest token there."""

    logprobs: list[float]
    ranks: list[int]
    best_ids: list[int]
    best_logprobs: list[float]


@dataclass(frozen=True)
class AdamParams:
    """One optimizer step. `grad_clip` 0 = off."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0


MAX_SKIPPED_STEPS = 3
"""Optimizer steps in a row that may change nothing, because loss or gradient is not finite, before a run ends."""

PROBE_TEXTS = ("The sum of 17 and 25 is", "One of the solutions is right:")
"""The prompts of `Backend.probe`."""
PROBE_TOKENS = 8


def sampler_gaps(rows: Sequence[Datum], trained: Sequence[Sequence[float]]) -> list[float]:
    """By how much the sampler's log-probabilities of the trained tokens of `rows`, row after row, differ from the trainer's."""
    return [
        abs(sampled - value)
        for row, values in zip(rows, trained, strict=True)
        for sampled, value, m in zip(row.logprobs, values, row.mask, strict=True)
        if m
    ]


@dataclass(frozen=True)
class Probe:
    """What a comparison of sampler and trainer on fixed prompts found. Gaps are absolute differences of log-probabilities of
    sampled tokens. `same_weights`: the sampler holds the trained adapters bit for bit (with full fine-tuning they are one)."""

    sampler_version: int
    trainer_version: int
    gap_max: float
    gap_mean: float
    same_weights: bool
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.same_weights and self.sampler_version == self.trainer_version and self.gap_max <= self.tolerance


class Backend(Protocol):
    """Holds the base, the adapters, the optimizer and the sampler. `sample` may be called from any event loop or thread;
    the training calls are made one at a time by the trainer."""

    model_name: str
    tokenizer: Any
    max_model_len: int
    published_bytes: int
    """What the last publish moved to the sampler: adapters only, never the base; 0 where both share the weights."""

    @property
    def policy_version(self) -> int: ...

    async def sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        adapter: str = DEFAULT_ADAPTER,
        on_token: OnToken | None = None,
    ) -> Completion:
        """One completion. `on_token` is called in the caller's event loop for every token, in order, before this returns.
        Cancelling the call ends the sampling."""
        ...

    def forward_backward(self, data: Sequence[Datum], loss: Losses) -> dict[str, float]:
        """Accumulate gradients of the aggregated loss over all of `data`. `loss` may differ by role; the denominators of the
        aggregation are those of all rows either way, so that roles weigh as they would under one loss.

        Returns means over trained tokens: ``loss``, ``tokens`` (their number), ``entropy`` (nats), ``clip_fraction``, ``ratio_mean``,
        ``ratio_max`` and ``ess`` (effective sample size of the ratios, as a share), the KL divergences ``ppo_kl`` (k1) and
        ``ppo_kl_k3`` of the old policy from the new, ``kl_ref`` (k3) and ``kl_ref_k1`` of the policy from the reference if there is a
        KL term, ``sampler_kl`` (k3) of the sampler from the trainer, and ``sampler_gap_max``, the largest difference of
        log-probabilities between these two."""
        ...

    def logprobs(
        self, data: Sequence[Datum], adapter: str | None = None, trained_only: bool = False
    ) -> list[list[float]]:
        """Teacher-forced log-probability of every token of every row (entry 0 is 0.0), at the row's temperature.
        `adapter` None: each row's own; `BASE`: adapter off; `INITIAL_ADAPTER`: each row's own as it was before the first step;
        `TEACHER`: the model that ``distill`` names.
        `trained_only`: entries where the mask is 0 are 0.0, and the others come from the very computation that
        `forward_backward` makes, so that equal weights give equal numbers."""
        ...

    def score(self, ids: Sequence[int], adapter: str = DEFAULT_ADAPTER) -> Scored:
        """What the policy `adapter` says of a text of at least two tokens; the lists have one entry less than `ids`. May be called from
        any thread while nothing is trained."""
        ...

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Clip, step, zero the gradients. Returns ``grad_norm``. A non-finite norm changes nothing and returns it."""
        ...

    def discard_gradients(self) -> None:
        """Forget what `forward_backward` accumulated, without a step."""
        ...

    def publish(self) -> int:
        """Make the newest weights the sampled ones; returns the new policy version."""
        ...

    def save_state(self, path: Path) -> None: ...

    def load_state(self, path: Path) -> None: ...

    def probe(self) -> Probe:
        """Sample a little with what the sampler has and compare with the trainer's log-probabilities of the same tokens."""
        ...

    def export_adapter(self, path: Path, facts: Mapping[str, Any] | None = None) -> dict[str, Path]:
        """Write the trained weights for other tools, verified by reloading: a PEFT folder, one in a subfolder for each role, or a
        full model. Returns the folders by adapter name. `facts` go into the model card."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for the start banner: parameters trained / total, targets matched, dtypes, device."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class PipelinedBackend(Protocol):
    """A backend at the end of a wire, which is asked for the optimizer step before it has answered about the gradient."""

    def train_step(self, data: Sequence[Datum], loss: Losses, params: AdamParams) -> dict[str, float]:
        """`Backend.forward_backward`, then `Backend.optim_step`; the metrics of both. Where loss or gradient is not finite nothing
        changes and ``grad_norm`` is not finite."""
        ...


@runtime_checkable
class OverlappingBackend(Protocol):
    """A backend that can train rows of a step while it samples the others."""

    tokens_at_once: int
    """As many tokens are worth a call of `train_ahead`."""

    def train_ahead(self, data: Sequence[Datum], loss: Losses) -> None:
        """Accumulate gradients of rows of an optimizer step of which others are not there yet. May be called from another thread than
        the trainer's while `sample` runs, one call at a time. `forward_backward` of the others with these as `ahead`, or
        `discard_gradients`, must follow."""
        ...

    def forward_backward(self, data: Sequence[Datum], loss: Losses, ahead: Sequence[Datum] = ()) -> dict[str, float]:
        """`Backend.forward_backward` of `data` and `ahead` together, the gradients of `ahead` being there."""
        ...


@dataclass(frozen=True)
class Capabilities:
    """One row of the capability table. `rllm doctor` prints it; `refuse_impossible` holds configs against it."""

    full_finetuning: bool
    adapter_per_role: bool
    max_lora_rank: int
    top_p_in_training: bool
    temperature_in_training: bool
    entropy_bonus: bool
    losses: frozenset[str]
    lora_options: frozenset[str]
    devices: frozenset[str]
    dtypes: frozenset[str]
    quantization: frozenset[str]
    teachers: frozenset[str]
    overlap: bool


LORA_OPTIONS: dict[str, str] = {
    "target_modules": "whole groups of layers only: all-linear, or all of the attention's, the MLP's or the output head's names; or leave "
    "it out and say lora.train_attn, train_mlp, train_unembed",
    "exclude_modules": "whole groups of layers only: say lora.train_attn, train_mlp, train_unembed",
    "rank_pattern": "one rank for all modules; leave it out",
    "alpha_pattern": "one alpha for all modules; leave it out",
    "use_rslora": "the scale is alpha / rank; leave it out",
    "dropout": "no dropout; leave it out",
    "adapter_path": "a fresh adapter only; leave it out, or go on from a saved state with trainer.resume",
}
"""Settings of an adapter that a backend may not have, and what it has instead."""

CAPABILITIES: dict[str, Capabilities] = {
    "local": Capabilities(
        full_finetuning=True,
        adapter_per_role=True,
        max_lora_rank=4096,
        top_p_in_training=False,
        temperature_in_training=True,
        entropy_bonus=True,
        losses=frozenset({"ppo_clip", "importance_sampling", "cispo", "gspo", "dro", "reinforce", "cross_entropy"}),
        lora_options=frozenset(LORA_OPTIONS),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        quantization=frozenset({"none", "nf4"}),
        teachers=frozenset({"model", "endpoint"}),
        overlap=True,
    ),
    "tinker": Capabilities(
        full_finetuning=False,
        adapter_per_role=True,
        max_lora_rank=4096,  # what the model's server says may be less
        top_p_in_training=False,
        temperature_in_training=False,
        entropy_bonus=False,
        losses=frozenset({"ppo_clip", "importance_sampling", "cispo", "gspo", "dro", "reinforce", "cross_entropy"}),
        lora_options=frozenset(),
        devices=frozenset({"auto"}),
        dtypes=frozenset({"auto"}),
        quantization=frozenset({"none"}),
        teachers=frozenset({"endpoint"}),
        overlap=False,
    ),
    # verl 0.9.1 with FSDP and vLLM, whose max_lora_rank ends at 512. What it cannot do besides: `rllm.backends.verl.render.refuse`.
    "verl": Capabilities(
        full_finetuning=True,
        adapter_per_role=False,
        max_lora_rank=VLLM_MAX_RANK,
        top_p_in_training=False,
        temperature_in_training=True,
        entropy_bonus=True,
        losses=frozenset({"ppo_clip", "gspo", "cispo"}),
        lora_options=frozenset({"target_modules", "exclude_modules", "adapter_path"}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        quantization=frozenset({"none"}),
        teachers=frozenset(),
        overlap=False,
    ),
}


# A loss that no row names is one that the user brought.
_NAMED_LOSSES = frozenset().union(*(row.losses for row in CAPABILITIES.values()))


def refuse_impossible(config: Config, provenance: Mapping[str, str] | None = None, training: bool = True) -> None:
    """Raise a `ConfigError` for the first thing that `config` asks of its backend and the table says it cannot do."""
    can = CAPABILITIES[config.backend]
    adapters = config.lora.adapters()
    for name, settings in adapters.items():
        key = "lora.rank" if config.lora.per_role == "shared" else f"lora.per_role.{name}.rank"
        highest = max([settings.rank, *settings.rank_pattern.values()])
        _require(
            highest <= can.max_lora_rank, config, provenance, key, highest, f"ranks go up to {can.max_lora_rank} there"
        )
    device = config.model.device.partition(":")[0]
    choices: list[tuple[str, str, frozenset[str]]] = [
        ("model.device", device, can.devices | {"auto"}),
        ("model.dtype", config.model.dtype, can.dtypes | {"auto"}),
        ("model.quantization", config.model.quantization, can.quantization),
    ]
    if training:
        roles = config.algorithm.per_role.items()
        losses = [("algorithm.loss", config.algorithm.loss)]
        losses += [(f"algorithm.per_role.{role}.loss", own.loss) for role, own in roles if own.loss]
        choices += [(key, name, can.losses) for key, name in losses if name in _NAMED_LOSSES]
        if config.distill.enabled:
            kind, key = ("model", "distill.teacher") if config.distill.local else ("endpoint", "distill.base_url")
            choices.append((key, kind, can.teachers))
    for key, value, allowed in choices:
        instead = f"it can do {', '.join(sorted(allowed))}" if allowed else "leave it out"
        _require(value in allowed, config, provenance, key, value, instead)
    _refuse_lora_options(config, can, provenance)
    _require(
        can.full_finetuning or bool(adapters),
        config,
        provenance,
        "lora.rank",
        0,
        "it trains adapters only; give lora.rank at least 1",
    )
    _require(
        can.adapter_per_role or config.lora.per_role == "shared",
        config,
        provenance,
        "lora.per_role",
        ", ".join(adapters),
        "it trains one adapter; set lora.per_role=shared",
    )
    if config.backend == "verl" and training:
        from rllm.backends.verl.render import refuse

        refuse(config, provenance)
    elif config.verl:
        _require(False, config, provenance, "verl", ", ".join(config.verl), "these keys are verl's: add backend=verl")
    if not training or config.trainer.val_only:
        return
    _require(
        can.temperature_in_training or config.rollout.temperature == 1.0,
        config,
        provenance,
        "rollout.temperature",
        f"{config.rollout.temperature:g}",
        "it computes log-probabilities at temperature 1, so set rollout.temperature=1 (rollout.val_temperature is free)",
    )
    _require(
        can.entropy_bonus or config.algorithm.entropy_coeff == 0,
        config,
        provenance,
        "algorithm.entropy_coeff",
        f"{config.algorithm.entropy_coeff:g}",
        "it tells the log-probabilities of given tokens only; set algorithm.entropy_coeff=0",
    )
    _require(
        can.overlap or not config.trainer.overlap,
        config,
        provenance,
        "trainer.overlap",
        "true",
        "its rows are trained when all of them are there; leave it out",
    )
    _require(
        can.top_p_in_training or config.rollout.top_p == 1.0,
        config,
        provenance,
        "rollout.top_p",
        f"{config.rollout.top_p:g}",
        "the log-probabilities trained on would not be those sampled from; set rollout.top_p=1",
    )


def _refuse_lora_options(config: Config, can: Capabilities, provenance: Mapping[str, str] | None) -> None:
    start = "lora" if config.lora.per_role == "shared" else "lora.per_role"
    for role, settings in config.lora.adapters().items():
        for name, instead in LORA_OPTIONS.items():
            value = getattr(settings, name)
            plain = value == LoraSettings.model_fields[name].get_default(call_default_factory=True)
            possible = (
                plain or name in can.lora_options or (name == "target_modules" and module_groups(value) is not None)
            )
            key = f"{start}.{name}" if start == "lora" else f"{start}.{role}.{name}"
            _require(possible, config, provenance, key, value, instead)


def _require(
    possible: bool, config: Config, provenance: Mapping[str, str] | None, key: str, value: Any, instead: str
) -> None:
    if possible:
        return
    source = next(
        (where for name, where in (provenance or {}).items() if key == name or key.startswith(f"{name}.")), ""
    )
    start = f"{source}: " if source else ""
    raise ConfigError(f"{start}{key}={value}: the {config.backend} backend cannot do this; {instead}")
