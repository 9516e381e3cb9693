"""What is trained and how: the row of tokens, the advantage estimator and the loss, as plain data.

Shared by the algorithms, which build them, and the backends, which run them. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BASE = "base"
"""Adapter name that means: the base model, adapter off."""
DEFAULT_ADAPTER = "default"
"""Name of the adapter all roles share unless they have their own."""
INITIAL_ADAPTER = "initial"
"""Name of the adapter as it was before the first step. With LoRA it costs nothing to keep, so the starting policy can be sampled
at any time; full fine-tuning has none."""
TEACHER = "distill:teacher"
"""Name of the policy that ``distill.teacher`` and ``distill.adapter`` give. No role can be called so."""


def initial_of(adapter: str) -> str:
    """Name of an adapter as it was before the first step."""
    return INITIAL_ADAPTER if adapter == DEFAULT_ADAPTER else f"{INITIAL_ADAPTER}:{adapter}"


Std = Literal["sample", "population", "none"]
KlEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


@dataclass
class Datum:
    """One row to train on. All per-token lists have the length of `ids`; entry t speaks of *predicting* `ids[t]` from
    `ids[:t]`. `mask[t]` is 1 where the token was sampled by the policy and is trained, else 0 (`mask[0]` must be 0).
    `advantages`, `logprobs` (of the sampler) are 0 where the mask is 0. Three lists are optional. Where they are empty,
    `old_logprobs` (of the policy that the ratio of the loss is taken to) are `logprobs`, and `weights` (on each token's policy
    loss) are 1; `ref_logprobs` (of the reference policy) must be there if, and only if, the loss has a KL term. `call` is the id of
    the row's first step."""

    ids: list[int]
    mask: list[int]
    advantages: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    old_logprobs: list[float] = field(default_factory=list)
    ref_logprobs: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    temperature: float = 1.0
    adapter: str = DEFAULT_ADAPTER
    role: str = ""
    call: str = ""

    @property
    def n_trained(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True)
class LossSpec:
    """Which loss, with its settings, and how token losses become one number (see `rllm.algorithms.losses`).

    `clip_c` 0: no dual clip. `norm`: constant that ``seq-mean-token-sum-norm`` divides by. `kl_beta` weighs the KL term to
    `Datum.ref_logprobs`, `entropy_coeff` the entropy bonus; 0 is none. `options` are those of single losses (dro: ``beta``).
    """

    name: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 0.0
    aggregation: str = "token-mean"
    norm: float | None = None
    kl_beta: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coeff: float = 0.0
    options: Mapping[str, float] = field(default_factory=dict)


Losses = LossSpec | Mapping[str, LossSpec]
"""One loss for all rows, or one for each role; the key "" stands for the roles that are not named."""


def loss_of(losses: Losses, role: str) -> LossSpec:
    """The loss of the rows of one role."""
    if isinstance(losses, LossSpec):
        return losses
    if role in losses:
        return losses[role]
    if "" in losses:
        return losses[""]
    raise KeyError(f"no loss for role {role!r}; there are losses for {', '.join(losses)}")
