"""Episodes of an evaluation in a JSONL file, one a line as each ends, so that an interrupted one can go on where it was.

The first line says what was evaluated. Knows files only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllm.errors import DataError
from rllm.tracking.run_folder import finite
from rllm.types import Episode

HEADER = "evaluation"


class EpisodeFile:
    """`path` opened for an evaluation that `about` describes (plain data: model, endpoint, sampling, ...).

    An existing file is an error unless `resume`; then it must be about the same, and `done` holds its episodes by id: those that did
    not fail. Failed ones are run again, and of several lines with the same id the last counts, so none is ever counted twice. Half a
    line at the end, left by a kill, is cut off.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, resume: bool = False):
        self.path = path
        self.done: dict[str, Episode] = {}
        about = json.loads(json.dumps(finite(dict(about)), default=str))
        if path.exists() and path.stat().st_size:
            if not resume:
                raise DataError(f"{path} exists; go on with it by --resume, or name another file with --episodes")
            self._load(about)
        else:
            if not path.resolve().parent.is_dir():
                raise DataError(f"{path}: the folder {path.parent} does not exist; make it first, or name another file")
            self._append({HEADER: about})

    def append(self, episode: Episode) -> None:
        """Write `episode` through to the file."""
        self._append(episode.to_dict())

    def _append(self, row: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False, default=str) + "\n")

    def _load(self, about: Mapping[str, Any]) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        rows = whole.decode("utf-8").split("\n")[:-1]
        if not rows:
            self._append({HEADER: about})
            return
        found = self._parse(rows[0], 1).get(HEADER)
        if not isinstance(found, dict):
            raise DataError(f"{self.path}:1: this is no file of an evaluation; name another with --episodes")
        for name in (*about, *found):
            if about.get(name) != found.get(name):
                raise DataError(
                    f"{self.path}: it was begun with {name}={json.dumps(found.get(name))}, now it is {json.dumps(about.get(name))}; "
                    "go on with the same, or name another file with --episodes"
                )
        for number, row in enumerate(rows[1:], 2):
            try:
                episode = Episode.from_dict(self._parse(row, number))
            except (TypeError, ValueError, AttributeError) as error:
                raise DataError(f"{self.path}:{number}: no episode ({error}); remove the line") from error
            self.done.pop(episode.id, None)
            if not episode.failed:
                self.done[episode.id] = episode

    def _parse(self, row: str, number: int) -> dict[str, Any]:
        try:
            value = json.loads(row)
        except ValueError as error:
            raise DataError(f"{self.path}:{number}: not valid JSON: {error}; remove the line") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.path}:{number}: found {type(value).__name__}, not an object; remove the line")
        return value
