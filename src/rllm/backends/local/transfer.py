"""Numbers from the host to a device without waiting for what the device is doing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `values` (numbers or a CPU tensor) on `device`. On CUDA the copy goes through pinned memory and is only queued: a plain
    ``.to("cuda")`` first waits for everything queued before it."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
