"""The losses of trained tokens once their log-probabilities are known, and the metrics of them: the same for every backend.

Knows rows and tensors; nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rllm.algorithms.losses import Tokens, kl_terms, token_loss
from rllm.algorithms.spec import Datum, LossSpec
from rllm.backends.local.transfer import to_device


class Sums:
    """Adds up statistics of the trained tokens; `metrics` reads them from the device, once."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._tokens = 0

    def tokens(self, n: int) -> None:
        self._tokens += n

    def add(self, name: str, value: Tensor) -> None:
        """A number that is reported as the sum over micro-batches."""
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def scale(self, name: str, factor: float) -> None:
        """Multiply what `add` has summed up."""
        if name in self._sums:
            self._sums[name] = self._sums[name] * factor

    def mean(self, name: str, values: Tensor) -> None:
        """Per-token numbers of which the mean over all tokens that have them is reported."""
        self.add(name, values.sum())
        self._counts[name] = self._counts.get(name, 0) + len(values)

    def maximum(self, name: str, values: Tensor) -> None:
        """Per-token numbers of which the largest is reported."""
        top = values.max()
        self._maxima[name] = self._maxima[name].maximum(top) if name in self._maxima else top

    def weights(self, values: Tensor) -> None:
        """Importance ratios: reported are mean, maximum and the effective sample size as a share of the tokens."""
        self.mean("ratio_mean", values)
        self.maximum("ratio_max", values)
        self.add("ratio_squares", values.square().sum())

    def metrics(self) -> dict[str, float]:
        """``loss``, ``tokens`` and what was counted; of no tokens nothing but these two, as 0.

        ``ess`` is ``(sum r)^2 / (N sum r^2)`` over the N ratios (Kish 1965): 1 where all are equal, 1 / N where one has all weight.
        """
        if not self._tokens:
            return {"loss": 0.0, "tokens": 0.0}
        values = {name: value.item() for name, value in self._sums.items()}
        squares = values.pop("ratio_squares", 0.0)
        result = {name: value / self._counts.get(name, 1) for name, value in values.items()}
        result |= {name: value.item() for name, value in self._maxima.items()}
        if squares > 0:
            result["ess"] = values["ratio_mean"] ** 2 / (self._counts["ratio_mean"] * squares)
        return {"loss": result.pop("loss"), "tokens": float(self._tokens)} | result


@dataclass(frozen=True)
class TrainedTokens:
    """What a forward pass gave for the trained tokens of some rows, and the rows' own numbers at the same N tokens. `mask` is that of the
    rows, one after the other; `entropy` None: not known, and no bonus can be trained."""

    rows: Sequence[Datum]
    mask: Tensor
    logprobs: Tensor
    entropy: Tensor | None = None

    def take(self, field: str, instead: Callable[[Datum], Sequence[float]] | None = None) -> Tensor:
        """A per-token field of the rows [N]; `instead` gives the values of a row that has none."""
        values: list[float] = []
        for row in self.rows:
            own = getattr(row, field) or (instead(row) if instead else ())
            if len(own) != len(row.ids):
                raise ValueError(f"Datum.{field}: {len(own)} values in a row of {len(row.ids)} tokens")
            values += own
        return to_device(torch.tensor(values, dtype=torch.float32)[self.mask], self.logprobs.device)

    def has(self, field: str) -> bool:
        return any(getattr(row, field) for row in self.rows)


def losses_of(spec: LossSpec, batch: TrainedTokens, lengths: Tensor, sums: Sums) -> Tensor:
    """Loss of every token [N]: policy loss times the token's weight, plus KL and entropy terms. Counts its statistics in `sums`."""
    logprobs = batch.logprobs
    numbers = torch.arange(len(lengths), device=lengths.device)
    row_numbers = numbers.repeat_interleave(lengths, output_size=len(logprobs))
    sampler = batch.take("logprobs")
    old = batch.take("old_logprobs", lambda row: row.logprobs) if batch.has("old_logprobs") else sampler
    losses, statistics = token_loss(spec, Tokens(logprobs, old, batch.take("advantages"), row_numbers))
    if batch.has("weights"):
        losses = losses * batch.take("weights", lambda row: [1.0] * len(row.ids))
    if spec.kl_beta > 0:
        reference = batch.take("ref_logprobs")
        losses = losses + spec.kl_beta * kl_terms(logprobs, reference, spec.kl_estimator)
        sums.mean("kl_ref_k1", logprobs.detach() - reference)
        sums.mean("kl_ref", kl_terms(logprobs.detach(), reference))
    if batch.entropy is not None:
        losses = losses - spec.entropy_coeff * batch.entropy if spec.entropy_coeff > 0 else losses
        sums.mean("entropy", batch.entropy.detach())
    sums.tokens(len(logprobs))
    for name, values in statistics.items():
        sums.weights(values) if name == "ratio" else sums.mean(name, values)
    if spec.name != "cross_entropy":
        _count_divergence(sums, logprobs.detach(), old, sampler)
    return losses


def _count_divergence(sums: Sums, logprobs: Tensor, old: Tensor, sampler: Tensor) -> None:
    """How far the policy is from the one that the ratio is taken to, and from the sampler. The samples are of those, so the KL
    divergences are from them: with ``d = old - logp``, k1 is ``d`` and k3 is ``exp(-d) - 1 + d``."""
    sums.mean("ppo_kl", old - logprobs)
    k3 = kl_terms(old, logprobs)
    sums.mean("ppo_kl_k3", k3)
    sums.mean("sampler_kl", k3 if old is sampler else kl_terms(sampler, logprobs))
    sums.maximum("sampler_gap_max", (logprobs - sampler).abs())
