"""The file of an evaluation: what was run is never run or counted twice, and nothing of another evaluation gets in."""

from __future__ import annotations

import json
import math
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import DataError
from rllm.tracking.episode_file import EpisodeFile
from rllm.types import Episode, Step, Task, TerminationReason, Trajectory

ABOUT = {"model": "m", "temperature": 0.5}


def episode(uid: str, reason: TerminationReason = TerminationReason.ENV_DONE, **more: Any) -> Episode:
    step = Step(id="call", response_ids=[1, 2], logprobs=[-0.5, -1.0], finish_reason="stop")
    trajectory = Trajectory(name="solver", steps=[step], reward=1.0, output={"x": [1, "é\u2028"]})
    task = Task(id=uid.rpartition(":")[0], metadata={"data_source": "d"}, dataset_dir=Path("/data"))
    return Episode(id=uid, task=task, trajectories=[trajectory], termination_reason=reason, **more)


def test_episodes_come_back_as_they_were(tmp_path: Path) -> None:
    file = EpisodeFile(tmp_path / "e.jsonl", ABOUT)
    written = episode("t:0", is_correct=True, metrics={"acc": 0.5})
    file.append(written)
    [read] = EpisodeFile(file.path, ABOUT, resume=True).done.values()
    assert (read.task_id, read.is_correct, read.metrics, read.termination_reason) == (
        "t",
        True,
        {"acc": 0.5},
        "env_done",
    )
    assert read.task.data_source == "d"
    assert read.trajectories[0].steps == written.trajectories[0].steps
    assert read.trajectories[0].output == {"x": [1, "é\u2028"]}


def test_whatever_an_episode_holds_it_is_written(tmp_path: Path) -> None:
    @dataclass
    class Answer:
        text: str
        lock: Any = field(default_factory=threading.Lock)

    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("not even this")

    circle: list[Any] = []
    circle.append(circle)
    held = {"half": "\ud800", ("a", 1): Answer("x"), "mute": Mute(), "circle": circle, "nan": math.nan, 2: {1}}
    file = EpisodeFile(tmp_path / "e.jsonl", ABOUT)
    file.append(episode("t:0", artifacts=held, metadata={Mute(): 1}))
    [read] = EpisodeFile(file.path, ABOUT, resume=True).done.values()
    assert read.artifacts["half"] == "\ud800" and read.artifacts["('a', 1)"]["text"] == "x"
    assert "lock" in read.artifacts["('a', 1)"]["lock"]
    assert (read.artifacts["mute"], read.artifacts["nan"], read.artifacts["2"]) == ("<Mute>", None, [1])
    assert read.metadata == {"<Mute>": 1}


def test_failed_ones_are_to_run_again_and_the_last_line_of_an_id_counts(tmp_path: Path) -> None:
    file = EpisodeFile(tmp_path / "e.jsonl", ABOUT)
    for one in (
        episode("t:0", TerminationReason.ERROR),
        episode("t:1", TerminationReason.TIMEOUT),
        episode("t:1", is_correct=True),
        episode("t:2"),
        episode("t:2", TerminationReason.ERROR),
    ):
        file.append(one)
    assert list(EpisodeFile(file.path, ABOUT, resume=True).done) == ["t:1"]


def test_half_a_line_left_by_a_kill_is_cut_off_and_the_file_goes_on(tmp_path: Path) -> None:
    file = EpisodeFile(tmp_path / "e.jsonl", ABOUT)
    file.append(episode("t:0"))
    with file.path.open("a") as broken:
        broken.write('{"id": "t:1", "tra')
    again = EpisodeFile(file.path, ABOUT, resume=True)
    again.append(episode("t:1"))
    assert list(EpisodeFile(file.path, ABOUT, resume=True).done) == ["t:0", "t:1"]
    assert all(json.loads(line) for line in file.path.read_text().strip().split("\n"))


def test_an_existing_file_is_only_gone_on_with_on_request_and_only_for_the_same(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    EpisodeFile(path, ABOUT)
    with pytest.raises(DataError, match="exists; go on with it by --resume"):
        EpisodeFile(path, ABOUT)
    with pytest.raises(DataError, match=r"begun with temperature=0.5, now it is 1.0"):
        EpisodeFile(path, ABOUT | {"temperature": 1.0}, resume=True)
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "1 + 1"}\n')
    with pytest.raises(DataError, match="no file of an evaluation"):
        EpisodeFile(other, ABOUT, resume=True)
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.raises(DataError, match=r"e.jsonl:2: not valid JSON"):
        EpisodeFile(path, ABOUT, resume=True)
    with pytest.raises(DataError, match=r"the folder .* does not exist"):
        EpisodeFile(tmp_path / "no" / "e.jsonl", ABOUT)


@pytest.mark.parametrize("resume", [False, True])
def test_a_path_that_is_no_file_of_ours_is_a_plain_error(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "folder", tmp_path / "file" / "e.jsonl", Path("/proc/e.jsonl")):
        with pytest.raises(DataError, match=re.escape(str(path))):
            EpisodeFile(path, ABOUT, resume=resume)


@pytest.mark.parametrize(
    "content", [b'{"a": 1}', b"notes", b'{"a": 1}\nhalf', b"\xff\nhalf", b'[1]\n{"b', b'{"evaluation": 3}\nx']
)
def test_a_file_of_somebody_else_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"notes\.json"):
        EpisodeFile(path, ABOUT, resume=True)
    assert path.read_bytes() == content


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    EpisodeFile(path, ABOUT)
    path.write_bytes(path.read_bytes() + b'{"id": "\xff"}\n')
    with pytest.raises(DataError, match=r"e.jsonl:2: not valid UTF-8"):
        EpisodeFile(path, ABOUT, resume=True)
    for row in (
        "[" * 100_000,
        '{"id": 3}',
        '{"trajectories": 5}',
        '{"id": "a:0", "trajectories": [{"steps": [{"logprobs": [1]}]}]}',
    ):
        EpisodeFile(path.with_name(f"{len(row)}"), ABOUT)
        path.write_text(path.with_name(f"{len(row)}").read_text() + row + "\n")
        with pytest.raises(DataError, match=r"e.jsonl:2: .*remove the line"):
            EpisodeFile(path, ABOUT, resume=True)


def test_a_first_line_cut_short_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text('{"evaluat')
    file = EpisodeFile(path, ABOUT, resume=True)
    file.append(episode("t:0"))
    assert list(EpisodeFile(path, ABOUT, resume=True).done) == ["t:0"]
