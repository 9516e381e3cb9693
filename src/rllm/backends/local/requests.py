"""One completion under way, and how it ends. Knows no model."""

from __future__ import annotations

import math
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import numpy as np

from rllm.backends.base import Completion, FinishReason, OnToken, SamplingParams
from rllm.config.schema import MIN_TEMPERATURE


@dataclass(eq=False)
class Request:
    """One completion under way."""

    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str
    limit: int
    seed: int
    future: Future[Completion]
    uniforms: np.ndarray
    on_token: OnToken | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the last sampled token stands in the sequence."""
        return len(self.prompt) + len(self.ids) - 1

    @property
    def final_length(self) -> int:
        """The most tokens the sequence can come to."""
        return len(self.prompt) + self.limit


def check_params(params: SamplingParams) -> None:
    if not (params.temperature == 0 or MIN_TEMPERATURE <= params.temperature < math.inf):
        raise ValueError(
            f"temperature is {params.temperature}; allowed: 0 (greedy) or a finite number from {MIN_TEMPERATURE} on"
        )
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p is {params.top_p}; allowed: above 0 up to 1 (1: off)")
    if params.top_k < 0:
        raise ValueError(f"top_k is {params.top_k}; allowed: 0 (off) or a positive number")
    if "" in params.stop:
        raise ValueError("a stop string is empty; leave it out")


def finish(request: Request, reason: FinishReason) -> None:
    try:
        request.future.set_result(Completion(request.ids, request.logprobs, request.versions, reason))
    except InvalidStateError:  # cancelled in this very moment
        pass


def fail(request: Request, error: Exception) -> None:
    try:
        request.future.set_exception(error)
    except InvalidStateError:
        pass
