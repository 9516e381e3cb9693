"""Whole runs through a Tinker server: as good as local ones, with roles, files, and a way to go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from solver_judge_flow import solver_judge, solver_judge_evaluator
from test_resume import by_length, one_call, stop_at
from tinker_client import settings, tinker_backend
from tinker_server import KEY, Served

import rllm
from rllm.backends.base import BASE, INITIAL_ADAPTER, SamplingParams
from rllm.backends.local.backend import LocalBackend
from rllm.backends.tinker import connection
from rllm.config.load import load_config
from rllm.data.countdown import countdown
from rllm.errors import ConfigError, ModelError, RunError
from rllm.evaluation import evaluate
from rllm.lora.files import read_adapter
from rllm.rollouts.batch import Rollouts

# The SDK says of its old calls that they are deprecated: none is used.
pytestmark = pytest.mark.filterwarnings("error:DEPRECATED", "error:.*deprecated:FutureWarning")
SMALL = {
    "data": {"train_batch_size": 2, "max_prompt_length": 200, "max_response_length": 32},
    "rollout": {"n": 4, "reward_workers": 0},
    "lora": {"rank": 4, "alpha": 8},
    "optim": {"lr": 1e-2, "schedule": "linear", "weight_decay": 0.01},
}


# One call at a time, so that every run samples in batches of one and gives the same bits.
ALONE = {"flow": one_call, "evaluator": by_length, "rollout": {"max_concurrency": 1}}


def train(
    folder: Path,
    url: str | None,
    steps: int = 2,
    val: int = 0,
    flow: Any = solver_judge,
    evaluator: Any = solver_judge_evaluator,
    **sections: Any,
) -> dict[str, Any]:
    config: dict[str, Any] = {name: dict(values) for name, values in SMALL.items()}
    config["trainer"] = {"run_dir": str(folder / "runs"), "experiment_name": "one", "total_steps": steps}
    if url is not None:
        config |= {"backend": "tinker", "tinker": {"base_url": url}}
    else:
        config["model"] = {"device": "cpu", "dtype": "float32"}
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    return rllm.AgentTrainer(
        agent_flow=flow,
        evaluator=evaluator,
        config=config,
        train_dataset=countdown("train", 8),
        val_dataset=countdown("val", val) if val else None,
    ).train()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)


@pytest.fixture(scope="module")
def trained(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps through the server; the run folder."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        train(folder, served.url, steps=3, val=2, trainer={"total_steps": 3, "save_freq": 2})
    return folder / "runs" / "one"


def test_a_run_is_the_local_run_of_the_same_seed(served: Served, tmp_path: Path) -> None:
    for where, url in (("tinker", served.url), ("local", None)):
        train(tmp_path / where, url, **ALONE)
    found, expected = (lines(tmp_path / where / "runs/one/metrics.jsonl") for where in ("tinker", "local"))
    names = ("actor/loss", "actor/ratio_mean", "actor/clip_fraction", "actor/tokens", "actor/lr", "critic/score/mean")
    for ours, theirs in zip(found, expected, strict=True):
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
    mine, other = (load_file(tmp_path / w / "runs/one/adapter/adapter_model.safetensors") for w in ("tinker", "local"))
    assert set(mine) == set(other)
    assert max(float((mine[name] - other[name]).abs().max()) for name in mine) < 1e-3  # of steps of 1e-2


def test_a_run_leaves_what_a_local_one_does(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text())
    assert result["steps"] == 3 and result["adapter"] == "adapter" and result["state"] == "state"
    assert {"before", "after"} == set(result["val"]) and result["accounting"]["failed"] == {}
    metrics = lines(trained / "metrics.jsonl")
    assert [line["policy_version"] for line in metrics] == [1, 2, 3]
    assert all(line["publish/gap_max"] < 1e-4 and line["actor/sampler_gap_max"] < 1e-4 for line in metrics)
    assert metrics[2]["actor/lr"] < metrics[0]["actor/lr"]
    versions = {
        (episode["step"], version)
        for episode in lines(trained / "episodes.jsonl")
        if episode["split"] == "train"
        for t in episode["trajectories"]
        for step in t["steps"]
        for version in step["versions"]
    }
    assert versions == {(1, 0), (2, 1), (3, 2)}


def test_the_adapter_is_a_peft_folder_that_the_local_backend_samples_as_the_server_does(
    trained: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = read_adapter(trained / "adapter")
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert (trained / "adapter" / "tokenizer.json").is_file() and "- step: 3" in (
        trained / "adapter/README.md"
    ).read_text()
    path = json.loads((trained / "state" / "tinker.json").read_text())["paths"]["default"]
    client = tinker_backend(monkeypatch, served.url)
    monkeypatch.setattr(client, "_trained", lambda: json.loads((trained / "state/tinker.json").read_text())["trained"])
    client.load_state(trained / "state")
    local = LocalBackend.create(settings(f"lora.adapter_path={trained / 'adapter'}"))
    try:
        params = SamplingParams(max_tokens=12, seed=5)
        prompt = local.tokenizer("The sum of 17 and 25 is", add_special_tokens=False)["input_ids"]
        ours, theirs = (asyncio.run(backend.sample(prompt, params)) for backend in (client, local))
        assert ours.ids == theirs.ids and ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert set(ours.versions) == {3} and path.startswith("tinker://")
    finally:
        client.close()
        local.close()


def test_a_stop_in_the_middle_changes_nothing(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "whole", served.url, **ALONE)
    stop_at(monkeypatch, 2)
    assert train(tmp_path, served.url, **ALONE)["interrupted"]
    run = tmp_path / "runs" / "one"
    result = train(tmp_path, served.url, **ALONE, trainer={"resume": str(run)})
    assert result["steps"] == 2 and [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2]
    again, whole = (
        load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (run, tmp_path / "whole/runs/one")
    )
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_state_goes_on_only_as_it_was_begun(trained: Path, served: Served, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"saved with lora\.rank={'default': 4}, this config has {'default': 8}"):
        train(tmp_path, served.url, lora={"rank": 8}, trainer={"total_steps": 5, "resume": str(trained)})


def test_what_the_server_refuses_leaves_no_folder(served: Served, tmp_path: Path) -> None:
    for lora, told in (
        ({"rank": 513}, "this server takes 1 to 512"),
        ({"train_attn": False, "train_mlp": False}, "no module"),
    ):
        with pytest.raises(ConfigError, match=told):
            train(tmp_path, served.url, lora=lora)
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_is_the_local_one_and_takes_no_adapter(served: Served, trained: Path) -> None:
    def result(backend: dict[str, Any], **more: Any) -> dict[str, Any]:
        config = {"data": SMALL["data"], "rollout": {"max_concurrency": 1, "reward_workers": 0}, **backend}
        parts = {"agent_flow": one_call, "evaluator": by_length, "dataset": countdown("val", 4)}
        return evaluate(config=load_config(base=config, training=False), **parts, **more)

    tinker = {"backend": "tinker", "tinker": {"base_url": served.url}}
    assert result(tinker)["metrics"] == result({"model": {"device": "cpu", "dtype": "float32"}})["metrics"]
    with pytest.raises(ConfigError, match=r"^--adapter .*/adapter with backend=tinker: .* leave backend out"):
        result(tinker, adapter=str(trained / "adapter"))


def test_roles_have_runs_of_their_own(served: Served, tmp_path: Path) -> None:
    train(
        tmp_path, served.url, steps=1, lora={"per_role": {"solver": {}, "judge": {"rank": 2}}}, trainer={"save_freq": 1}
    )
    run = tmp_path / "runs" / "one"
    ranks = {name: read_adapter(run / "adapter" / name)[0]["r"] for name in ("solver", "judge")}
    assert ranks == {"solver": 4, "judge": 2}
    assert set(json.loads((run / "state" / "tinker.json").read_text())["paths"]) == {"solver", "judge"}


def test_sampling_is_the_local_engines(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, local = tinker_backend(monkeypatch, served.url), LocalBackend.create(settings())
    try:
        prompt = local.tokenizer("The sum of 17 and 25 is", add_special_tokens=False)["input_ids"]
        heard: list[tuple[int, float]] = []
        for params in (
            SamplingParams(max_tokens=16, seed=7),
            SamplingParams(max_tokens=16, seed=8, temperature=0.7, top_p=0.9, top_k=20),
            SamplingParams(max_tokens=16, temperature=0.0),
            SamplingParams(max_tokens=40, seed=9, stop=("1", "2")),
            SamplingParams(max_tokens=40, seed=9, stop_token_ids=tuple(range(20, 120))),
            SamplingParams(max_tokens=24, seed=9, ignore_eos=True),
        ):
            for adapter in ("default", BASE, INITIAL_ADAPTER):
                heard.clear()
                ours = asyncio.run(client.sample(prompt, params, adapter, lambda t, lp: heard.append((t, lp))))
                theirs = asyncio.run(local.sample(prompt, params, adapter))
                assert (ours.ids, ours.finish_reason) == (theirs.ids, theirs.finish_reason)
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
                assert heard == list(zip(ours.ids, ours.logprobs, strict=True))
        with pytest.raises(RunError, match="takes one of them"):
            asyncio.run(client.sample(prompt, SamplingParams(max_tokens=4, stop=("a",), stop_token_ids=(5,))))
    finally:
        client.close()
        local.close()


def test_the_flags_say_which_layers_are_adapted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for override, layers in (
        ("lora.target_modules=[q_proj,k_proj,v_proj,o_proj]", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("lora.train_attn=false", {"gate_proj", "up_proj", "down_proj"}),
    ):
        client = tinker_backend(monkeypatch, served.url, override)
        client.describe()
        run = served.service.runs[client.training["default"].model_id]
        names = run.learner.adapters["run"].modules_adapted
        assert {name.rpartition(".")[2] for name in names} == layers and run.spec.alpha == 8 and run.spec.seed == 3
        client.close()
    with pytest.raises(ConfigError, match="leaves no module to train"):
        client = tinker_backend(monkeypatch, served.url, "lora.train_attn=false", "lora.train_mlp=false")
        client.describe()
    client.close()


def test_a_server_that_dies_among_the_rollouts_ends_the_run_with_how_to_go_on(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "PULSE_S", 0.2)
    monkeypatch.setattr(connection, "ASK_S", 0.3)
    running = Served(backend, tmp_path / "serve")
    real = Rollouts.run

    def run(self: Any, *args: Any, **more: Any) -> Any:
        if more.get("step") == 2:
            running.close()
        return real(self, *args, **more)

    monkeypatch.setattr(Rollouts, "run", run)
    patience = {"base_url": running.url, "patience_s": 5}
    with pytest.raises(RunError) as found:
        train(tmp_path, running.url, trainer={"save_freq": 1}, tinker=patience)
    told = (
        f"has not answered for 5 s (tinker.patience_s). When it is back, trainer.resume={tmp_path / 'runs/one'} goes on"
    )
    assert told in str(found.value) and "\n" not in str(found.value)
    assert sum("the model failed to answer" in record.getMessage() for record in caplog.records) == 1
    again = Served(backend, tmp_path / "serve")
    monkeypatch.setattr(Rollouts, "run", real)
    resumed = {"save_freq": 1, "resume": str(tmp_path / "runs/one")}
    assert train(tmp_path, again.url, trainer=resumed)["steps"] == 2
    again.close()
