"""Log-probabilities of given targets at every position of a row, and gradients of any loss of them.

Where `learner.py` trains a row on its own next tokens, here every position names what is scored there: one token, or K of them. Knows no
loss: the caller brings a function of one row's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rllm.backends.local.device_turn import device_turn
from rllm.backends.local.language_model import LanguageModel, LowRank
from rllm.backends.local.learner import LOGIT_ELEMENTS, Learner
from rllm.backends.local.model import HEAD, Decoder, PackedCausal
from rllm.backends.local.transfer import to_device


@dataclass(frozen=True, eq=False)
class TargetRow:
    """`ids` [N] are read; `targets` [N] or [N, K] (int64) are scored, position t given ``ids[: t + 1]``. Where `trained` [N] is False
    the loss has no gradient, so that none is computed."""

    ids: Sequence[int]
    targets: np.ndarray
    trained: np.ndarray


RowLoss = Callable[[int, Tensor], Tensor]
"""(number of the row, its log-probabilities [N] or [N, K]) -> its loss, a scalar."""


class TargetLearner(Learner):
    """A learner of one adapter, named `adapter` among `Learner.adapters`."""

    shares_prompts = False  # every position is scored

    def target_logprobs(self, rows: Sequence[TargetRow], adapter: str) -> list[np.ndarray]:
        """float32 [N] or [N, K] for each row; no gradient, the adapter as in training."""
        result: list[np.ndarray] = [np.empty(0, np.float32)] * len(rows)
        with torch.no_grad():
            for _, chosen in self._micro_batches(rows, lambda row: row.targets.shape[1:]):
                with device_turn(self.model):
                    scored = self._score([rows[i] for i in chosen], adapter)
                for i, values in zip(chosen, scored, strict=True):
                    result[i] = values.cpu().numpy()
        return result

    def accumulate(
        self, rows: Sequence[TargetRow], adapter: str, loss: RowLoss
    ) -> tuple[list[np.ndarray], list[float]]:
        """Add the gradient of the sum of the rows' losses; returns their log-probabilities and losses."""
        logprobs: list[np.ndarray] = [np.empty(0, np.float32)] * len(rows)
        losses = [0.0] * len(rows)
        finish = self._accumulate({adapter})
        try:
            for _, chosen in self._micro_batches(rows, lambda row: row.targets.shape[1:]):
                with device_turn(self.model):
                    scored = self._score([rows[i] for i in chosen], adapter)
                    own = [loss(i, values) for i, values in zip(chosen, scored, strict=True)]
                    total = torch.stack(own).sum()
                    if total.requires_grad:
                        total.backward()
                for i, values, value in zip(chosen, scored, own, strict=True):
                    logprobs[i], losses[i] = values.detach().cpu().numpy(), float(value.detach())
        finally:
            finish()
        return logprobs, losses

    def _score(self, rows: Sequence[TargetRow], adapter: str) -> list[Tensor]:
        """One packed pass; all rows have targets of one width."""
        device = self.model.device
        lengths = [len(row.ids) for row in rows]
        ids = to_device([token for row in rows for token in row.ids], device)
        attend = PackedCausal(lengths, device)
        model, lora = self._policy(adapter)
        hidden = model(ids, attend.positions, attend, lora)
        targets = torch.from_numpy(np.concatenate([row.targets.reshape(len(row.ids), -1) for row in rows]))
        trained = torch.from_numpy(np.concatenate([row.trained for row in rows]))
        targets, with_grad = to_device(targets, device), to_device(trained.nonzero().squeeze(1), device)
        logprobs = hidden.new_zeros(len(ids), targets.shape[1], dtype=torch.float32)
        if torch.is_grad_enabled():
            without = to_device((~trained).nonzero().squeeze(1), device)
            with torch.no_grad():
                values = logprobs_at(model, lora, hidden.index_select(0, without), targets.index_select(0, without))
            logprobs = logprobs.index_copy(0, without, values)
            # Even where nothing is trained the graph must lead to the adapter: a sum of no terms has gradient 0, not none.
            values = logprobs_at(model, lora, hidden.index_select(0, with_grad), targets.index_select(0, with_grad))
            logprobs = logprobs.index_copy(0, with_grad, values)
        else:
            logprobs = logprobs_at(model, lora, hidden, targets)
        shapes = [row.targets.shape for row in rows]
        return [part.reshape(shape) for part, shape in zip(logprobs.split(lengths), shapes, strict=True)]


def logprobs_at(model: LanguageModel, lora: LowRank | None, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities [M, K] (float32) of `targets` [M, K] from hidden states [M, hidden]; logits are made a chunk at a time."""
    if (
        isinstance(model, Decoder)
        and model.fused
        and targets.shape[1] == 1
        and len(targets)
        and (lora is None or lora.pair(*HEAD) is None)
    ):
        from rllm.backends.local.cuda.head import token_logprobs

        ones = torch.ones(len(targets), device=hidden.device)
        return token_logprobs(model, hidden, targets.squeeze(1).contiguous(), ones)[0].unsqueeze(1)

    def part(h: Tensor, y: Tensor) -> Tensor:
        return F.log_softmax(model.logits(h, lora), dim=-1).gather(1, y)

    chunk = max(1, LOGIT_ELEMENTS // model.config.vocab_size)
    if len(targets) <= chunk:
        return part(hidden, targets)
    pieces = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([part(h, y) for h, y in pieces])
    parts = [checkpoint(part, h, y, use_reentrant=False) for h, y in pieces]
    return torch.cat([p for p in parts if isinstance(p, Tensor)])
