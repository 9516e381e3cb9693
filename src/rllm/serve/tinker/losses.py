"""Tinker's losses: sums over tokens, never means, and no mask but what the inputs say. See docs/tinker.md for the formulas in one table.

Pure functions of one row's numbers; nothing here knows of the wire or of models. ``lp`` [N] are the log-probabilities of the targets,
``q`` those given as `logprobs`, ``A`` the advantages, ``r = exp(lp - q)``. A step that wants a mean divides its weights or advantages.
Every loss takes `weights` (1 where left out), which multiply each token's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rllm.algorithms.losses import DRO_BETA, MAX_LOG_RATIO

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]
CLIP_KEYS = ("clip_low_threshold", "clip_high_threshold")
CLIPPED = ("weights", *CLIP_KEYS)


class LossError(ValueError):
    """Inputs or settings that a loss cannot be computed from."""


@dataclass(frozen=True)
class TinkerLoss:
    """`of` gives the loss of every token [N]. `optional` inputs may be left out, `settings` are the keys of ``loss_fn_config`` with
    their defaults. `trained` tells where the loss has a gradient."""

    of: Callable[[Tensor, Inputs, Settings], Tensor]
    required: tuple[str, ...] = ("logprobs", "advantages")
    optional: tuple[str, ...] = ("weights",)
    settings: Settings = field(default_factory=dict)
    trained: Callable[[Mapping[str, np.ndarray]], np.ndarray] = lambda inputs: inputs["advantages"] != 0


def cross_entropy(lp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """``-lp``, with targets and weights of shape [N] or [N, K]; weights may be negative or fractional."""
    return -lp


def importance_sampling(lp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """``-r A``: nothing is clipped."""
    return -_ratio(lp, inputs) * inputs["advantages"]


def ppo(lp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """``-min(r A, clip(r, low, high) A)`` (Schulman et al. 2017, eq. 7). The thresholds bound the ratio itself: 0.8 and 1.2, not 0.2."""
    return _clipped(_ratio(lp, inputs), inputs, settings)


def cispo(lp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """``-stop_gradient(clip(r, low, high)) A lp`` (MiniMax 2025): no token loses its gradient."""
    low, high = _thresholds(inputs, settings)
    weight = torch.minimum(torch.maximum(_ratio(lp, inputs).detach(), low), high)
    return -weight * inputs["advantages"] * lp


def dro(lp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """``-(lp A - beta / 2 (lp - q)^2)`` (Richemond et al. 2024). The square counts at every position of the row, those with advantage
    0 too: a position that is to stay out gets its own log-probability as `logprobs`."""
    penalty = 0.5 * settings["beta"] * (lp - inputs["logprobs"]).square()
    return penalty - lp * inputs["advantages"]


def gspo(lp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """`ppo` on the ratio of the whole sequence, ``s = exp(mean of lp - q)`` (Zheng et al. 2025, eq. 5 and 7, in the token form: value
    ``s``, gradient ``s`` times that of the token's own log-probability).

    The mean is over the positions where `sequence_ratio_mask` is not 0; without one, over those where advantage or `logprobs` is not 0,
    which leaves the prompt out."""
    if "sequence_ratio_mask" in inputs:
        counted = inputs["sequence_ratio_mask"] != 0
    else:
        counted = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    difference = torch.where(counted, (lp - inputs["logprobs"]).detach(), 0.0)
    mean = difference.sum() / counted.sum().clamp(min=1)
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * torch.exp(lp - lp.detach())
    return _clipped(ratio, inputs, settings)


def _ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    return (lp - inputs["logprobs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    low, high = _thresholds(inputs, settings)
    clipped = torch.minimum(torch.maximum(ratio, low), high)
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


def _thresholds(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    """Those of each token where given, else the setting."""
    like = inputs["advantages"]
    low, high = (inputs[key] if key in inputs else torch.full_like(like, settings[key]) for key in CLIP_KEYS)
    return low, high


def _everywhere(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.ones(len(inputs["advantages"]), bool)


def _weighted(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    weights = inputs.get("weights")
    if weights is None:
        return np.ones(len(inputs["target_tokens"]), bool)
    return (weights != 0).reshape(len(weights), -1).any(axis=1)


def _clip(low: float, high: float) -> Settings:
    return dict(zip(CLIP_KEYS, (low, high), strict=True))


LOSSES: dict[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(cross_entropy, required=(), trained=_weighted),
    "importance_sampling": TinkerLoss(importance_sampling),
    "ppo": TinkerLoss(ppo, optional=CLIPPED, settings=_clip(0.8, 1.2)),
    "cispo": TinkerLoss(cispo, optional=CLIPPED, settings=_clip(0.0, 4.0)),
    "dro": TinkerLoss(dro, settings={"beta": DRO_BETA}, trained=_everywhere),
    "gspo": TinkerLoss(gspo, optional=(*CLIPPED, "sequence_ratio_mask"), settings=_clip(0.8, 1.2)),
}


def check_settings(name: str, given: Mapping[str, float | str]) -> Settings:
    """The settings of a loss, defaults filled in. Raises `LossError` for a loss or key that is not there, or a value that cannot be."""
    if name not in LOSSES:
        why = ": its formula is not published" if name == "stable_reinforce" else ""
        raise LossError(f"loss_fn {name!r} is not served here{why}; there are {', '.join(LOSSES)}")
    known = LOSSES[name].settings
    for key, value in given.items():
        if key not in known:
            raise LossError(f"loss_fn_config: {name} has no {key!r}; it has {', '.join(known) or 'no settings'}")
        if isinstance(value, str) or not np.isfinite(value) or value < 0:
            raise LossError(f"loss_fn_config: {key} is {value!r}; it must be a finite number, 0 or more")
    settings = {**known, **{key: float(value) for key, value in given.items()}}
    low, high = (settings.get(key) for key in CLIP_KEYS)
    if low is not None and high is not None and low > high:
        raise LossError(f"loss_fn_config: clip_low_threshold {low:g} is above clip_high_threshold {high:g}")
    return settings


def check_inputs(name: str, length: int, inputs: Mapping[str, np.ndarray]) -> None:
    """Raise `LossError` unless a row of `length` tokens has exactly what the loss takes, in shapes that fit."""
    loss = LOSSES[name]
    allowed = ("target_tokens", *loss.required, *loss.optional)
    for key in ("target_tokens", *loss.required):
        if key not in inputs:
            raise LossError(f"loss_fn_inputs: {name} needs {key!r}; given are {', '.join(sorted(inputs)) or 'none'}")
    for key, values in inputs.items():
        if key not in allowed:
            raise LossError(f"loss_fn_inputs: {name} takes no {key!r}; it takes {', '.join(allowed)}")
        wide = name == "cross_entropy" and values.ndim == 2
        if values.ndim != 1 and not wide:
            raise LossError(
                f"loss_fn_inputs: {key} has shape {list(values.shape)}; {name} takes one value a token"
                + (", or [N, K]" if name == "cross_entropy" else "")
            )
        if len(values) != length:
            raise LossError(
                f"loss_fn_inputs: {key} has {len(values)} entries for {length} tokens of model_input; each needs one"
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise LossError(f"loss_fn_inputs: {key} holds values that are not finite")
    weights, targets = inputs.get("weights"), inputs["target_tokens"]
    if weights is not None and weights.shape != targets.shape:
        raise LossError(
            f"loss_fn_inputs: weights have shape {list(weights.shape)}, target_tokens {list(targets.shape)}; they must be the same"
        )
    if targets.ndim == 2 and targets.shape[1] == 0:
        raise LossError("loss_fn_inputs: target_tokens has shape [N, 0]; give at least one target a position")


def row_loss(name: str, lp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """The loss of one row: the sum over its tokens, weighted where there are weights."""
    losses = LOSSES[name].of(lp, inputs, settings)
    return (losses * inputs["weights"] if "weights" in inputs else losses).sum()
