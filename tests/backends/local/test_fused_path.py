"""Which models the CUDA kernels are trusted with. Decided without a GPU."""

from __future__ import annotations

import torch

from rllm.backends.local.loading import DEFAULT_MODEL, decoder_config, read_config
from rllm.backends.local.model import fused_path_missing


def test_float32_takes_the_plain_path_since_the_kernels_attention_cannot() -> None:
    config = decoder_config(read_config(DEFAULT_MODEL))
    why = fused_path_missing(config, torch.device("cuda"), torch.float32)
    assert why is not None and "float32" in why
    assert "float32" not in (fused_path_missing(config, torch.device("cuda"), torch.bfloat16) or "")
    assert fused_path_missing(config, torch.device("cpu"), torch.bfloat16) == "they need a CUDA device"
