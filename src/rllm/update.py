"""From a step's rows to new weights: which log-probabilities the loss needs besides the policy's own, and which rows make which
optimizer step.

Knows rows and a backend; nothing of flows, episodes or files.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from rllm.algorithms.correction import correct, kl_in_reward
from rllm.algorithms.datums import build_datums
from rllm.algorithms.distillation import TokenAdvantages
from rllm.algorithms.filters import without_signal
from rllm.algorithms.grouping import Accounting
from rllm.algorithms.schedules import rate_factor, warmup_length
from rllm.backends.base import (
    BASE,
    INITIAL_ADAPTER,
    MAX_SKIPPED_STEPS,
    AdamParams,
    Backend,
    Datum,
    Losses,
    OverlappingBackend,
    PipelinedBackend,
)
from rllm.collect import Collected
from rllm.config.names import GROUP_RELATIVE
from rllm.config.schema import Config
from rllm.errors import DataError, RunError
from rllm.rollouts.batch import stable_seed
from rllm.types import Trajectory, TrajectoryGroup

MiniBatch = list[Datum]


@dataclass
class PolicyUpdate:
    """Makes the optimizer steps of each training step. `loss` is what `Backend.forward_backward` takes; `total` counts the training
    steps of the run, which the learning rate follows."""

    backend: Backend
    config: Config
    loss: Losses
    total: int
    skipped_in_a_row: int = 0
    _passed: dict[str, Datum] = field(default_factory=dict)

    def run(
        self, data: list[Datum], found: Collected, account: Accounting, step: int, ahead: Sequence[Datum] = ()
    ) -> dict[str, float]:
        """Train on `data`, the rows of `found`. ``train/optimizer_steps`` says how many steps changed the weights: without rows, or
        where no loss and gradient is finite, none, and ``train/skipped_steps`` is 1. `ahead`: rows of one optimizer step whose gradients
        are there; if one of them is not as it stands in `data`, all are forgotten and trained again.

        Metrics of the loss are means over the optimizer steps, weighted by trained tokens; ``..._max`` is the largest.
        """
        a = self.config.algorithm
        metrics: dict[str, float] = {}
        owners = _owners(found) if data and self._needs_owners() else {}
        if ahead:
            data, ahead = self._without(data, ahead)
            metrics["train/ahead_tokens"] = float(sum(row.n_trained for row in ahead))
        trains = bool(data or ahead)
        epochs = [self._mini_batches(data, owners, step, epoch) for epoch in range(a.ppo_epochs if trains else 0)]
        if data:
            several = sum(map(len, epochs)) > 1
            self._fill(epochs[0], own=self.needs_trainer(several), reference=a.kl_beta > 0)
        if data and a.rollout_correction.level != "none":
            metrics |= self._correct(data, owners, account)
            epochs = [[rows for batch in epoch if (rows := _weighted(batch))] for epoch in epochs]
        params = adam_params(self.config, step, self.total)
        batches = [batch for epoch in epochs for batch in epoch]
        done = [self._optimizer_step(batch, params, ahead) for batch in batches]
        taken = [one for one in done if one is not None]
        metrics |= _mean_metrics(taken)
        metrics |= {"train/optimizer_steps": float(len(taken))}
        if len(taken) < len(done):
            metrics["train/nonfinite_steps"] = float(len(done) - len(taken))
            used = [row for batch, one in zip(batches, done, strict=True) if one is not None for row in batch]
            rows = [row for batch in batches for row in batch] + list(ahead)
            _count_lost(owners or _owners(found), rows, used, account, "nonfinite")
        return metrics if taken else metrics | {"train/skipped_steps": 1.0}

    def with_kl_in_reward(self, found: Collected, step: int) -> tuple[list[TrajectoryGroup], dict[str, float]]:
        """The groups of `found` with `algorithm.kl_in_reward` times the log-ratio of policy to reference, summed over its tokens,
        taken off each trajectory's reward; groups without a signal stay as they are, to be dropped for it.

        ``actor/kl_in_reward`` is the mean of that log-ratio over tokens, ``critic/rewards/mean`` the mean reward after it.
        """
        a = self.config.algorithm
        if not a.kl_in_reward or not found.groups:
            return found.groups, {}
        chosen = [group for group in found.groups if not (self._drops(group.role) and without_signal(group))]
        owners = _owners(found)
        rows = build_datums(chosen, Accounting(), estimator="reinforce")
        self._fill(self._mini_batches(rows, owners, step, 0), own=a.old_logprobs != "sampler", reference=True)
        penalties: dict[int, float] = {}
        for row in rows:
            trajectory = id(owners[row.call][1])
            taken_off = kl_in_reward([0.0] * len(row.ids), _old(row), row.ref_logprobs, a.kl_in_reward)
            penalties[trajectory] = penalties.get(trajectory, 0.0) + math.fsum(taken_off)
        self._passed = {row.call: row for row in rows}
        shaped = [
            replace(g, trajectories=[_less(t, penalties.get(id(t), 0.0)) for t in g.trajectories]) for g in found.groups
        ]
        metrics = {
            "critic/rewards/mean": statistics.fmean(float(t.reward or 0.0) for g in shaped for t in g.trajectories)
        }
        tokens = sum(row.n_trained for row in rows)
        if tokens:
            metrics["actor/kl_in_reward"] = 0.0 - math.fsum(penalties.values()) / a.kl_in_reward / tokens
        return shaped, metrics

    def fill_ahead(self, rows: Sequence[Datum]) -> None:
        """What the loss needs besides the policy's own log-probabilities, put into rows that are trained before the others are there."""
        self._fill([list(rows)], own=False, reference=self.config.algorithm.kl_beta > 0)

    def _without(self, data: list[Datum], ahead: Sequence[Datum]) -> tuple[list[Datum], Sequence[Datum]]:
        """(rows left to train, rows that are) of all rows of a step."""
        trained = {row.call: row for row in ahead}
        rows = {row.call: row for row in data}
        if len(rows) == len(data) and all(
            call in rows and replace(row, ref_logprobs=[]) == rows[call] for call, row in trained.items()
        ):
            return [row for row in data if row.call not in trained], ahead
        self.backend.discard_gradients()
        return data, ()

    def _drops(self, role: str) -> bool:
        """Whether groups of `role` are dropped where their rewards do not differ."""
        a = self.config.algorithm
        own = a.per_role[role].adv_estimator if role in a.per_role else None
        return (own or a.adv_estimator) in GROUP_RELATIVE and a.zero_std == "drop"

    def needs_trainer(self, several: bool) -> bool:
        """Whether the ratio of the loss is taken to log-probabilities of the trainer and not of the sampler. `several`: the rows make
        more than one optimizer step, so that the policy is no longer the one that sampled."""
        a = self.config.algorithm
        asked = a.old_logprobs == "trainer" or a.rollout_correction.level != "none"
        return asked or (several and a.old_logprobs == "auto" and a.takes_ratio())

    def _needs_owners(self) -> bool:
        a = self.config.algorithm
        return a.mini_batch_size is not None or a.rollout_correction.level != "none"

    def _mini_batches(
        self, data: Sequence[Datum], owners: dict[str, tuple[int, Trajectory]], step: int, epoch: int
    ) -> list[MiniBatch]:
        """Rows of ``algorithm.mini_batch_size`` tasks each, in seeded order; all rows of a task stay together, the last mini-batch
        may be smaller."""
        size = self.config.algorithm.mini_batch_size
        if size is None:
            return [list(data)]
        units: dict[int, MiniBatch] = {}
        for row in data:
            units.setdefault(owners[row.call][0], []).append(row)
        if len(units) <= size:
            return [list(data)]
        order = list(units.values())
        random.Random(stable_seed(self.config.trainer.seed, "mini-batches", step, epoch)).shuffle(order)
        return [[row for unit in order[i : i + size] for row in unit] for i in range(0, len(order), size)]

    def _fill(self, batches: Sequence[MiniBatch], own: bool, reference: bool) -> None:
        """Put the trainer's log-probabilities (`own`) and those of the reference policy into the rows.

        Each mini-batch is passed as it will be trained, so that equal weights give equal numbers, to the bit.
        """
        adapter = INITIAL_ADAPTER if self.config.algorithm.reference == "initial_adapter" else BASE
        for batch in batches:
            known = [self._passed.get(row.call) for row in batch]
            for row, passed in zip(batch, known, strict=True):
                if passed is not None:
                    row.old_logprobs = passed.old_logprobs if own else []
                    row.ref_logprobs = passed.ref_logprobs if reference else []
            if own and not all(row.old_logprobs for row in batch):
                for row, values in zip(batch, self.backend.logprobs(batch, trained_only=True), strict=True):
                    row.old_logprobs = values
            if reference and not all(row.ref_logprobs for row in batch):
                for row, values in zip(batch, self.backend.logprobs(batch, adapter, trained_only=True), strict=True):
                    row.ref_logprobs = values
        self._passed = {}

    def _correct(
        self, data: Sequence[Datum], owners: dict[str, tuple[int, Trajectory]], account: Accounting
    ) -> dict[str, float]:
        """Fill the weights."""
        c = self.config.algorithm.rollout_correction
        assert c.level != "none"
        metrics = correct(data, level=c.level, mode=c.mode, cap=c.cap, floor=c.floor)
        _count_lost(owners, data, _weighted(data), account, "off_policy")
        return {f"rollout_correction/{name}": value for name, value in metrics.items()}

    def _optimizer_step(
        self, batch: MiniBatch, params: AdamParams, ahead: Sequence[Datum] = ()
    ) -> dict[str, float] | None:
        """One optimizer step; None if its loss or gradient is not finite, and nothing has then changed. Three such in a row end the
        run."""
        metrics = self._train(batch, params, ahead)
        loss, norm = metrics.get("loss", 0.0), metrics["grad_norm"]
        if math.isfinite(norm):
            self.skipped_in_a_row = 0
            return metrics
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise RunError(
                f"{MAX_SKIPPED_STEPS} steps in a row had a loss or gradient that is not finite (loss {loss}, grad_norm {norm}); "
                f"lower optim.lr (now {params.lr:g})"
            )
        return None

    def _train(self, batch: MiniBatch, params: AdamParams, ahead: Sequence[Datum]) -> dict[str, float]:
        if isinstance(self.backend, PipelinedBackend):
            return self.backend.train_step(batch, self.loss, params)
        if ahead:
            metrics = cast(OverlappingBackend, self.backend).forward_backward(batch, self.loss, ahead)
        else:
            metrics = self.backend.forward_backward(batch, self.loss)
        if math.isfinite(metrics.get("loss", 0.0)):
            return metrics | self.backend.optim_step(params)
        self.backend.discard_gradients()
        return metrics | {"grad_norm": math.nan}


def datums_of(
    groups: Sequence[TrajectoryGroup], account: Accounting, config: Config, taught: TokenAdvantages | None = None
) -> list[Datum]:
    """`build_datums` as the config says; `taught` are advantages of a teacher."""
    a = config.algorithm
    return build_datums(
        groups,
        account,
        estimator=a.adv_estimator,
        std=a.grpo_std,
        zero_std=a.zero_std,
        stepwise=a.stepwise,
        gamma=a.gamma,
        per_role={role: own.adv_estimator for role, own in a.per_role.items() if own.adv_estimator},
        token_advantages=taught,
    )


def adam_params(config: Config, step: int, total: int) -> AdamParams:
    """Settings of the optimizer steps of training step `step` (from 1) of `total`; all of one training step have the same rate."""
    o = config.optim
    factor = rate_factor(
        step - 1,
        total,
        schedule=o.schedule,
        warmup=warmup_length(total, o.warmup_steps, o.warmup_ratio),
        min_ratio=o.min_lr_ratio,
    )
    return AdamParams(o.lr * factor, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip)


def _owners(found: Collected) -> dict[str, tuple[int, Trajectory]]:
    """Number of the unit, and trajectory, that the call of each step belongs to."""
    owners: dict[str, tuple[int, Trajectory]] = {}
    for number, unit in enumerate(found.units):
        for trajectory in (t for group in unit for t in group.trajectories):
            for step in trajectory.steps:
                if step.id in owners:
                    raise DataError(
                        f"two steps of this batch have the id {step.id!r}; a step's id is that of its call, or leave it out"
                    )
                owners[step.id] = (number, trajectory)
    return owners


def _old(row: Datum) -> list[float]:
    return row.old_logprobs or row.logprobs


def _less(trajectory: Trajectory, penalty: float) -> Trajectory:
    return replace(trajectory, reward=float(trajectory.reward or 0.0) + penalty) if penalty else trajectory


def _count_lost(
    owners: dict[str, tuple[int, Trajectory]],
    rows: Sequence[Datum],
    used: Sequence[Datum],
    account: Accounting,
    reason: str,
) -> None:
    """A trajectory of which no row is among the `used` is counted as dropped for `reason`, not as trained."""
    lost = {id(owners[row.call][1]) for row in rows} - {id(owners[row.call][1]) for row in used}
    account.trained -= len(lost)
    if lost:
        account.dropped[reason] += len(lost)


def _weighted(batch: Sequence[Datum]) -> MiniBatch:
    """The rows that have any weight; the others must not count in a denominator."""
    return [row for row in batch if any(row.weights)]


def _mean_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as those of one; names get ``actor/``."""
    weights = [one.get("tokens", 0.0) for one in steps]
    total = math.fsum(weights)
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for one in steps for name in one):
        values = [(one[name], weight) for one, weight in zip(steps, weights, strict=True) if name in one]
        if name == "tokens":
            value = total
        elif name.endswith("_max"):
            value = max(v for v, _ in values)
        elif len(values) == 1 or not total:
            value = values[-1][0]
        else:
            value = math.fsum(v * w for v, w in values) / max(math.fsum(w for _, w in values), 1e-9)
        result[f"actor/{name}" if "/" not in name else name] = value
    if len(steps) > 1:
        result["actor/grad_norm_max"] = max(one["grad_norm"] for one in steps)
    return result
