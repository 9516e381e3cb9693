"""The tinker backend against a real server of ours, beside a local backend of the same adapter."""

from __future__ import annotations

import random
from typing import Any

from tinker_server import KEY

from rllm.backends.base import Datum
from rllm.config.load import load_config
from rllm.config.schema import Config

LORA = ["lora.rank=4", "lora.alpha=8", "trainer.seed=3"]


def settings(*overrides: str, url: str | None = None) -> Config:
    """A config of either backend."""
    where = ["backend=tinker", f"tinker.base_url={url}"] if url else ["model.device=cpu", "model.dtype=float32"]
    return load_config(overrides=[*where, *LORA, *overrides]).config


def tinker_backend(monkeypatch: Any, url: str, *overrides: str) -> Any:
    from rllm.backends.tinker.backend import TinkerBackend

    monkeypatch.setenv("TINKER_API_KEY", KEY)
    return TinkerBackend.create(settings(*overrides, url=url))


def rows(roles: tuple[str, ...] = ("",), adapters: tuple[str, ...] = ("default",), off: float = 0.3) -> list[Datum]:
    """Rows of several lengths, one of them without a trained token; log-probabilities that put some ratios beyond every bound."""
    rng = random.Random(7)
    made = []
    for i, n in enumerate((9, 5, 14, 7, 6)):
        ids = [rng.randrange(5, 500) for _ in range(n)]
        mask = [0, 0] + [int(i != 4 and rng.random() < 0.8) for _ in range(n - 2)]
        row = Datum(ids, mask, role=roles[i % len(roles)], adapter=adapters[i % len(adapters)])
        row.advantages = [m * rng.gauss(0, 1) for m in mask]
        row.logprobs = [m * (-7.0 + rng.gauss(0, off)) for m in mask]
        made.append(row)
    return made


def near(data: list[Datum], logprobs: list[list[float]], off: float, seed: int = 1) -> list[Datum]:
    """`data` sampled by a policy whose log-probabilities differ from those given by about `off`."""
    rng = random.Random(seed)
    for row, values in zip(data, logprobs, strict=True):
        row.logprobs = [m * (v + rng.gauss(0, off)) for v, m in zip(values, row.mask, strict=True)]
    return data
