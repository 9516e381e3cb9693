"""What a client of ours may know of this server, and say to it, beyond Tinker's API. Other clients pass over it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rllm.serve.tinker.errors import ApiError
from rllm.serve.tinker.losses import LOSSES

if TYPE_CHECKING:
    from rllm.serve.tinker.service import TinkerService

ALPHA_METADATA = "rllm.lora_alpha"
"""With this key in its `user_metadata` a new run says its alpha, for which the API has no field."""


def about(service: TinkerService) -> dict[str, Any]:
    """Part of the answer of ``client/config``, as ``rllm``."""
    model = service.backend.model
    return {
        "lora_alpha": service.alpha,
        "alpha_metadata": ALPHA_METADATA,
        "max_rank": service.max_rank,
        "losses": sorted(LOSSES),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.parameter_count(),
    }


def alpha_of(user_metadata: Mapping[str, Any] | None) -> float | None:
    """The alpha that a client states, if it does."""
    text = (user_metadata or {}).get(ALPHA_METADATA)
    if text is None:
        return None
    try:
        alpha = float(text)
    except (TypeError, ValueError):
        alpha = math.nan
    if not (math.isfinite(alpha) and alpha > 0):
        raise ApiError(f"user_metadata.{ALPHA_METADATA}: {str(text)[:100]!r}; it must be a number above 0")
    return alpha
