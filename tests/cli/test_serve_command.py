"""`rllm serve` refuses what cannot be before it loads a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_cli import refused

from rllm.serve.tinker.store import Store


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "0.0.0.0"], "clients must have a key"),
        (["--host", "0.0.0.0", "--api-key-env", "NO_SUCH_KEY"], "no such environment variable"),
        (["--host", "0.0.0.0", "--api-key-env", "SHORT"], "at least 8"),
        (["--host", "0.0.0.0", "--api-key-env", "PLAIN"], 'must begin with "tml-"'),
        (["--api", "tinker,grpc"], "'grpc' is not one of tinker, openai"),
        (["--api", "openai", "--alpha", "8"], "--alpha 8.0: it is for Tinker's API"),
        (["--set", "lora.rank=0"], "lora.rank=0: Tinker's runs train adapters"),
        (["--set", "model.pth=x"], "did you mean"),
        (["--model", "/no/such/folder"], "no folder '/no/such/folder'"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, arguments: list[str], told: str) -> None:
    env = {**os.environ, "SHORT": "tml-x", "PLAIN": "a-long-secret-key"}
    assert told in refused("serve", *arguments, cwd=tmp_path, env=env)


def test_a_state_folder_in_use_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    assert "another server using this folder" in refused("serve", "--state", tmp_path / "state", "--port", 0)
    store.close()
