"""A student and its teacher, for the tests of distillation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.loading import DEFAULT_MODEL
from rllm.config.schema import Config
from rllm.lora.files import write_adapter

CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder on the default model that changes what it says clearly."""
    config = Config.model_validate(
        {"model": CPU, "lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]}}
    )
    backend = LocalBackend.create(config)
    adapter = backend.adapters["default"]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in adapter.modules_adapted:
            b = adapter.matrices(name)[1]
            b.copy_(torch.randn(b.shape, generator=generator) * 0.06)
    folder = tmp_path_factory.mktemp("teacher") / "adapter"
    names = list(backend.model.linear_shapes())
    write_adapter(adapter, folder, base=str(DEFAULT_MODEL), settings=config.lora, names=names)
    backend.close()
    return folder


@pytest.fixture(scope="module")
def student(teacher: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend.create(Config.model_validate({"model": CPU, "distill": {"adapter": str(teacher)}}))
    yield backend
    backend.close()
