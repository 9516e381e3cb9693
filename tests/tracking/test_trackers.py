"""What a person sees of a run: what is trained, a line per step, the difference it made, and what to do next."""

import importlib.util
import io
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from rich.console import Console

from rllm.config.load import load_config
from rllm.errors import ConfigError, UserError
from rllm.tracking.run_folder import RunFolder
from rllm.tracking.trackers import _RESUME, ConsoleTracker, _this_command, make_trackers

FACTS = {
    "model": "default",
    "parameters": 1000,
    "trainable": 20,
    "dtype": "float32",
    "device": "cpu",
    "method": "LoRA rank 8, alpha 8 on q_proj x4, v_proj x4",
    "adapters": {"default": {}},
    "base_fingerprint": "0123456789abcdef",
    "memory_bytes": {"base": 1234567, "optimizer": 800},
    "notes": ["lora.target_modules=[q_proj] is only an example"],
}
STEP = {
    "step": 1.0,
    "reward/solver/mean": 0.25,
    "reward/judge/mean": 0.5,
    "perf/tokens_per_s": 1234.5,
    "timing_s/step": 10.0,
}
RESULT = {
    "val": {"before": {"val/countdown/solver_acc": 0.25}, "after": {"val/countdown/solver_acc": 0.75}},
    "steps": 3,
    "seconds": 61.2,
    "adapter": "adapter",
    "model": None,
    "accounting": {"generated": 10, "trained": 7, "dropped": {"zero_std": 2}, "failed": {"error": 1}, "stale": 0},
    "interrupted": False,
}


@pytest.fixture
def shown(tmp_path):
    """(tracker, function that returns the text shown so far)"""
    resolved = load_config(overrides=[f"trainer.run_dir={tmp_path}", "trainer.experiment_name=one"])
    out = io.StringIO()
    tracker = ConsoleTracker(RunFolder.create(resolved), resolved.config, Console(file=out, highlight=False, width=200))
    return tracker, out.getvalue


def test_the_banner_says_what_is_trained_of_what_and_where_it_goes(shown):
    tracker, text = shown
    tracker.start(FACTS, total_steps=3)
    assert "LoRA rank 8, alpha 8 on q_proj x4, v_proj x4" in text()
    assert "20 parameters (2.00 %) = sum of rank x (in + out)" in text()
    assert "fingerprint 0123456789abcdef" in text() and "base 1.23 MB, optimizer 800 B" in text()
    assert "3 of 16 tasks x 4 episodes" in text()
    assert "/one" in text() and "lora.target_modules=[q_proj] is only an example" in text()


def test_a_step_is_one_plain_line_with_a_reward_per_role_speed_and_time_left(shown):
    tracker, text = shown
    tracker.start(FACTS, total_steps=3)
    before = text()
    tracker.step(STEP)
    line = text().removeprefix(before)
    assert line.count("\n") == 1 and "\x1b" not in line
    for part in ("step 1/3", "solver 0.250", "judge 0.500", "1,234 tok/s", "10.0 s", "ETA 0:20"):
        assert part in line


def test_the_time_left_of_a_run_that_goes_on_is_that_of_its_own_steps(shown):
    tracker, text = shown
    tracker.start(FACTS, total_steps=40)
    tracker.step({**STEP, "step": 30.0})
    assert "step 30/40" in text() and "ETA 1:40" in text()


def test_failures_and_skipped_steps_are_said_in_the_line(shown):
    tracker, text = shown
    tracker.start(FACTS, total_steps=3)
    tracker.step({**STEP, "samples/failed/timeout": 2.0, "samples/failed/error": 1.0, "train/skipped_steps": 1.0})
    assert "3 failed" in text() and "skipped" in text()


def test_the_end_shows_the_change_the_accounting_and_the_next_commands(shown):
    tracker, text = shown
    tracker.finish(RESULT)
    row = next(line for line in text().splitlines() if "solver_acc" in line)
    assert "0.250" in row and "0.750" in row and "+0.500" in row
    assert "10 trajectories: 7 trained, 2 dropped {'zero_std': 2}, 1 failed {'error': 1}, 0 stale" in text()
    path = tracker.folder.path / "adapter"
    assert f"saved    {path} (61 s in all)" in text()
    assert f"lora.adapter_path={path}" in text() and f"rllm serve --model default --adapter {path}" in text()


def test_an_interrupted_run_says_what_is_saved(shown):
    tracker, text = shown
    tracker.finish({**RESULT, "interrupted": True, "steps": 1, "val": {}})
    assert "interrupted after 1 steps; what was learned is saved" in text()


def test_tensorboard_gets_every_step(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    resolved = load_config(overrides=[f"trainer.run_dir={tmp_path}", "trainer.logger=[tensorboard]"])
    folder = RunFolder.create(resolved)
    (tracker,) = make_trackers(resolved.config, folder)
    tracker.start(FACTS, total_steps=2)
    tracker.step(STEP)
    tracker.step({**STEP, "step": 2.0, "reward/solver/mean": 0.75})
    tracker.finish(RESULT)
    reader = events.EventAccumulator(str(folder.path / "tensorboard"))
    reader.Reload()
    assert [(e.step, e.value) for e in reader.Scalars("reward/solver/mean")] == [(1, 0.25), (2, 0.75)]


class FakeRun:
    """What the tracker uses of a W&B run."""

    def __init__(self):
        self.config, self.summary, self.logged, self.finished = {}, {}, [], 0

    def log(self, data, step):
        self.logged.append((step, data))

    def finish(self):
        self.finished += 1


@pytest.fixture
def fake_wandb(monkeypatch):
    """A module `wandb` whose `init` takes what the real one takes, and remembers it."""
    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.Error, module.started = type("Error", (Exception,), {}), []

    def init(*, project, name, dir, config, reinit):
        run = FakeRun()
        module.started.append({"project": project, "name": name, "dir": dir, "config": config, "run": run})
        return run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_config_every_step_and_the_validations(tmp_path, fake_wandb):
    overrides = [f"trainer.run_dir={tmp_path}", "trainer.logger=['wandb']", "trainer.project_name=solver-judge"]
    resolved = load_config(overrides=[*overrides, "trainer.experiment_name=one", "optim.lr=0.25"])
    folder = RunFolder.create(resolved)
    (tracker,) = make_trackers(resolved.config, folder)
    tracker.start(FACTS, total_steps=2)
    tracker.step(STEP)
    tracker.step({**STEP, "step": 2.0, "reward/solver/mean": 0.75})
    tracker.finish(RESULT)
    (started,) = fake_wandb.started
    run = started["run"]
    assert (started["project"], started["name"], started["dir"]) == ("solver-judge", "one", str(folder.path))
    assert started["config"]["optim"]["lr"] == 0.25
    assert run.config["total_steps"] == 2 and run.config["facts"]["trainable"] == 20
    assert [(step, data["reward/solver/mean"]) for step, data in run.logged] == [(1, 0.25), (2, 0.75)]
    assert run.summary == {"before/val/countdown/solver_acc": 0.25, "after/val/countdown/solver_acc": 0.75}
    assert run.finished == 1


def test_a_wandb_that_will_not_start_is_told_in_one_line_with_the_way_out(tmp_path, fake_wandb):
    def no_key(**given):
        raise fake_wandb.Error("No API key configured. Use `wandb login` to log in.")

    fake_wandb.init = no_key
    resolved = load_config(overrides=[f"trainer.run_dir={tmp_path}", "trainer.logger=[wandb]"])
    with pytest.raises(UserError, match=r"wandb login.*set WANDB_MODE=offline") as error:
        make_trackers(resolved.config, RunFolder.create(resolved))
    assert "\n" not in str(error.value)


def test_the_real_wandb_keeps_an_offline_run_in_the_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    resolved = load_config(overrides=[f"trainer.run_dir={tmp_path}", "trainer.logger=[wandb]"])
    folder = RunFolder.create(resolved)
    (tracker,) = make_trackers(resolved.config, folder)
    tracker.start(FACTS, total_steps=1)
    tracker.step(STEP)
    tracker.finish(RESULT)
    (written,) = folder.path.glob("wandb/offline-run-*/*.wandb")
    for name in ("reward/solver/mean", "before/val/countdown/solver_acc", "train_batch_size"):
        assert name.encode() in written.read_bytes()


@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_told_at_the_start(monkeypatch, logger):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for more in ([], ["trainer.val_only=true"]):
        with pytest.raises(ConfigError, match=rf"{logger} is not installed; pip install 'rllm\[{logger}\]'"):
            load_config(overrides=[f"trainer.logger=['console','{logger}']", *more])
    load_config(overrides=[f"trainer.logger=[{logger}]"], training=False)


def test_a_command_that_begins_anew_does_not_go_on_with_the_run_it_came_from(monkeypatch):
    given = ["rllm", "train", "flow.py", "+trainer.resume=runs/a", "training.resume_from_path=runs/a", "lora.rank=4"]
    monkeypatch.setattr(sys, "argv", given)
    anew = _this_command("lora.adapter_path=b", without=_RESUME)
    assert anew.endswith("rllm train flow.py lora.rank=4 lora.adapter_path=b")
    assert "lora.rank=4" in (goes_on := _this_command("trainer.resume=runs/b")) and goes_on.endswith(
        "trainer.resume=runs/b"
    )
    assert "+trainer.resume" not in goes_on
