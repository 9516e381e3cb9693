"""Training runs: an adapter, its optimizer and its gradients over the shared base.

Knows the local backend's learner; nothing of requests, order or HTTP. Everything here runs in the scheduler's thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rllm.backends.base import AdamParams
from rllm.backends.local.adapters import create_adapter
from rllm.backends.local.backend import ADAM_STATE
from rllm.backends.local.language_model import LanguageModel
from rllm.backends.local.targets import TargetLearner, TargetRow
from rllm.config.schema import LoraSettings
from rllm.errors import ModelError
from rllm.lora.adapter import LowRankPairs
from rllm.lora.files import check_written, write_adapter
from rllm.serve.tinker.errors import OperationError
from rllm.serve.tinker.losses import LOSSES, Settings, row_loss
from rllm.serve.tinker.scheduler import Lane
from rllm.serve.tinker.wire import Row, TrainOutput

OPTIMIZER = "optimizer.safetensors"
ADAPTER = "run"


@dataclass(frozen=True)
class AdapterSpec:
    """What a run's adapter is made of; kept with its checkpoints."""

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def settings(self, folder: Path | None = None) -> LoraSettings:
        return LoraSettings(
            rank=self.rank,
            alpha=self.alpha,
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
            adapter_path=str(folder) if folder else None,
        )

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> AdapterSpec:
        return cls(**{name: about[name] for name in cls.__dataclass_fields__})


@dataclass(eq=False)
class TrainingRun:
    """`folder`: the checkpoint that its weights come from (with `optimizer`, the optimizer's state too), else they are fresh. Its requests
    are put in order by `lane`."""

    id: str
    session: str
    model: LanguageModel
    base: str
    spec: AdapterSpec
    lane: Lane = field(default_factory=Lane)
    learner: TargetLearner = field(init=False)
    # Why the gradients are not those of all that was asked for.
    incomplete: str | None = None

    def start(self, folder: Path | None = None, optimizer: bool = False) -> None:
        """Make the adapter; also in place of the one there is."""
        try:
            adapter = create_adapter(self.model, self.spec.settings(folder), self.spec.seed)
            learner = TargetLearner(self.model, {ADAPTER: adapter})
            if folder is not None and optimizer:
                learner.load_optimizer_state(_read_optimizer(folder, learner.trainable()), AdamParams(lr=0.0))
        except ModelError as error:
            raise OperationError(str(error)) from error
        self.learner, self.incomplete = learner, None

    def train(self, rows: Sequence[Row], loss_fn: str, settings: Settings, forward_only: bool) -> TrainOutput:
        """Log-probabilities of every target and the sum of the losses; with gradients, unless `forward_only`."""
        device = self.model.device
        inputs = [
            {
                k: torch.tensor(v, dtype=torch.float32, device=device)
                for k, v in row.inputs.items()
                if k != "target_tokens"
            }
            for row in rows
        ]
        trained = [LOSSES[loss_fn].trained(row.inputs) for row in rows]
        wanted = [
            TargetRow(row.ids.tolist(), row.inputs["target_tokens"].astype(np.int64), which)
            for row, which in zip(rows, trained, strict=True)
        ]
        if forward_only:
            logprobs = self.learner.target_logprobs(wanted, ADAPTER)
            scored = (torch.from_numpy(values).to(device) for values in logprobs)
            losses = [float(row_loss(loss_fn, lp, own, settings)) for lp, own in zip(scored, inputs, strict=True)]
        else:
            try:
                logprobs, losses = self.learner.accumulate(
                    wanted, ADAPTER, lambda i, lp: row_loss(loss_fn, lp, inputs[i], settings)
                )
            except Exception as error:
                self.incomplete = f"an earlier forward_backward failed ({type(error).__name__}: {error})"
                raise
        count = float(sum(int(which.sum()) for which in trained))
        return TrainOutput(logprobs, {"loss:sum": math.fsum(losses), "trained_tokens:sum": count})

    def optim_step(self, params: AdamParams) -> dict[str, Any]:
        if self.incomplete:
            why, self.incomplete = self.incomplete, None
            self.learner.discard_gradients()
            raise OperationError(f"no step was made and the gradients were discarded: {why}")
        norm = self.learner.optim_step(params)["grad_norm"]
        if not math.isfinite(norm):
            raise OperationError(
                f"no step was made and the gradients were discarded: their norm is {norm}; look for ratios or weights that are too large, "
                "or a learning rate that is"
            )
        return {"metrics": {"unclipped_grad_l2:mean": norm, "learning_rate:mean": params.lr}}

    def snapshot(self) -> LowRankPairs:
        """The weights as they are now, for sampling."""
        return self.learner.adapters[ADAPTER].snapshot(self.model.dtype)

    def write(self, folder: Path, optimizer: bool) -> None:
        """A PEFT folder, and the optimizer's state beside it; read back and compared before this returns."""
        adapter = self.learner.adapters[ADAPTER]
        try:
            names = list(self.model.linear_shapes())
            conv1d = self.model.conv1d
            write_adapter(
                adapter, folder, base=self.base, settings=self.spec.settings(), names=names, fan_in_fan_out=conv1d
            )
            check_written(adapter, folder)
        except ModelError as error:
            raise OperationError(str(error)) from error
        if optimizer:
            states = enumerate(self.learner.optimizer_state())
            tensors = {f"{i}.{key}": v.detach().cpu().contiguous() for i, state in states for key, v in state.items()}
            save_file(tensors, folder / OPTIMIZER)


def read_pairs(model: LanguageModel, spec: AdapterSpec, folder: Path) -> LowRankPairs:
    """The adapter of a checkpoint, for sampling."""
    return create_adapter(model, spec.settings(folder), spec.seed).snapshot(model.dtype)


def _read_optimizer(folder: Path, parameters: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    if not (folder / OPTIMIZER).is_file():
        raise OperationError(
            "this checkpoint has no optimizer state; save it with save_state, or load it without the optimizer"
        )
    tensors = load_file(folder / OPTIMIZER)
    return [
        {key: tensors[f"{i}.{key}"] for key in ADAM_STATE if f"{i}.{key}" in tensors} for i in range(len(parameters))
    ]
