"""Whole runs on verl, on this machine's CPU (see `fit_on_cpu.py`). Minutes, so only `make test-verl` runs them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rllm.backends.local.loading import DEFAULT_MODEL
from rllm.lora.files import read_adapter
from rllm.lora.merge import base_of, merge_adapter

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl 0.9.1: make test-verl"),
]


def fit(folder, ranks, fault, *overrides):
    paths = [str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-W", "ignore", str(HERE / "fit_on_cpu.py"), str(folder), str(ranks), fault, *overrides]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=800
    )


def result_of(done):
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).removeprefix("RESULT")
    )


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_adapter_mode_on_two_ranks_trains_publishes_saves_and_goes_on_upon_two_machines(tmp_path):
    arguments = (
        "actor_rollout_ref.model.lora.merge=false",
        "algorithm.adv_estimator=reinforce",
        "algorithm.kl_beta=0.01",
        "trainer.experiment_name=run",
        "trainer.save_freq=2",
        "trainer.test_freq=3",
        "trainer.resume=auto",
    )
    result = result_of(fit(tmp_path, 2, "none", *arguments, "trainer.total_steps=3"))
    run = tmp_path / "run"
    steps = metrics_of(run)
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3] == list(range(1, result["steps"] + 1))
    assert 0 < result["parameters"]["trained"] < 0.05 * result["parameters"]["total"]
    assert result["accounting"]["generated"] == result["accounting"]["trained"] == 3 * 3 * 2 * 3
    assert {"before", "after"} == result["val"].keys()
    assert "val/countdown/solver_acc" in result["val"]["after"]
    for step in steps:
        assert (
            step["publish/gap_mean"] < 1e-5
        )  # float32 on both sides: the sampler has the trained policy, adapter and all
        assert step["samples/generated"] == step["samples/trained"]
        assert {"critic/score/mean", "batch/judge_acc", "timing_s/rollout", "timing_s/publish"} <= step.keys()
        told = sum(len(s["response_ids"]) for e in episodes if e["step"] == step["step"] and e["split"] == "train"
                   for t in e["trajectories"] for s in t["steps"])  # fmt: skip
        assert step["perf/generated_tokens"] == told > 0
        assert step["perf/tokens_per_s"] == pytest.approx(told / step["timing_s/step"])
        assert step["timing_s/rollout"] + step["timing_s/update"] <= step["timing_s/step"] + 0.01
    rewarded = [step for step in steps if step["critic/score/mean"] > 0]
    assert rewarded and all(step["actor/grad_norm"] > 0 and step["actor/loss"] != 0 for step in rewarded)
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    assert any(value.abs().sum() > 0 for name, value in tensors.items() if "lora_B" in name)
    assert (run / "adapter" / "tokenizer.json").is_file() and "base fingerprint" in (
        run / "adapter" / "README.md"
    ).read_text()
    done = merge_adapter(run / "adapter", Path(base_of(run / "adapter", DEFAULT_MODEL)), tmp_path / "merged")
    assert done.matrices == len(tensors) // 2 and done.logits is not None  # those of PEFT on the base
    config, matrices = read_adapter(run / "adapter-step-2")
    assert (config["r"], config["lora_alpha"], len(matrices)) == (4, 8, len(tensors) // 2)

    again = result_of(fit(tmp_path, "1+1", "none", *arguments, "trainer.total_steps=4"))
    assert again["steps"] == 4 and again["val"].keys() == {"after"}
    assert [step["step"] for step in metrics_of(run)] == [1, 2, 3, 4]
    assert metrics_of(run)[-1]["publish/gap_mean"] < 1e-5


def test_merge_mode_counts_failures_and_pads_what_is_left(tmp_path):
    result = result_of(
        fit(
            tmp_path,
            1,
            "task",
            "algorithm.zero_std=keep",
            "trainer.experiment_name=run",
            "trainer.total_steps=2",
            "trainer.val_before_train=false",
            "algorithm.mini_batch_size=1",
            "optim.warmup_steps=2",
            "actor_rollout_ref.model.lora.merge=true",
        )
    )
    accounting = result["accounting"]
    assert accounting["failed"] == {"error": 2 * 2}
    assert accounting["trained"] == 2 * 2 * 2 * 3
    for step in metrics_of(tmp_path / "run"):
        assert step["publish/gap_mean"] < 5e-2
        assert (step["train/optimizer_steps"], step["samples/failed/error"]) == (
            2,
            2,
        )  # as many as there are tasks to train
        assert step["train/padding_rows"] == 0  # 12 rows in 2 mini-batches
    assert [step["actor/lr"] for step in metrics_of(tmp_path / "run")] == [0.0, pytest.approx(5e-3)]
    assert result["val"].keys() == {"after"}  # without trainer.test_freq too
    episodes = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    assert any("this flow is broken" in (episode["error"] or "") for episode in episodes)


def test_full_fine_tuning_makes_no_step_of_rows_without_a_signal_and_leaves_a_model(tmp_path):
    result = result_of(
        fit(
            tmp_path,
            1,
            "group",
            "lora.rank=0",
            "optim.lr=1e-4",
            "trainer.logger=[console,tensorboard]",
            "algorithm.mini_batch_size=1",
            "trainer.experiment_name=run",
            "trainer.total_steps=2",
            "trainer.val_before_train=false",
        )
    )
    for step in metrics_of(tmp_path / "run"):
        assert (step["samples/trained"], step["samples/dropped/zero_std"], step["train/optimizer_steps"]) == (4, 14, 1)
        assert step["actor/loss"] is not None and step["actor/grad_norm"] > 0
        assert step["publish/gap_mean"] < 1e-5
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert result["adapter"] is None and result["state"] == "checkpoints"
    saved = load_file(tmp_path / "run" / result["model"] / "model.safetensors")
    begun = load_file(DEFAULT_MODEL / "model.safetensors")
    assert any(not torch.equal(saved[name].float(), begun[name].float()) for name in saved.keys() & begun.keys())


def test_a_flow_that_always_fails_ends_the_run_with_its_traceback_and_exit_code_2(tmp_path):
    done = fit(tmp_path, 1, "all", "trainer.total_steps=1", "trainer.val_before_train=false")
    assert done.returncode == 2
    assert "6 of 6 episodes failed" in done.stderr and "this flow is broken" in done.stderr
    assert "ray.exceptions" not in done.stderr
