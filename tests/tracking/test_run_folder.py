"""What a run leaves behind: nothing is overwritten, every line is JSON that any reader takes."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rllm.config.load import load_config
from rllm.errors import UserError
from rllm.tracking import run_folder
from rllm.tracking.run_folder import RunFolder
from rllm.types import Episode, Step, Trajectory


def create(root, *overrides) -> RunFolder:
    return RunFolder.create(load_config(overrides=[f"trainer.run_dir={root}", *overrides]))


def lines(folder: RunFolder, name: str):
    def no_constants(text):
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=no_constants) for line in (folder.path / name).read_text().splitlines()]


def test_a_new_folder_holds_the_config_that_runs_again_and_the_circumstances(tmp_path):
    folder = create(tmp_path, "trainer.experiment_name=one", "lora.rank=4")
    assert folder.path == tmp_path / "one"
    assert load_config([folder.path / "config.yaml"]).config.lora.rank == 4
    run = json.loads((folder.path / "run.json").read_text())
    assert run["versions"]["torch"] and run["python"] and run["command"] and run["started"]
    assert run["provenance"]["lora.rank"] == "argument"
    assert run["platform"] and run["seed"] == 0 and shlex.split(run["command_line"]) == [sys.executable, *sys.argv]


def test_the_commit_of_the_users_folder_is_kept_and_whether_files_were_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git_of_a_run():
        return json.loads((create(tmp_path / "runs").path / "run.json").read_text())["git"]

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    assert git_of_a_run() is None
    git("init", "-q")
    assert git_of_a_run() is None  # no commit yet
    (tmp_path / "flow.py").write_text("1\n")
    git("add", "flow.py")
    git("commit", "-qm", "flow")
    commit = git("rev-parse", "HEAD")
    assert git_of_a_run() == {"commit": commit, "dirty": False}
    (tmp_path / "flow.py").write_text("2\n")
    assert git_of_a_run() == {"commit": commit, "dirty": True}


def test_the_written_config_runs_again_with_every_value_whatever_the_sources_were(tmp_path):
    settings = [
        "actor_rollout_ref.model.lora_rank=4",
        "lora.per_role={solver: {rank: 2}, judge: {}}",
        "lora.rank_pattern={q_proj: 3}",
        "optim.lr=1e-5",
        "trainer.experiment_name=größe-1e5",
        "rollout.max_batch=${rollout.n}",
        "trainer.logger=[console]",
    ]
    first = load_config(overrides=[f"trainer.run_dir={tmp_path}", *settings], defaults={"rollout.n": 6})
    again = load_config([RunFolder.create(first).path / "config.yaml"])
    assert again.config == first.config and again.config.rollout.max_batch == 6


def test_a_name_that_exists_gets_a_suffix_and_nothing_is_overwritten(tmp_path):
    names = [create(tmp_path, "trainer.experiment_name=one").path.name for _ in range(3)]
    assert names == ["one", "one-2", "one-3"]


def test_latest_is_the_newest_run(tmp_path):
    create(tmp_path, "trainer.experiment_name=one")
    newest = create(tmp_path, "trainer.experiment_name=two")
    assert (tmp_path / "latest").resolve() == newest.path.resolve()


def test_where_links_are_not_allowed_latest_is_a_text_file(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    create(tmp_path, "trainer.experiment_name=one")
    assert (tmp_path / "latest.txt").read_text() == "one\n"


def test_a_real_folder_called_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").write_text("keep")
    create(tmp_path, "trainer.experiment_name=one")
    assert (tmp_path / "latest" / "mine").read_text() == "keep"


@pytest.mark.parametrize("name", ["a/b", "..", ".", "latest"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="cannot name a folder of its own"):
        create(tmp_path, f"trainer.experiment_name={name}")


def test_a_place_where_no_folder_can_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"trainer\.run_dir=.*cannot make"):
        create(tmp_path / "file" / "runs")


def test_metrics_are_one_object_a_step_and_never_hold_nan(tmp_path):
    folder = create(tmp_path)
    folder.write_metrics({"step": 1.0, "loss": 0.5, "kl": float("nan"), "peak": float("inf")})
    folder.write_metrics({"step": 2.0, "loss": 0.25})
    assert lines(folder, "metrics.jsonl") == [
        {"step": 1, "loss": 0.5, "kl": None, "peak": None},
        {"step": 2, "loss": 0.25},
    ]


def test_episodes_are_written_with_step_and_split_and_any_text(tmp_path):
    step = Step(response_ids=[1, 2], logprobs=[-0.5, float("-inf")], model_response="größe ✓")
    episode = Episode(id="t:0", trajectories=[Trajectory(name="solver", steps=[step], reward=1.0)])
    folder = create(tmp_path)
    folder.write_episodes(3, "train", [episode, episode])
    first, _ = lines(folder, "episodes.jsonl")
    assert (first["step"], first["split"], first["id"]) == (3, "train", "t:0")
    written = first["trajectories"][0]["steps"][0]
    assert written["logprobs"] == [-0.5, None] and written["model_response"] == "größe ✓"


def test_episodes_are_not_written_when_not_wanted(tmp_path):
    folder = create(tmp_path, "trainer.log_episodes=false")
    folder.write_episodes(1, "train", [Episode(id="t:0")])
    assert not (folder.path / "episodes.jsonl").exists()


def test_the_result_is_whole_or_absent(tmp_path, monkeypatch):
    folder = create(tmp_path)
    folder.write_result({"val": {"after": {"val/unknown/acc": float("nan")}}, "steps": 3})
    assert json.loads((folder.path / "result.json").read_text()) == {
        "val": {"after": {"val/unknown/acc": None}},
        "steps": 3,
    }
    with pytest.raises(TypeError):
        folder.write_result({"steps": object()})
    assert json.loads((folder.path / "result.json").read_text())["steps"] == 3
    assert run_folder.LATEST_RUN == "latest"
