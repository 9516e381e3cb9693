"""Tasks as rows of the dataset that verl's loaders read.

Knows one JSONL file of tasks; nothing of flows or models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from rllm.types import Task


def write_tasks(tasks: Sequence[Task], path: Path) -> Path:
    """One line for each task."""
    with path.open("w", encoding="utf-8") as file:
        for task in tasks:
            file.write(json.dumps(task_to_row(task), ensure_ascii=False, default=str) + "\n")
    return path.resolve()


def task_to_row(task: Task) -> dict[str, Any]:
    folders = {name: str(value) for name in ("dataset_dir", "sub_dir") if (value := getattr(task, name)) is not None}
    return {"id": task.id, "instruction": task.instruction, "metadata": task.metadata} | folders


def row_to_task(row: dict[str, Any]) -> Task:
    folders = {name: Path(row[name]) for name in ("dataset_dir", "sub_dir") if name in row}
    return Task(row["id"], row["instruction"], row["metadata"], **folders)


class TaskRows(Dataset):
    """What verl calls ``data.custom_cls``: each row carries its task as JSON text, and the columns that verl looks for."""

    def __init__(self, data_files: Any, config: Any = None, max_samples: int = -1, **_: Any):
        paths = [data_files] if isinstance(data_files, (str, Path)) else list(data_files)
        self.lines = [line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
        if max_samples > 0:
            del self.lines[max_samples:]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task = row_to_task(json.loads(self.lines[index]))
        said = (
            task.instruction if isinstance(task.instruction, list) else [{"role": "user", "content": task.instruction}]
        )
        return {
            "raw_prompt": said,
            "task": self.lines[index],
            "index": index,
            "agent_name": "rllm",
            "data_source": task.data_source,
        }
