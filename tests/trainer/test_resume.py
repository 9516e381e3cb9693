"""A run that stopped goes on as if it had not: weights, optimizer, tasks, counts, files."""

import contextlib
import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file
from solver_judge_flow import solver_judge, solver_judge_evaluator
from test_trainer import lines, settings, train

import rllm
from rllm import checkpoint
from rllm.backends.local.backend import LocalBackend
from rllm.errors import ConfigError
from rllm.rollouts.batch import Rollouts


@rllm.rollout(name="solver")
async def one_call(task, config):
    """One call at a time, so that every run samples in batches of one and gives the same bits."""
    async with AsyncOpenAI(base_url=config.base_url, api_key="none") as client:
        messages = [{"role": "user", "content": task.instruction}]
        await client.chat.completions.create(model=config.model, messages=messages)


@rllm.evaluator
def by_length(task, episode):
    text = episode.trajectories[0].steps[-1].model_response or ""
    return (len(text) % 7) / 6


ALONE = {
    "flow": one_call,
    "evaluator": by_length,
    "rollout": {"n": 4, "max_concurrency": 1},
    "optim": {"lr": 3e-3, "schedule": "linear"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps without a stop."""
    path = tmp_path_factory.mktemp("whole")
    result = train(path, **ALONE, trainer={"total_steps": 4, "test_freq": 2})
    return result, path / "runs" / "latest"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The first two of those steps."""
    path = tmp_path_factory.mktemp("begun")
    train(path, trainer={"total_steps": 2, "test_freq": 2, "experiment_name": "one"})
    return path


def stop_at(monkeypatch, step):
    """Ctrl-C in the rollouts of a step, the first time; what returns lists the steps whose rollouts began."""
    real, calls = Rollouts.run, []

    def run(self, *args, **kwargs):
        if not kwargs.get("validation"):
            calls.append(kwargs["step"])
            if kwargs["step"] == step and calls.count(step) == 1:
                raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Rollouts, "run", run)
    return calls


def copy_of(begun, tmp_path):
    shutil.copytree(begun / "runs", tmp_path / "runs", symlinks=True)
    return tmp_path / "runs" / "one"


def test_a_stop_in_the_middle_changes_nothing(whole, tmp_path, monkeypatch):
    result, folder = whole
    stop_at(monkeypatch, 3)
    train(tmp_path, **ALONE, trainer={"total_steps": 4, "test_freq": 2})
    run = (tmp_path / "runs" / "latest").resolve()
    again = train(tmp_path, **ALONE, trainer={"total_steps": 4, "test_freq": 2, "resume": str(run)})
    assert again["steps"] == 4 and again["accounting"] == result["accounting"] and again["val"] == result["val"]
    expected, found = lines(folder / "metrics.jsonl"), lines(run / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for now, then in zip(found, expected, strict=True):
        same = [name for name in then if not name.startswith(("timing_s/", "perf/", "publish/", "gateway/"))]
        same.remove("seconds")
        assert {name: now[name] for name in same} == {name: then[name] for name in same}
    ours, theirs = (load_file(f / "adapter" / "adapter_model.safetensors") for f in (run, folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert json.loads((run / "run-2.json").read_text())["resumed_after_step"] == 2
    sampled = [
        [
            (line["step"], line["split"], line["trajectories"][0]["steps"][0]["response_ids"])
            for line in lines(f / "episodes.jsonl")
        ]
        for f in (run, folder)
    ]
    assert sampled[0] == sampled[1]


def test_the_run_of_a_name_goes_on_by_itself_and_begins_where_there_is_none(begun, tmp_path):
    fresh = {"total_steps": 1, "resume": "auto", "experiment_name": "two"}
    assert train(tmp_path, val=0, trainer=fresh)["steps"] == 1
    copy_of(begun, tmp_path / "b")
    result = train(tmp_path / "b", trainer={"total_steps": 3, "resume": "auto", "experiment_name": "one"})
    assert result["steps"] == 3 and [line["step"] for line in lines(tmp_path / "b/runs/one/metrics.jsonl")] == [1, 2, 3]


@pytest.mark.slow
def test_the_link_to_the_newest_run_can_be_named_and_stays_a_link_to_it(begun, tmp_path, monkeypatch):
    copy_of(begun, tmp_path)
    link = tmp_path / "runs" / "latest"
    for total, name in (3, str(link)), (4, "."):
        monkeypatch.chdir(link)
        assert train(tmp_path, val=0, trainer={"total_steps": total, "resume": name})["steps"] == total
        assert link.readlink().name == "one" and len(lines(link / "metrics.jsonl")) == total


def test_a_run_that_was_killed_before_its_first_state_does_not_hide_the_one_that_followed(begun, tmp_path):
    run = copy_of(begun, tmp_path)
    run.rename(run.with_name("one-2"))
    run.mkdir()
    train(tmp_path, val=0, trainer={"total_steps": 3, "resume": "auto", "experiment_name": "one"})
    assert sorted(path.name for path in run.parent.iterdir()) == ["latest", "one", "one-2"]
    assert len(lines(run.with_name("one-2") / "metrics.jsonl")) == 3


def test_ctrl_c_between_the_optimizer_steps_of_a_step_waits_for_its_end(tmp_path, monkeypatch):
    """Weights and counts that are saved must be of the same step."""
    real, taken = LocalBackend.optim_step, []

    def optim_step(self, params):
        taken.append(params)
        if len(taken) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, params)

    monkeypatch.setattr(LocalBackend, "optim_step", optim_step)
    before = signal.getsignal(signal.SIGINT)
    several = {"algorithm": {"ppo_epochs": 2, "zero_std": "keep"}}
    result = train(tmp_path, **ALONE, **several, val=0, trainer={"total_steps": 3})
    assert result["interrupted"] and result["steps"] == 2 and len(taken) == 4
    run = (tmp_path / "runs" / "latest").resolve()
    assert checkpoint.load(run)[1].step == 2 and [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_the_validation_of_a_step_keeps_the_line_of_the_step(tmp_path, monkeypatch):
    real = Rollouts.run

    def run(self, *args, **kwargs):
        if kwargs.get("validation"):
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Rollouts, "run", run)
    trainer = {"total_steps": 2, "test_freq": 1, "val_before_train": False}
    result = train(tmp_path, trainer=trainer)
    assert result["steps"] == 1 and [line["step"] for line in lines(tmp_path / "runs/latest/metrics.jsonl")] == [1]


def test_ctrl_c_leaves_a_state_of_the_last_finished_step(tmp_path, monkeypatch):
    calls = stop_at(monkeypatch, 2)
    result = train(tmp_path, val=0, trainer={"total_steps": 2})
    assert result["interrupted"] and result["steps"] == 1 and result["state"] == "state"
    folder = (tmp_path / "runs" / "latest").resolve()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lost": 1}\n{"step": 2, "ha')
    with (folder / "episodes.jsonl").open("ab") as file:
        file.write('{"step": 1, "text": "é'.encode()[:-1])
    assert train(tmp_path, val=0, trainer={"total_steps": 2, "resume": str(folder)})["steps"] == 2
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2] and calls == [1, 2, 2]


def test_a_kill_while_the_state_is_written_leaves_the_one_before(begun, tmp_path):
    run = copy_of(begun, tmp_path)
    (run / "state").rename(run / "state.older")
    (run / "state.newer").mkdir()
    assert checkpoint.load(run)[1].step == 2
    assert train(tmp_path, val=0, trainer={"total_steps": 3, "resume": str(run)})["steps"] == 3
    assert not (run / "state.older").exists() and not (run / "state.newer").exists()


def test_a_kill_at_any_moment_while_a_state_is_written_leaves_one(begun, tmp_path, monkeypatch):
    """Also of a run that was already killed while it saved: here the process ends at each change of the folder in turn."""

    class Killed(BaseException):
        pass

    class Backend:
        def save_state(self, path):
            (path / "weights").write_text("new")

    run = copy_of(begun, tmp_path)
    (run / "state" / "weights").write_text("old")
    _, progress = checkpoint.load(run)
    for broken in (False, True):
        left, state = [0], run
        for moment in range(20):
            folder = tmp_path / f"{broken}-{moment}"
            shutil.copytree(run, folder)
            if broken:
                (folder / "state").rename(folder / "state.older")
            left = [moment]

            def mortal(real, left=left):
                def call(*args, **kwargs):
                    if not left[0]:
                        raise Killed
                    left[0] -= 1
                    return real(*args, **kwargs)

                return call

            with monkeypatch.context() as patch:
                for owner, name in (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"):
                    patch.setattr(owner, name, mortal(getattr(owner, name)))
                with contextlib.suppress(Killed):
                    checkpoint.save(folder, Backend(), progress)
            state, found = checkpoint.load(folder)
            assert found == progress and (state / "weights").read_text() in ("old", "new")
        assert left[0] > 0 and (state / "weights").read_text() == "new"


def test_a_run_that_ended_early_is_not_gone_on_with_unless_it_may(begun, tmp_path):
    run = copy_of(begun, tmp_path)
    file = run / "state" / "progress.json"
    watched = {"metric": "val/countdown/solver_acc", "patience": 1}
    said = {"metric": watched["metric"], "mode": "max", "best": 0.5, "best_step": 1, "without_best": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"early_stop": said}))
    trainer = {"total_steps": 3, "test_freq": 3, "resume": str(run), "early_stop": watched}
    with pytest.raises(
        ConfigError, match=r"ended early: .* no new best in 1 validations; .* raise trainer\.early_stop"
    ):
        train(tmp_path, trainer=trainer)
    other = watched | {"metric": "val/countdown/judge_acc", "target": -1.0}
    assert train(tmp_path, trainer=trainer | {"early_stop": other})["early_stop"]["best_step"] == 3


def test_other_tasks_of_the_same_number_are_seen(begun, tmp_path):
    from rllm.data.countdown import countdown

    run = copy_of(begun, tmp_path)
    tasks = [*countdown("train", 8)]
    tasks[3] = replace(tasks[3], instruction="Something else.")
    with pytest.raises(ConfigError, match="that run has training tasks="):
        train(tmp_path, tasks=tasks, val=0, trainer={"total_steps": 3, "resume": str(run)})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"trainer": {"seed": 7}}, "that run has trainer.seed=0, this config 7"),
        ({"data": {"train_batch_size": 3}}, "that run has data.train_batch_size=2, this config 3"),
        ({"rollout": {"n": 2}}, "that run has rollout.n=4, this config 2"),
        ({"trainer": {"total_steps": 2}}, "all 2 steps of that run are done, and this config asks for 2"),
        ({"lora": {"rank": 8}}, "saved with lora.rank="),
    ],
)
def test_what_cannot_go_on_is_told_before_anything_is_written(begun, tmp_path, change, found):
    run = copy_of(begun, tmp_path)
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    sections = {name: dict(values) for name, values in change.items()}
    sections["trainer"] = {"total_steps": 4, "resume": str(run)} | sections.get("trainer", {})
    with pytest.raises(rllm.errors.UserError, match=found.replace("(", r"\(")):
        train(tmp_path, **sections)
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("resume", ["nowhere", "auto"])
def test_a_name_of_nothing_is_an_error_that_says_what_to_give(tmp_path, resume):
    with pytest.raises(ConfigError, match="no such folder" if resume == "nowhere" else "experiment_name is needed"):
        rllm.AgentTrainer(
            agent_flow=solver_judge,
            evaluator=solver_judge_evaluator,
            config=settings(tmp_path, trainer={"resume": resume}),
            train_dataset=rllm.data.countdown.countdown("train", 4),
        ).train()
