"""The `algorithm` section of the config tree: estimators, losses, KL terms, the update, corrections and filters.

Knows nothing about files, the command line or other tools' spellings.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from rllm.config.names import AGGREGATIONS, ESTIMATOR_WORDS, ESTIMATORS, LOSS_WORDS, LOSSES, NO_RATIO
from rllm.config.section import Fraction, Section


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

    @field_validator("adv_estimator", mode="before")
    @classmethod
    def _our_estimator(cls, value: Any) -> Any:
        return ESTIMATOR_WORDS.get(value, value) if isinstance(value, str) else value

    @field_validator("loss", mode="before")
    @classmethod
    def _our_loss(cls, value: Any) -> Any:
        return LOSS_WORDS.get(value, value) if isinstance(value, str) else value


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
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="How many policy versions older than the current one a sampled token may be; what is older is not trained",
    )
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

    def estimators(self) -> set[str]:
        """Every estimator that is named, of single roles too."""
        return {self.adv_estimator, *(own.adv_estimator for own in self.per_role.values() if own.adv_estimator)}

    def losses(self) -> set[str]:
        """Every loss that is named, of single roles too."""
        return {self.loss, *(own.loss for own in self.per_role.values() if own.loss)}

    def takes_ratio(self) -> bool:
        """Whether a loss compares the policy with the one before the update; a loss of the user's may."""
        return not self.losses() <= NO_RATIO
