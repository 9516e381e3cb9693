"""The run folder: what a run leaves behind for people and programs.

`runs/<name>/` with config.yaml, run.json, metrics.jsonl, episodes.jsonl, the adapter and result.json. Knows files only.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rllm.config.explain import to_yaml
from rllm.config.load import Resolved
from rllm.config.schema import LATEST_RUN
from rllm.errors import UserError
from rllm.types import Episode

_PACKAGES = ("rllm", "torch", "transformers", "tokenizers", "peft", "openai", "fastapi", "pydantic", "numpy")


class RunFolder:
    """One run's folder. Files are appended line by line, so an interrupted run keeps what it had."""

    def __init__(self, path: Path, log_episodes: bool = True):
        self.path, self.log_episodes = path, log_episodes

    @classmethod
    def create(cls, resolved: Resolved[Any]) -> RunFolder:
        """A new folder (an existing name gets a suffix, nothing is overwritten), with config and circumstances written."""
        config = resolved.config.trainer
        root = Path(config.run_dir)
        name = config.experiment_name or datetime.now().strftime("%Y%m%d-%H%M%S")
        path, suffix = root / name, 1
        while True:
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                suffix += 1
                path = root / f"{name}-{suffix}"
            except OSError as error:
                raise UserError(f"trainer.run_dir={config.run_dir}: cannot make {path} ({error.strerror})") from error
        _point_latest(root, path)
        folder = cls(path, config.log_episodes)
        (path / "config.yaml").write_text(to_yaml(resolved.config), encoding="utf-8")
        (path / "run.json").write_text(json.dumps(_circumstances(resolved), indent=2) + "\n", encoding="utf-8")
        return folder

    @classmethod
    def reopen(cls, path: Path, resolved: Resolved[Any], step: int) -> RunFolder:
        """The folder of a run that goes on after `step` steps: lines of later steps go, since those steps come again."""
        folder = cls(path, resolved.config.trainer.log_episodes)
        for name in ("metrics.jsonl", "episodes.jsonl"):
            _keep_until(path / name, step)
        (path / "result.json").unlink(missing_ok=True)
        number = 2
        while (path / f"run-{number}.json").exists():
            number += 1
        about = {"resumed_after_step": step} | _circumstances(resolved)
        (path / f"run-{number}.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        (path / f"config-{number}.yaml").write_text(to_yaml(resolved.config), encoding="utf-8")
        _point_latest(path.parent, path)
        return folder

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl, with `step` as a whole number."""
        self._append("metrics.jsonl", [{**metrics, "step": int(metrics["step"])}])

    def write_episodes(self, step: int, split: str, episodes: Sequence[Episode]) -> None:
        """One line of episodes.jsonl per episode."""
        if self.log_episodes:
            self._append("episodes.jsonl", [{"step": step, "split": split} | e.to_dict() for e in episodes])

    def write_result(self, result: Mapping[str, Any]) -> None:
        """What the run came to. Written beside and moved into place, so that a reader never finds half of it."""
        part = self.path / "result.json.part"
        part.write_text(json.dumps(finite(result), indent=2, allow_nan=False) + "\n")
        part.replace(self.path / "result.json")

    def _append(self, name: str, rows: Sequence[Any]) -> None:
        append_rows(self.path / name, rows)


def _keep_until(file: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and what a kill left of a line."""
    if not file.exists():
        return
    part = file.with_name(file.name + ".part")
    with file.open("rb") as old, part.open("wb") as new:
        for line in old:
            with contextlib.suppress(ValueError):
                if json.loads(line)["step"] <= step:
                    new.write(line.rstrip(b"\n") + b"\n")
    part.replace(file)


def append_rows(file: Path, rows: Iterable[Any]) -> None:
    """One line of JSON a row at the end of `file`. Half of a surrogate pair, which is no text, is written as JSON's escape of it."""
    with file.open("a", encoding="utf-8", errors="backslashreplace") as opened:
        for row in rows:
            opened.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False, default=str) + "\n")


def finite(value: Any) -> Any:
    """The same data with null for numbers that are not finite: JSON has no NaN, and most readers refuse one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _point_latest(root: Path, path: Path) -> None:
    """`latest` is a link to the newest run; where links are not allowed, a text file with its name."""
    link = root / LATEST_RUN
    try:
        if link.is_symlink() or link.exists():
            link.unlink()
        link.symlink_to(path.name, target_is_directory=True)
    except OSError:
        (root / f"{LATEST_RUN}.txt").write_text(path.name + "\n")


def _circumstances(resolved: Resolved[Any]) -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "command_line": shlex.join([sys.executable, *sys.argv]),
        "folder": str(Path.cwd()),
        "seed": resolved.config.trainer.seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "git": git_state(Path.cwd()),
        "provenance": resolved.provenance,
        "notes": resolved.notes,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the repository that `folder` is in, and whether tracked files differ from it; None outside of one."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, cwd=folder)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}
