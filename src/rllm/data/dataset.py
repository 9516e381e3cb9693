"""Datasets of tasks: from files or built-in generators, with errors that name file, line and field.

Knows rows and tasks; nothing of models or rewards.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rllm.errors import DataError
from rllm.types import Task

TEXT_FIELDS = ("instruction", "question", "prompt", "problem")
BUILT_IN = ("countdown",)
DEFAULT_SIZES = {"train": 4096, "val": 256}
FILE_KINDS = (".jsonl", ".json", ".csv", ".parquet")


class Dataset(Sequence[Task]):
    """Tasks in a fixed order, each with its own id. Rows may be `Task`s or dicts (see `task_of`)."""

    def __init__(self, rows: Iterable[Task | Mapping[str, Any]], name: str = "dataset", split: str = "train"):
        self.name, self.split = name, split
        self.tasks = [row if isinstance(row, Task) else task_of(row, i, name) for i, row in enumerate(rows)]
        seen: set[str] = set()
        for task in self.tasks:
            if task.id in seen:
                raise DataError(f"{name}: two tasks have the id {task.id!r}; ids must differ within a dataset")
            seen.add(task.id)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._like(self.tasks[index]) if isinstance(index, slice) else self.tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def shuffle(self, seed: int) -> Dataset:
        """A shuffled copy; the same seed gives the same order."""
        order = list(self.tasks)
        random.Random(seed).shuffle(order)
        return self._like(order)

    def select(self, indices: Iterable[int]) -> Dataset:
        """The tasks at `indices`, in that order."""
        return self._like([self.tasks[i] for i in indices])

    def repeat(self, times: int) -> Dataset:
        """Every task `times` times in a row. Copies are tasks of their own (``id#1``, ``id#2``, ...), so groups stay apart."""
        copies = (replace(task, id=f"{task.id}#{k}" if k else task.id) for task in self.tasks for k in range(times))
        return self._like(list(copies))

    def _like(self, tasks: list[Task]) -> Dataset:
        return Dataset(tasks, self.name, self.split)


def task_of(row: Mapping[str, Any], index: int, where: str) -> Task:
    """A row as a task: ``id`` (default: position), the text in ``instruction``, ``question``, ``prompt`` or ``problem``, the whole
    row as metadata."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: row {index} is {type(row).__name__}; a row must be an object (or a Task)")
    field = next((name for name in TEXT_FIELDS if name in row), None)
    if field is None:
        raise DataError(
            f"{where}: no text; a row needs one of the fields {', '.join(TEXT_FIELDS)}, found {', '.join(row)}"
        )
    if not isinstance(row[field], (str, list)) or not row[field]:
        raise DataError(f"{where}: {field}: found {row[field]!r}; it must be text or a list of messages, not empty")
    metadata = row.get("metadata") if set(row) <= {"id", field, "metadata"} else None
    identity = row.get("id")
    return Task(
        id=str(index if identity is None else identity),
        instruction=row[field],
        metadata=dict(metadata if metadata is not None else row),
    )


def load_dataset(spec: str | Sequence[str], split: str = "train", seed: int = 0, size: int | None = None) -> Dataset:
    """A dataset by file name(s) (.jsonl, .json, .csv, .parquet) or built-in name (`countdown`)."""
    if isinstance(spec, str) and spec in BUILT_IN:
        from rllm.data.countdown import countdown

        return countdown(split, size or DEFAULT_SIZES.get(split, 1), seed if split == "train" else 0)
    tasks: list[Task] = []
    for name in [spec] if isinstance(spec, str) else spec:
        path = Path(name).expanduser()
        if not path.is_file():
            state = "is a folder" if path.is_dir() else "does not exist"
            raise DataError(f"data file {name!r} {state}; give a file or a built-in name ({', '.join(BUILT_IN)})")
        rows = list(_read(path))
        if not rows:
            raise DataError(f"{path}: no rows; give at least one task")
        tasks += [task_of(row, len(tasks) + i, where) for i, (where, row) in enumerate(rows)]
    return Dataset(tasks, name=spec if isinstance(spec, str) else ", ".join(spec), split=split)


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of every row of a file."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        return read_jsonl(path)
    if kind == ".json":
        rows = _parse_json(_text(path), str(path))
        if not isinstance(rows, list):
            raise DataError(f"{path}: found {type(rows).__name__}; a .json file must hold a list of rows")
        return ((f"{path}:row {i}", row) for i, row in enumerate(rows, 1))
    if kind == ".csv":
        return _read_csv(path)
    if kind == ".parquet":
        return _read_parquet(path)
    raise DataError(f"{path}: unknown kind {path.suffix!r}; use {', '.join(FILE_KINDS)}")


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"  # the line on which the row ends; a quoted cell may span several
            if None in row:
                raise DataError(f"{where}: more cells than the header has columns; quote text that holds commas")
            yield where, row
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow, or convert to JSONL") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    return ((f"{path}:row {i}", row) for i, row in enumerate(rows, 1))


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:line", value) of every line. Only newline characters end a line (not U+2028); blank lines and a BOM are skipped."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip(" \t\r"):
            yield f"{path}:{number}", _parse_json(line, f"{path}:{number}")


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON at column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or nesting without end
        raise DataError(f"{where}: JSON that cannot be read: {error}") from error
