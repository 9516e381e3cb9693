"""The whole loop on the default model: what a run leaves, what it counts, and what it says when something is wrong."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from solver_judge_flow import SolverJudgeWorkflow, solver_judge, solver_judge_evaluator

import rllm
from rllm.collect import task_batches
from rllm.data.countdown import countdown
from rllm.errors import ConfigError, DataError, ModelError, RunError
from rllm.evaluation import evaluate
from rllm.rollouts.batch import stable_seed

ROOT = Path(__file__).parents[2]
SMALL = {
    "data": {"train_batch_size": 2, "max_prompt_length": 200, "max_response_length": 48},
    "rollout": {"n": 4},
    "lora": {"rank": 4, "alpha": 8},
    "trainer": {"total_steps": 2, "logger": "console"},
}


def settings(tmp_path, **sections):
    merged = {name: {**values} for name, values in SMALL.items()}
    merged["trainer"]["run_dir"] = str(tmp_path / "runs")
    for name, values in sections.items():
        merged.setdefault(name, {}).update(values)
    return merged


def train(tmp_path, flow=solver_judge, evaluator=solver_judge_evaluator, tasks=8, val=4, **sections):
    return rllm.AgentTrainer(
        agent_flow=flow,
        evaluator=evaluator,
        config=settings(tmp_path, **sections),
        train_dataset=countdown("train", tasks) if isinstance(tasks, int) else tasks,
        val_dataset=countdown("val", val) if val else None,
    ).train()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_everything_the_contract_names_and_the_counts_add_up(tmp_path):
    result = train(tmp_path)
    folder = tmp_path / "runs" / "latest"
    assert folder.resolve().parent == (tmp_path / "runs").resolve()
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["steps"] == 2 and result["adapter"] == "adapter" and result["seconds"] > 0
    assert {"val/countdown/solver_acc", "val/countdown/judge_acc"} <= set(result["val"]["before"]) & set(
        result["val"]["after"]
    )
    account = result["accounting"]
    assert account["generated"] == 2 * 2 * 4 * 3
    assert account["generated"] == (
        account["trained"] + sum(account["dropped"].values()) + sum(account["failed"].values()) + account["stale"]
    )
    metrics = lines(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    assert all((m["gateway/calls"], m["gateway/segments"], m["gateway/rewritten"]) == (24, 24, 0) for m in metrics)
    assert {"critic/score/mean", "reward/solver/mean", "reward/judge/mean", "actor/loss", "actor/grad_norm"} <= set(
        metrics[0]
    )
    assert max(m["actor/sampler_gap_max"] for m in metrics) < 1e-4
    assert all(m["publish/gap_max"] < 1e-4 and m["publish/bytes"] > 0 and m["timing_s/publish"] > 0 for m in metrics)
    episodes = lines(folder / "episodes.jsonl")
    assert [e["split"] for e in episodes].count("train") == 16 and [e["split"] for e in episodes].count("val") == 8
    for episode in episodes:
        assert [t["name"] for t in episode["trajectories"]] == ["solver", "solver", "judge"]
        for trajectory in episode["trajectories"]:
            (step,) = trajectory["steps"]
            assert len(step["response_ids"]) == len(step["logprobs"]) == len(step["versions"]) > 0
    assert rllm.load_config([folder / "config.yaml"]).config.lora.rank == 4
    assert {"command", "versions", "git"} <= set(json.loads((folder / "run.json").read_text()))


def test_peft_loads_the_saved_adapter_and_it_is_no_noop(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from rllm.backends.local.loading import DEFAULT_MODEL

    train(tmp_path, val=0, optim={"lr": 0.01})
    adapter = tmp_path / "runs" / "latest" / "adapter"
    assert (adapter / "tokenizer.json").is_file() and "- policy version: 2\n- step: 2\n" in (
        adapter / "README.md"
    ).read_text()
    ids = torch.arange(30)[None]
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    with torch.no_grad():
        plain = model(ids).logits
        tuned = PeftModel.from_pretrained(model, str(adapter))(input_ids=ids).logits
    assert (plain - tuned).abs().max() > 1e-3
    result = evaluate(
        agent_flow=solver_judge,
        evaluator=solver_judge_evaluator,
        config=settings(tmp_path),
        dataset=countdown("val", 4),
        adapter=str(adapter),
        ks=(1, 2),
    )
    assert result["episodes"] == 8 and "val/countdown/pass@2" in result["metrics"]


def test_the_same_seed_trains_the_same_adapter_and_another_seed_another(tmp_path):
    def adapter(name, seed):
        train(tmp_path, val=0, trainer={"seed": seed, "experiment_name": name, "total_steps": 1})
        return (tmp_path / "runs" / name / "adapter" / "adapter_model.safetensors").read_bytes()

    def first_rewards(name):
        return [t["reward"] for e in lines(tmp_path / "runs" / name / "episodes.jsonl") for t in e["trajectories"]]

    adapter("a", 1), adapter("b", 1)
    assert first_rewards("a") == first_rewards("b")
    assert adapter("c", 1) != adapter("d", 2)


def test_full_finetuning_runs_the_same_loop_and_saves_a_model(tmp_path):
    from transformers import AutoModelForCausalLM

    result = train(tmp_path, lora={"rank": 0}, optim={"lr": 1e-4}, trainer={"total_steps": 1})
    assert (result["adapter"], result["model"]) == (None, "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "latest" / "model")
    assert {"before", "after"} <= set(result["val"])


def test_a_workflow_class_trains_like_a_flow(tmp_path):
    result = rllm.AgentTrainer(
        workflow_class=SolverJudgeWorkflow,
        workflow_args={"n_solutions": 3},
        config=settings(tmp_path, trainer={"total_steps": 1}),
        train_dataset=countdown("train", 4),
        val_dataset=countdown("val", 2),
    ).train()
    assert result["accounting"]["generated"] == 2 * 4 * 4 and "val/countdown/judge_acc" in result["val"]["after"]


def flow_of(function):
    return rllm.rollout(name="solver")(function)


async def ask(task, config):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=config.base_url, api_key="x") as client:
        await client.chat.completions.create(
            model=config.model, messages=[{"role": "user", "content": task.instruction}], max_tokens=8
        )


@pytest.mark.parametrize(
    ("flow", "evaluator", "message"),
    [
        (lambda task, config: 1 / 0, lambda task, episode: 1.0, "ZeroDivisionError"),
        (lambda task, config: None, lambda task, episode: 1.0, "model call"),
        (lambda task, config: "text", lambda task, episode: 1.0, "returned str"),
        (ask, lambda task, episode: float("nan"), "must be finite"),
        (ask, lambda task, episode: "1.0", "found '1.0'"),
        (ask, lambda task, episode: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["raises", "returns nothing", "wrong type", "nan", "string", "evaluator raises"],
)
def test_when_every_episode_fails_the_run_stops_with_the_reason(tmp_path, flow, evaluator, message):
    with pytest.raises(RunError, match=r"8 of 8 episodes failed.*max_failed_fraction") as error:
        train(tmp_path, flow_of(flow), rllm.evaluator(evaluator), val=0)
    assert re.search(message, str(error.value)), str(error.value)


def test_one_failing_episode_costs_only_itself(tmp_path):
    seen = []

    async def sometimes(task, config):
        seen.append(task.id)
        if len(seen) == 3:
            raise RuntimeError("this one only")
        await ask(task, config)

    result = train(
        tmp_path,
        flow_of(sometimes),
        rllm.evaluator(lambda task, episode: len(seen) % 2),
        val=0,
        trainer={"total_steps": 1},
    )
    assert result["accounting"]["failed"] == {"error": 1} and result["accounting"]["generated"] == 8
    errors = [e["error"] for e in lines(tmp_path / "runs" / "latest" / "episodes.jsonl") if e["error"]]
    assert len(errors) == 1 and "this one only" in errors[0]


def test_a_step_without_signal_is_skipped_and_counted(tmp_path):
    result = train(tmp_path, flow_of(ask), rllm.evaluator(lambda task, episode: 1.0), val=0, trainer={"total_steps": 1})
    assert result["accounting"]["dropped"] == {"zero_std": 8}
    (metrics,) = lines(tmp_path / "runs" / "latest" / "metrics.jsonl")
    assert metrics["train/skipped_steps"] == 1 and metrics["policy_version"] == 0


def test_what_is_missing_or_contradictory_is_refused_before_training(tmp_path):
    with pytest.raises(DataError, match="empty"):
        train(tmp_path, tasks=[])
    with pytest.raises(DataError, match="no training tasks"):
        rllm.AgentTrainer(agent_flow=solver_judge, evaluator=solver_judge_evaluator, config=settings(tmp_path)).train()
    with pytest.raises(ConfigError, match="exactly one of agent_flow and workflow_class"):
        rllm.AgentTrainer(config=settings(tmp_path))
    with pytest.raises(ConfigError, match="needs an evaluator"):
        rllm.AgentTrainer(agent_flow=solver_judge, config=settings(tmp_path))
    with pytest.raises(ConfigError, match="at least 2"):
        train(tmp_path, rollout={"n": 1})
    with pytest.raises(ModelError, match=r"no folder '\./nowhere'"):
        train(tmp_path, model={"path": "./nowhere"})
    with pytest.raises(ConfigError, match="did you mean 'q_proj'"):
        train(tmp_path, lora={"target_modules": ["q_porj"]})


def test_batches_cover_every_task_once_an_epoch_and_repeat_with_the_seed():
    dataset = countdown("train", 7)
    config = rllm.load_config(overrides=["data.train_batch_size=3"]).config
    stream = task_batches(dataset, config)
    epoch = [[task.id for task in next(stream)] for _ in range(3)]
    assert [len(batch) for batch in epoch] == [3, 3, 1]
    assert sorted(name for batch in epoch for name in batch) == sorted(task.id for task in dataset)
    again = task_batches(dataset, config)
    assert [[task.id for task in next(again)] for _ in range(3)] == epoch


def test_seeds_depend_on_their_parts_alone():
    assert stable_seed(1, "a", 2) == stable_seed(1, "a", 2) != stable_seed(1, "a", 3)
    assert 0 <= stable_seed("x") < 2**63


def start_run(tmp_path):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rllm.cli",
            "train",
            str(ROOT / "examples" / "solver_judge" / "solver_judge_flow.py"),
            "trainer.total_steps=500",
            "trainer.val_before_train=false",
            "data.train_batch_size=2",
            "data.max_response_length=32",
            f"trainer.run_dir={tmp_path}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step" in line and "/500" in line:
            break
    return process


def test_ctrl_c_saves_what_was_learnt_and_says_how_to_go_on(tmp_path):
    process = start_run(tmp_path)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert "interrupted after" in output and "lora.adapter_path=" in output and "Traceback" not in output
    result = json.loads((tmp_path / "latest" / "result.json").read_text())
    assert result["interrupted"] and result["steps"] >= 1
    assert (tmp_path / "latest" / "adapter" / "adapter_model.safetensors").is_file()
    assert process.returncode == 0
    assert math.isfinite(result["seconds"])


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path):
    process = start_run(tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode != 0
