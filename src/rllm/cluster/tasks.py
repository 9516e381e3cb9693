"""Tasks as rows of the dataset that verl's loaders read.

Knows one file of tasks; nothing of flows or models.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from rllm.errors import DataError
from rllm.types import Task


def write_tasks(tasks: Sequence[Task], path: Path) -> Path:
    """All tasks in one file. They are pickled, so that a flow gets the very values it would get in one process: tuples, dates, arrays."""
    path.write_bytes(pickle.dumps([task_to_text(task) for task in tasks]))
    return path.resolve()


def task_to_text(task: Task) -> str:
    """`task` as plain letters, which is what travels in verl's rows. Raises `DataError` for one that cannot be sent."""
    from ray import cloudpickle

    try:
        return base64.b64encode(cloudpickle.dumps(task)).decode()
    except Exception as error:  # whatever the values' own code raises
        raise DataError(
            f"task {task.id!r} cannot be sent to other processes ({type(error).__name__}: {error}); keep plain values in its metadata"
        ) from error


def text_to_task(text: str) -> Task:
    return pickle.loads(base64.b64decode(text))


class TaskRows(Dataset):
    """What verl calls ``data.custom_cls``: each row carries its task as text, and the columns that verl looks for."""

    def __init__(self, data_files: Any, config: Any = None, max_samples: int = -1, **_: Any):
        paths = [data_files] if isinstance(data_files, (str, Path)) else list(data_files)
        self.tasks: list[str] = [text for path in paths for text in pickle.loads(Path(path).read_bytes())]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task = text_to_task(self.tasks[index])
        said = (
            task.instruction if isinstance(task.instruction, list) else [{"role": "user", "content": task.instruction}]
        )
        return {
            "raw_prompt": said,
            "task": self.tasks[index],
            "index": index,
            "agent_name": "rllm",
            "data_source": task.data_source,
        }
