"""Unmodified recipes of the tinker cookbook (0.6.1) train against a server of its own process. Slow, and skipped where it is not installed:

pip install --no-deps tinker-cookbook==0.6.1 chz termcolor blobfile tiktoken tml-renderers pyrage cloudpickle pycryptodomex lxml pylatexenc datasets==4.4.2
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rllm.backends.local.loading import DEFAULT_MODEL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("tinker", "tinker_cookbook", "datasets")),
        reason="the tinker SDK and its cookbook are not installed",
    ),
]
NAME = "Qwen/Qwen3-8B"
HEADER = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.parquet\n---\n"


class Kitchen:
    """A folder with local models and data named as the recipes want them, and a server over it."""

    def __init__(self, folder: Path):
        import pyarrow
        import pyarrow.parquet

        self.folder, self.port = folder, 0
        shutil.copytree(DEFAULT_MODEL, folder / NAME)
        numbers = random.Random(0)

        def write(name: str, rows: list[dict[str, Any]], header: str = "") -> None:
            (folder / name).mkdir(parents=True)
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name / "train.parquet")
            if header:
                (folder / name / "README.md").write_text(header)

        sums = [(numbers.randint(0, 9), numbers.randint(0, 9)) for _ in range(400)]
        chats = [
            [{"role": "user", "content": f"What is {a} plus {b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
            for a, b in sums
        ]
        write("HuggingFaceH4/no_robots", [{"messages": chat} for chat in chats])
        write("openai/gsm8k", [{"question": f"{a} + {b}?", "answer": f"#### {a + b}"} for a, b in sums], HEADER)
        (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats[:100]))

    def start(self) -> None:
        command = [sys.executable, "-m", "rllm.cli", "serve", "--model", NAME, "--port", str(self.port)]
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "Tinker API" in line:
                self.url = next(word for word in line.split() if word.startswith("http://"))
                self.port = int(self.url.rpartition(":")[2])
                break
        assert httpx.get(f"{self.url}/api/v1/healthz").status_code == 200

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(how)
        self.process.wait(30)

    def begin(self, recipe: str, log: str, **settings: Any) -> subprocess.Popen[str]:
        words = [f"{key}={value}" for key, value in {"model_name": NAME, "log_path": log, **settings}.items()]
        env = {
            **os.environ,
            "TINKER_API_KEY": "tml-local",
            "TINKER_BASE_URL": self.url,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *words]
        with (self.folder / f"{log}.txt").open("w") as told:
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=told, stderr=subprocess.STDOUT, text=True)

    def cook(self, recipe: str, log: str, **settings: Any) -> list[dict[str, float]]:
        """Run a recipe to its end; its metrics."""
        process = self.begin(recipe, log, **settings)
        assert process.wait(600) == 0, (self.folder / f"{log}.txt").read_text()[-4000:]
        return self.metrics(log)

    def metrics(self, log: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / log / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    made = Kitchen(tmp_path_factory.mktemp("kitchen"))
    made.start()
    yield made
    made.stop()


def column(metrics: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in metrics if name in row]


ARITHMETIC = {
    "env": "arithmetic",
    "group_size": 4,
    "groups_per_batch": 16,
    "max_tokens": 5,
    "learning_rate": 1e-3,
    "lora_rank": 8,
    "eval_every": 0,
    "save_every": 4,
    "behavior_if_log_dir_exists": "delete",
}


def test_sl_loop_lowers_the_loss(kitchen: Kitchen) -> None:
    metrics = kitchen.cook("sl_loop", "sl", batch_size=8, max_steps=30, lora_rank=8)
    nll = column(metrics, "train_mean_nll")
    assert len(nll) == 30 and sum(nll[-5:]) < 0.8 * sum(nll[:5])


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop_runs_with_every_loss_that_it_has_and_is_served(kitchen: Kitchen, loss: str) -> None:
    settings = {"batch_size": 4, "group_size": 4, "max_steps": 2, "max_tokens": 24, "lora_rank": 8, "loss_fn": loss}
    assert len(column(kitchen.cook("rl_loop", f"rl-{loss}", **settings), "reward/total")) == 2


def test_math_rl_raises_its_reward_and_samples_as_it_trains(kitchen: Kitchen) -> None:
    metrics = kitchen.cook("math_rl.train", "math", max_steps=20, loss_fn="importance_sampling", **ARITHMETIC)
    reward = column(metrics, "env/all/reward/total")
    assert len(reward) == 20 and sum(reward[-4:]) / 4 > sum(reward[:4]) / 4 + 0.03, reward
    assert max(map(abs, column(metrics, "optim/kl_sample_train_v2"))) < 1e-8


@pytest.mark.parametrize(
    ("log", "settings"),
    [
        ("ppo", {"loss_fn": "ppo", "num_substeps": 2}),
        ("cispo", {"loss_fn": "cispo", "num_substeps": 2}),
        ("async", {"loss_fn": "ppo", "max_steps_off_policy": 2}),
    ],
)
def test_math_rl_runs_in_its_variants(kitchen: Kitchen, log: str, settings: dict[str, Any]) -> None:
    metrics = kitchen.cook("math_rl.train", log, max_steps=3, **{**ARITHMETIC, **settings})
    assert len(column(metrics, "env/all/reward/total")) == 3


def test_guess_number_plays_many_turns(kitchen: Kitchen) -> None:
    settings = {
        "group_size": 2,
        "batch_size": 2,
        "max_tokens": 4,
        "max_steps": 1,
        "renderer_name": "qwen3",
        "eval_every": 0,
    }
    metrics = kitchen.cook(
        "multiplayer_rl.guess_number.train", "guess", behavior_if_log_dir_exists="delete", **settings
    )
    assert len(column(metrics, "env/all/reward/total")) >= 1


CHAT: dict[str, Any] = {
    "dataset": "chats.jsonl",
    "batch_size": 4,
    "learning_rate": 1e-3,
    "lr_schedule": "constant",
    "lora_rank": 8,
    "eval_every": 0,
    "save_every": 1,
}


def test_chat_sl_killed_with_its_server_goes_on_as_a_run_that_was_not(kitchen: Kitchen) -> None:
    """The recipe saves after it has sent the next step off, and repeats that step when it resumes; so what is compared with is not the
    uninterrupted run but one that goes on from the same checkpoint of that run, without any harm having come to the server."""
    kitchen.cook("chat_sl.train", "whole", max_steps=8, behavior_if_log_dir_exists="delete", **CHAT)
    process = kitchen.begin("chat_sl.train", "cut", max_steps=8, behavior_if_log_dir_exists="delete", **CHAT)
    saved = kitchen.folder / "cut" / "checkpoints.jsonl"
    while not (saved.exists() and len(saved.read_text().splitlines()) >= 3):
        assert process.poll() is None, (kitchen.folder / "cut.txt").read_text()[-3000:]
        time.sleep(0.01)
    kitchen.stop(signal.SIGKILL)
    process.kill()
    process.wait(30)
    last = json.loads(saved.read_text().splitlines()[-1])
    kept = [line for line in (kitchen.folder / "whole" / "checkpoints.jsonl").read_text().splitlines()]
    kept = [line for line in kept if json.loads(line)["batch"] <= last["batch"] and json.loads(line)["epoch"] == 0]
    (kitchen.folder / "calm").mkdir()
    (kitchen.folder / "calm" / "checkpoints.jsonl").write_text("\n".join(kept) + "\n")

    kitchen.start()
    whole, cut, calm = (
        {row["step"]: row["train_mean_nll"] for row in metrics if "train_mean_nll" in row}
        for metrics in (
            kitchen.metrics("whole"),
            kitchen.cook("chat_sl.train", "cut", max_steps=8, behavior_if_log_dir_exists="resume", **CHAT),
            kitchen.cook("chat_sl.train", "calm", max_steps=8, behavior_if_log_dir_exists="resume", **CHAT),
        )
    )
    assert list(cut) == list(whole) == list(range(8)) and list(calm) == list(range(last["batch"], 8))
    again = min(calm)
    assert {step: cut[step] for step in range(again)} == pytest.approx(
        {step: whole[step] for step in range(again)}, rel=1e-6
    )
    assert {step: cut[step] for step in calm} == pytest.approx(calm, rel=1e-6)
    assert cut[7] < cut[0]
