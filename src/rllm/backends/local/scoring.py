"""What a policy thinks of given tokens: log-probabilities, the likeliest tokens, draws, at chosen positions of one sequence.

Knows a decoder and low-rank updates; nothing of training or of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rllm.backends.local.device_turn import device_turn
from rllm.backends.local.language_model import LanguageModel, LowRank
from rllm.backends.local.learner import LOGIT_ELEMENTS
from rllm.backends.local.model import PackedCausal
from rllm.backends.local.transfer import to_device


@dataclass(frozen=True, eq=False)
class ScoreQuery:
    """Of the tokens ``ids[first:]``: how likely each was given those before it (`first` >= 1). With M of them, asked for are besides
    the `top_k` likeliest tokens at each, the log-probabilities of `targets` [M, K] (int64; -1: none), and `draws` tokens drawn at each.
    Logits are divided by `temperature` for the draws, and for the rest where `tempered`."""

    ids: tuple[int, ...]
    first: int = 1
    top_k: int = 0
    targets: np.ndarray | None = None
    draws: int = 0
    temperature: float = 1.0
    tempered: bool = False
    seed: int = 0


@dataclass(eq=False)
class Scores:
    """Arrays of M rows: `logprobs` [M], `top_ids` and `top_logprobs` [M, k], `targets` [M, K], `drawn` and `drawn_logprobs` [M, draws]."""

    logprobs: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    targets: np.ndarray | None = None
    drawn: np.ndarray | None = None
    drawn_logprobs: np.ndarray | None = None


@torch.no_grad()
def score(model: LanguageModel, lora: LowRank | None, query: ScoreQuery) -> Scores:
    """One teacher-forced pass; logits are made a chunk at a time."""
    device = model.device
    count = len(query.ids) - query.first
    attend = PackedCausal([len(query.ids)], device)
    ids = to_device(list(query.ids), device)
    with device_turn(model):
        hidden = model(ids, attend.positions, attend, lora)[query.first - 1 : -1]
    wanted = ids[query.first :]
    chunk = max(1, LOGIT_ELEMENTS // model.config.vocab_size)
    generator = torch.Generator(device).manual_seed(query.seed)
    parts: list[dict[str, Tensor]] = []
    for start in range(0, count, chunk):
        rows = slice(start, start + chunk)
        targets = None if query.targets is None else to_device(torch.from_numpy(query.targets[rows]), device)
        parts.append(_chunk(model.logits(hidden[rows], lora), wanted[rows], targets, query, generator))
    names = parts[0].keys() if parts else ()
    found = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in names}
    return Scores(found.pop("logprobs", np.empty(0, np.float32)), **found)


def _chunk(
    logits: Tensor, wanted: Tensor, targets: Tensor | None, query: ScoreQuery, generator: torch.Generator
) -> dict[str, Tensor]:
    heat = query.temperature or 1.0  # greedy sampling reports what an untempered one would
    logprobs = torch.log_softmax(logits / heat if query.tempered else logits, dim=-1)
    found = {"logprobs": logprobs.gather(1, wanted.unsqueeze(1)).squeeze(1)}
    if query.top_k:
        values, places = logprobs.topk(min(query.top_k, logits.shape[1]), dim=-1)
        found |= {"top_ids": places, "top_logprobs": values}
    if targets is not None:
        at = logprobs.gather(1, targets.clamp(min=0))
        found["targets"] = torch.where(targets < 0, 0.0, at)
    if query.draws:
        if query.temperature == 0:
            drawn = logits.argmax(dim=-1, keepdim=True).expand(-1, query.draws)
        else:
            probs = torch.softmax(logits / query.temperature, dim=-1)
            drawn = torch.multinomial(probs, query.draws, replacement=True, generator=generator)
        found |= {"drawn": drawn, "drawn_logprobs": logprobs.gather(1, drawn)}
    return found
