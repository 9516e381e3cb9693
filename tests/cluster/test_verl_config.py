"""What we render is a config that verl's own tools compose, resolve and accept."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from rllm.backends.verl import install
from rllm.backends.verl.render import MODEL, ROLLOUT, render
from rllm.config.load import load_config
from rllm.errors import ConfigError

needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl 0.9.1: make test-verl")


def rendered(*overrides, parameters=1e9):
    return render(load_config(overrides=["backend=verl", *overrides]).config, "/m", 7, "/runs/r", parameters)


def test_without_verl_one_line_says_how_to_get_it(monkeypatch):
    def missing(_):
        raise install.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(install.importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"verl is not installed; pip install 'rllm\[verl\]'$"):
        install.require_verl()


def test_another_version_of_verl_is_refused(monkeypatch):
    monkeypatch.setattr(install.importlib.metadata, "version", lambda _: "0.8.0")
    with pytest.raises(ConfigError, match=r"found verl 0\.8\.0.*runs verl 0\.9\.1"):
        install.require_verl()


def test_a_missing_rollout_engine_is_named(monkeypatch):
    monkeypatch.setattr(install.importlib.metadata, "version", lambda _: install.VERSION)
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None if name == "vllm" else object())
    with pytest.raises(ConfigError, match="but not vllm"):
        install.require_verl()
    install.require_verl("another")


def test_another_release_of_vllm_is_refused_and_a_build_of_the_right_one_taken(monkeypatch):
    found = {"verl": install.VERSION, "vllm": "0.25.0"}
    monkeypatch.setattr(install.importlib.metadata, "version", found.__getitem__)
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match=r"found vllm 0\.25\.0; verl 0\.9\.1 runs vllm 0\.24\.0"):
        install.require_verl()
    found["vllm"] = "0.24.0+cu130"
    install.require_verl()


@needs_verl
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("lora.rank=0",),
        ("model.dtype=float32", "lora.target_modules=[q_proj,v_proj]", r"lora.exclude_modules=.*\.5\..*"),
        (
            f"{MODEL}.lora.merge=false",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=8",
        ),
        ("algorithm.kl_beta=0.01", "algorithm.loss=cispo", "algorithm.mini_batch_size=4", "optim.schedule=cosine"),
    ],
)
def test_verl_composes_resolves_and_accepts_it(overrides):
    from rllm.cluster.start import check_against_verl, compose

    done = rendered(*overrides, f"{ROLLOUT}.name=rllm_engine")  # of vLLM it asks the version
    check_against_verl(done)
    tree = compose(done)
    OmegaConf.resolve(tree)
    for key, value in done.values.items():
        found = OmegaConf.select(tree, key.lstrip("+"))
        found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
        assert found == value or (isinstance(value, float) and math.isclose(found, value)), key


@needs_verl
def test_a_key_that_verl_lacks_is_told_with_the_nearest():
    from rllm.cluster.start import compose

    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilisation: verl 0\.9\.1 has no such key; did you mean .*utilization"
    ):
        compose(rendered(f"{ROLLOUT}.gpu_memory_utilisation=0.5"))
    tree = compose(rendered(f"verl.+{MODEL}.lora.fully_sharded_loras=true"))
    assert tree.actor_rollout_ref.model.lora.fully_sharded_loras is True


@needs_verl
def test_what_verls_own_config_classes_refuse_is_one_line():
    from rllm.cluster.start import check_against_verl

    with pytest.raises(ConfigError, match=r"verl refuses this config: .*ppo_micro_batch_size"):
        check_against_verl(rendered("actor_rollout_ref.actor.use_dynamic_bsz=false", f"{ROLLOUT}.name=rllm_engine"))


@needs_verl
def test_a_complete_verl_script_reaches_verl_key_by_key():
    from rllm.cluster.start import compose

    script = (Path(__file__).parents[2] / "examples" / "solver_judge" / "train_solver_judge_verl.sh").read_text()
    given = dict(re.findall(r"^    ((?:actor_rollout_ref|data|trainer)[\w.]+)=(\S+) \\$", script, re.M))
    tree = compose(rendered(*(f"{key}={value}" for key, value in given.items() if "$" not in value)))
    assert len(given) > 30
    for key, value in given.items():
        found = OmegaConf.select(tree, key)
        # The script's variable; a weight that is 0 where the KL is off; the steps, which `render` is given; what rllm does itself.
        if key.endswith((".path", "kl_loss_coef", "total_epochs", "total_training_steps", "val_batch_size")):
            continue
        assert found == yaml.safe_load(value) or float(found) == float(value), key


@needs_verl
@pytest.mark.slow
def test_main_ppo_itself_prints_the_job():
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "verl.trainer.main_ppo",
        "--cfg",
        "job",
        *rendered("lora.rank=16").overrides(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "lora_rank: 16" in done.stdout
