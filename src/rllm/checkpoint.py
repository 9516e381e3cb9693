"""What a run needs to go on where it stopped: the backend's state and how far the loop had come.

    RUN/state/  what the backend saved (weights in training, optimizer), and progress.json

A state appears whole or not at all: it is written beside the last one and takes its place.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rllm.backends.base import Backend
from rllm.config.schema import Config
from rllm.data.dataset import Dataset
from rllm.early_stop import EarlyStop
from rllm.errors import ConfigError

STATE, NEWER, OLDER = "state", "state.newer", "state.older"
PROGRESS = "progress.json"
FORMAT = 1


@dataclass
class Progress:
    """How far a run is: after `step` steps, for which `batches` batches of tasks were drawn; what it has counted and found; and `facts`,
    which decide what the next steps would be."""

    step: int
    batches: int
    account: dict[str, Any]
    validations: dict[str, dict[str, float]]
    early_stop: dict[str, Any]
    facts: dict[str, Any]
    format: int = field(default=FORMAT)


@dataclass(frozen=True)
class Resumed:
    """A run to go on with: its folder, where the backend's state is, and how far it is."""

    run: Path
    state: Path
    progress: Progress


def resumed(config: Config, tasks: Dataset | None, total: int) -> Resumed | None:
    """What ``trainer.resume`` names, fit to go on from as far as can be told without a model. Raises `ConfigError`."""
    run = chosen_run(config)
    if run is None or tasks is None or config.trainer.val_only:
        return None
    state, progress = load(run)
    check(run, progress.step, progress.facts, facts_of(config, tasks), total)
    early_stop = EarlyStop(config.trainer.early_stop)
    early_stop.restore(progress.early_stop)
    if early_stop.reason:
        raise ConfigError(
            f"trainer.resume={run}: that run ended early: {early_stop.reason}; to go on all the same, raise trainer.early_stop.patience "
            "(or target), or leave trainer.early_stop.metric out"
        )
    return Resumed(run, state, progress)


def facts_of(config: Config, tasks: Dataset) -> dict[str, Any]:
    """What must be the same for a run to go on as if it had not stopped."""
    ids, digest = [task.id for task in tasks], hashlib.sha256()
    for task in tasks:
        digest.update(f"{task.id}\0{task.instruction}\0".encode(errors="surrogatepass"))
    return {
        "trainer.seed": config.trainer.seed,
        "data.seed": config.data.seed,
        "data.shuffle": config.data.shuffle,
        "data.train_batch_size": config.data.train_batch_size,
        "rollout.n": config.rollout.n,
        "training tasks": f"{len(ids)} tasks, {ids[0]} to {ids[-1]} (digest {digest.hexdigest()[:12]})",
    }


def save(run: Path, backend: Backend, progress: Progress) -> None:
    """Write the state of a run in place of the last one."""
    if (
        not (run / STATE).exists() and (run / OLDER).exists()
    ):  # killed between the renames below; now it is the one to keep
        (run / OLDER).rename(run / STATE)
    newer = run / NEWER
    shutil.rmtree(newer, ignore_errors=True)
    newer.mkdir()
    backend.save_state(newer)
    (newer / PROGRESS).write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(run / OLDER, ignore_errors=True)
    if (run / STATE).exists():
        (run / STATE).rename(run / OLDER)
    newer.rename(run / STATE)
    shutil.rmtree(run / OLDER, ignore_errors=True)


def state_of(run: Path) -> Path | None:
    """The folder with the state of a run; None where it has none. A run that was killed while it saved has its last one."""
    return next((run / name for name in (STATE, OLDER) if (run / name / PROGRESS).is_file()), None)


def load(run: Path) -> tuple[Path, Progress]:
    """(folder of the backend's state, progress) of a run. Raises `ConfigError` where there is none, or one of another form."""
    state = state_of(run)
    if state is None:
        there = "no such folder" if not run.exists() else "it has no state to go on from"
        raise ConfigError(
            f"trainer.resume={run}: {there}; states are written at the end, at Ctrl-C and every trainer.save_freq steps"
        )
    file = state / PROGRESS
    try:
        progress = Progress(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"trainer.resume={run}: {file} cannot be read ({error})") from error
    if progress.format != FORMAT:
        raise ConfigError(f"trainer.resume={run}: a state of form {progress.format}, this rllm reads form {FORMAT}")
    return state, progress


def chosen_run(config: Config, has_state: Callable[[Path], object] = state_of) -> Path | None:
    """The run folder that ``trainer.resume`` names; with ``auto`` the newest called ``trainer.experiment_name`` that has a state."""
    wanted, t = config.trainer.resume, config.trainer
    if wanted is None:
        return None
    if wanted != "auto":
        return Path(os.path.realpath(wanted))  # the link to the newest run will be written anew
    if t.experiment_name is None:
        raise ConfigError(
            "trainer.resume=auto: it goes on with the run of that name, so trainer.experiment_name is needed; or give the folder, "
            "trainer.resume=<folder of the run>"
        )
    return max(_runs_called(Path(t.run_dir), t.experiment_name, has_state), default=(0, None))[1]


def _runs_called(root: Path, name: str, has_state: Callable[[Path], object]) -> Iterator[tuple[int, Path]]:
    """(number, folder) of the runs of that name which have a state: a run that begins while the name is taken gets ``-2``, ``-3``, ..."""
    for number in itertools.count(1):
        run = root / (name if number == 1 else f"{name}-{number}")
        if not run.exists():
            return
        if has_state(run) is not None:
            yield number, run


def check(run: Path, step: int, facts_then: dict[str, Any], facts: dict[str, Any], total: int) -> None:
    """Raises `ConfigError` where the steps after `step` would not be those of the run that stopped, or none are left."""
    for name, now in facts.items():
        if (then := facts_then.get(name)) != now:
            raise ConfigError(
                f"trainer.resume={run}: that run has {name}={then}, this config {now}; a run goes on only as it was begun "
                "(lora.adapter_path starts anew from saved weights)"
            )
    if step >= total:
        raise ConfigError(
            f"trainer.resume={run}: all {step} steps of that run are done, and this config asks for {total}; raise "
            "trainer.total_steps to go on"
        )
