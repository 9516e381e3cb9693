"""Our losses as Tinker's: which of the service's is the same, with which settings and inputs a row, so that its sum over tokens is our
aggregated loss.

Pure functions. The service sums over tokens what we average, so a token's weight goes into its advantage: ppo, importance_sampling, cispo
and gspo scale with it. dro does not, and has the weight beside. What the service has no loss for goes through its gradient: see `custom_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rllm.algorithms.losses import DRO_BETA
from rllm.algorithms.spec import Datum, LossSpec
from rllm.backends.token_losses import Sums, TrainedTokens, losses_of
from rllm.errors import RunError, UserError

# Those whose formula the service's documentation has and that scale with the advantage; whether its dro takes weights it does not say.
HOSTED_LOSSES = frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"})
_NAMES = {
    "ppo_clip": "ppo",
    "importance_sampling": "importance_sampling",
    "cispo": "cispo",
    "gspo": "gspo",
    "dro": "dro",
    "reinforce": "cross_entropy",
    "cross_entropy": "cross_entropy",
}


@dataclass(frozen=True)
class NativeLoss:
    """A loss of the service and its ``loss_fn_config``."""

    name: str
    settings: dict[str, float] = field(default_factory=dict)


def native(spec: LossSpec, served: Collection[str], on_policy: bool) -> NativeLoss | None:
    """The service's loss that is `spec`, or None. `served` are the losses whose formula is known.

    The service has no dual clip, which acts on ratios above `spec.clip_c` only. `on_policy`: no step was made since the rows were sampled,
    so every ratio is near 1 and there is nothing for it to act on.
    """
    name = _NAMES.get(spec.name, "")
    dual = spec.name in ("ppo_clip", "gspo") and spec.clip_c > 0 and not on_policy
    if name not in served or spec.kl_beta > 0 or dual:
        return None
    if name in ("ppo", "cispo", "gspo"):
        low, high = max(0.0, 1.0 - spec.clip_low), 1.0 + spec.clip_high
        return NativeLoss(name, {"clip_low_threshold": low, "clip_high_threshold": high})
    return NativeLoss(name, {"beta": spec.options.get("beta", DRO_BETA)} if name == "dro" else {})


def row_inputs(row: Datum, loss: NativeLoss | None, weight: float) -> dict[str, np.ndarray]:
    """``loss_fn_inputs`` of a row, one entry less than it has tokens: position t predicts token t + 1. `weight` is that of each of its
    trained tokens in the aggregation; a loss of None needs the targets alone."""
    inputs: dict[str, np.ndarray] = {"target_tokens": np.asarray(row.ids[1:], np.int64)}
    if loss is None:
        return inputs
    mask = np.asarray(row.mask[1:], np.float64)
    weights = weight * mask * (np.asarray(row.weights[1:]) if row.weights else 1.0)
    advantages = np.asarray(row.advantages[1:], np.float64)
    if loss.name == "cross_entropy":
        return inputs | {"weights": (weights * advantages).astype(np.float32)}
    old = np.asarray((row.old_logprobs or row.logprobs)[1:], np.float64) * mask
    inputs["logprobs"] = old.astype(np.float32)
    if loss.name == "dro":
        return inputs | {"advantages": advantages.astype(np.float32), "weights": weights.astype(np.float32)}
    if loss.name == "gspo":
        inputs["sequence_ratio_mask"] = mask.astype(np.float32)
    return inputs | {"advantages": (weights * advantages).astype(np.float32)}


def aggregated(
    spec: LossSpec, rows: Sequence[Datum], logprobs: Sequence[Tensor], weights: Sequence[float], sums: Sums
) -> Tensor:
    """Our loss of some rows, the sum of weight times token loss, from the log-probabilities [len(ids) - 1] of their tokens. Counts its
    statistics in `sums`."""
    mask = torch.tensor([m for row in rows for m in row.mask], dtype=torch.bool)
    chosen = [lp[torch.tensor(row.mask[1:], dtype=torch.bool)] for lp, row in zip(logprobs, rows, strict=True)]
    lengths = torch.tensor([row.n_trained for row in rows])
    losses = losses_of(spec, TrainedTokens(rows, mask, torch.cat(chosen)), lengths, sums)
    total = (torch.tensor(weights, dtype=losses.dtype).repeat_interleave(lengths) * losses).sum()
    sums.add("loss", total.detach())
    return total


def custom_loss(
    spec: LossSpec, rows: Sequence[Datum], weights: Sequence[float]
) -> Callable[[object, Sequence[Tensor]], tuple[Tensor, dict[str, float]]]:
    """A loss of ours that the service does not have, for ``forward_backward_custom``: the service computes the log-probabilities, this
    the loss, the SDK its gradient to them, and the service goes on from there: the same gradient, for a forward pass more."""

    def loss(data: object, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        try:
            return aggregated(spec, rows, logprobs, weights, Sums()), {}
        except UserError:
            raise
        except Exception as error:  # a loss of the user's own; the SDK would tell it as if the service had failed
            raise RunError(f"algorithm.loss={spec.name}: the loss failed: {type(error).__name__}: {error}") from error

    return loss
