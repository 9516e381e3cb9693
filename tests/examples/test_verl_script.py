"""A complete verl script runs here unmodified, and the page about its keys says what the tables say."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rllm.config.load import load_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "solver_judge"
SCRIPT = FOLDER / "train_solver_judge_verl.sh"


def load_page_maker():
    spec = importlib.util.spec_from_file_location("make_verl_page", ROOT / "tests" / "config" / "make_verl_page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments_of(script, stub):
    """The arguments that a script calls Python with: it is run with a Python that only prints them."""
    stub.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[2:]))' \"$@\"\n")
    stub.chmod(0o755)
    environment = os.environ | {"PYTHON": str(stub)}
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sampled_first(run):
    """The token ids that the solvers sampled in step 1, by episode. Two solvers ask at once, so their order is not fixed."""
    return {
        episode["id"]: sorted(
            trajectory["steps"][0]["response_ids"]
            for trajectory in episode["trajectories"]
            if trajectory["name"] == "solver"
        )
        for episode in map(json.loads, (run / "episodes.jsonl").read_text().splitlines())
        if (episode["step"], episode["split"]) == (1, "train")
    }


@pytest.mark.parametrize("name", ["train_solver_judge_verl.sh", "train_solver_judge_flow.sh"])
def test_every_key_of_the_scripts_is_taken_with_the_value_it_has_there(tmp_path, name):
    arguments = arguments_of(FOLDER / name, tmp_path / "python")
    c = load_config(overrides=arguments).config
    assert (c.lora.rank, c.lora.alpha, c.lora.target_modules) == (8, 8, "all-linear")
    assert (c.data.train_batch_size, c.rollout.n, c.algorithm.adv_estimator) == (16, 4, "grpo")
    if name == SCRIPT.name:
        assert (c.model.path, c.optim.lr, c.rollout.temperature, c.rollout.val_temperature) == (
            "Qwen/Qwen3-0.6B",
            1e-5,
            0.6,
            0.6,
        )
        assert (c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high, c.algorithm.kl_beta) == (0.2, 0.28, 0)
        assert (c.data.max_prompt_length, c.data.max_response_length) == (2048, 1024)
        assert (c.trainer.total_steps, c.trainer.test_freq, c.trainer.save_freq) == (150, 10, 1000)


def test_the_script_trains_the_default_model_and_its_config_file_trains_the_same_again(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "MODEL_PATH": "default", "PYTHONPATH": str(ROOT / "src")}
    small = [
        "trainer.total_training_steps=2",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_response_length=48",
        "data.val_max_samples=4",
    ]
    done = subprocess.run(
        ["bash", str(SCRIPT), *small], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=170
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "solver-judge-lora"
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 2 and result["accounting"]["generated"] == 2 * 4 * 4 * 3
    assert "no effect here: placement on several workers" in " ".join(done.stdout.split())

    again = [sys.executable, "-m", "rllm.cli", "train", str(FOLDER / "solver_judge_flow.py")]
    again += ["--config", str(run / "config.yaml"), "trainer.experiment_name=again"]
    done = subprocess.run(again, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=170)
    assert done.returncode == 0, done.stderr
    first, second = (tmp_path / "runs" / name for name in (run.name, "again"))
    assert sampled_first(first) == sampled_first(second) and len(sampled_first(first)) == 4 * 4
    first_config, second_config = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (first, second))
    second_config["trainer"]["experiment_name"] = first_config["trainer"]["experiment_name"]
    assert first_config == second_config


def test_the_page_about_verls_keys_says_what_the_tables_say():
    made = load_page_maker().page()
    assert (ROOT / "docs" / "verl_keys.md").read_text() == made, (
        "run tests/config/make_verl_page.py > docs/verl_keys.md"
    )
    for key in load_page_maker().script_keys():
        assert f"| `{key}` | " in made


def test_the_page_lists_every_key_of_the_script(tmp_path):
    given = {text.partition("=")[0] for text in arguments_of(SCRIPT, tmp_path / "python")}
    assert given == set(load_page_maker().script_keys()) and len(given) > 50
