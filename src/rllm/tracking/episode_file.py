"""Episodes of an evaluation in a JSONL file, one a line as each ends, so that an interrupted one can go on where it was.

The first line says what was evaluated. Knows files only.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rllm.errors import DataError
from rllm.tracking.run_folder import append_rows, finite
from rllm.types import Episode, Task

logger = logging.getLogger(__name__)
HEADER = "evaluation"
# Of the task of each episode: it may have become another one under the same id.
TASK = "task_digest"
# What the description of an evaluation may say of the code that made the episodes.
CODE = "code"


class EpisodeFile:
    """`path` opened for an evaluation of `tasks` that `about` describes (plain data: model, endpoint, sampling, ...).

    An existing file is an error unless `resume`; then it must be about the same, and `done` holds its episodes by id: those that did
    not fail. Episodes of a task that is not what it was are an error; if only the `CODE` is another, since an error in it may have been
    mended, a warning says so. Failed ones are run again, and of several lines with the same id the last counts, so none is ever counted twice. Half a
    line at the end, left by a kill, is cut off.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], tasks: Iterable[Task] = (), *, resume: bool = False):
        self.path = path
        self.done: dict[str, Episode] = {}
        # Taken now: a flow may change its task.
        self._tasks = {task.id: digest_of([task.instruction, task.metadata]) for task in tasks}
        about = json.loads(json.dumps(finite(dict(about)), default=str))
        try:
            self._open(about, resume)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}; name another file with --episodes") from error

    def append(self, episode: Episode) -> None:
        """Write `episode` through to the file."""
        self._append(episode.to_dict() | {TASK: self._tasks.get(episode.task_id)})

    def _open(self, about: Mapping[str, Any], resume: bool) -> None:
        if self.path.exists() and self.path.stat().st_size:
            if not resume:
                raise DataError(f"{self.path} exists; go on with it by --resume, or name another file with --episodes")
            self._load(about)
        else:
            folder = self.path.resolve().parent
            if not folder.exists():
                raise DataError(
                    f"{self.path}: the folder {self.path.parent} does not exist; make it first, or name another file"
                )
            self._append({HEADER: about})

    def _append(self, row: Any) -> None:
        append_rows(self.path, [row])

    def _load(self, about: Mapping[str, Any]) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        rows = whole.split(b"\n")[:-1]
        begun = json.dumps({HEADER: {}})[:-2].encode()
        found = (
            self._parse(rows[0], 1).get(HEADER) if rows else about if begun.startswith(content[: len(begun)]) else None
        )
        if not isinstance(found, dict):
            raise DataError(f"{self.path}:1: this is no file of an evaluation; name another with --episodes")
        self._take(rows, found, about)
        # Only now is it sure that the file is one of ours.
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        if not rows:
            self._append({HEADER: about})

    def _take(self, rows: list[bytes], found: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """The episodes of `rows`, of which the first says that they are of the evaluation `found`."""
        for name in dict.fromkeys((*about, *found)):
            if name != CODE and about.get(name) != found.get(name):
                raise DataError(
                    f"{self.path}: it was begun with {name}={json.dumps(found.get(name))}, now it is {json.dumps(about.get(name))}; "
                    "go on with the same, or name another file with --episodes"
                )
        for number, row in enumerate(rows[1:], 2):
            values = self._parse(row, number)
            try:
                episode = Episode.from_dict(values)
                if not episode.id or not isinstance(episode.id, str):
                    raise ValueError(f"its id is {episode.id!r}")
            except (TypeError, ValueError, AttributeError) as error:
                raise DataError(f"{self.path}:{number}: no episode ({error}); remove the line") from error
            self.done.pop(episode.id, None)
            if not episode.failed:
                self._check_task(episode, values.get(TASK), number)
                self.done[episode.id] = episode
        if self.done and about.get(CODE) != found.get(CODE):
            logger.warning(
                "%s: the code of the flow or evaluator has changed since it was begun; the %d episodes that are in it stay as the earlier "
                "code made and judged them. To run them anew, name another file with --episodes",
                self.path,
                len(self.done),
            )

    def _check_task(self, episode: Episode, digest: Any, number: int) -> None:
        if episode.task_id in self._tasks and digest != self._tasks[episode.task_id]:
            raise DataError(
                f"{self.path}:{number}: the task {episode.task_id!r} had another instruction or metadata than the dataset has now; go on "
                "with the same dataset, or name another file with --episodes"
            )

    def _parse(self, row: bytes, number: int) -> dict[str, Any]:
        try:
            value = json.loads(row.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}:{number}: not valid UTF-8: {error}; remove the line") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.path}:{number}: not valid JSON: {error}; remove the line") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.path}:{number}: found {type(value).__name__}, not an object; remove the line")
        return value


def digest_of(value: Any) -> str:
    """The same text for the same plain data, in every process. Of what is no plain data the kind counts."""
    text = json.dumps(value, skipkeys=True, default=lambda other: type(other).__name__)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
