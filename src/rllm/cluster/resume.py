"""Which saved run on verl a config goes on with, and whether it can: before Ray or a model is there.

RUN/checkpoints/  verl's own, one folder for each saved step
RUN/facts.json    what must be the same for the next steps to be those of the run that stopped
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm import checkpoint
from rllm.config.schema import Config
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError

FACTS, CHECKPOINTS, STEP_FILE = "facts.json", "checkpoints", "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class SavedRun:
    """A run to go on with, after `step`."""

    run: Path
    step: int


def saved_run(config: Config, tasks: Dataset, total: int) -> SavedRun | None:
    """What ``trainer.resume`` names; None for a run that begins. Raises `ConfigError` where it is not fit to go on from."""
    run = checkpoint.chosen_run(config, saved_step)
    if run is None:
        return None
    step = saved_step(run)
    if step is None:
        there = f"it has no {CHECKPOINTS}/{STEP_FILE}" if run.exists() else "no such folder"
        raise ConfigError(
            f"trainer.resume={run}: {there}; name the folder of a run on verl that saved a step (trainer.save_freq)"
        )
    if not config.trainer.val_only:
        try:
            then = json.loads((run / FACTS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"trainer.resume={run}: {run / FACTS} cannot be read ({error})") from error
        checkpoint.check(run, step, then, facts_of(config, tasks), total)
    _check_parts(run, step, config)
    return SavedRun(run, step)


def saved_step(run: Path) -> int | None:
    """The last step that a run saved; None where it saved none."""
    file = run / CHECKPOINTS / STEP_FILE
    return int(file.read_text()) if file.is_file() else None


def facts_of(config: Config, tasks: Dataset) -> dict[str, Any]:
    """As the local backend's, and of what verl's files are made: they hold one share for each GPU."""
    lora = config.lora
    return checkpoint.facts_of(config, tasks) | {
        "model.path": config.model.path,
        "lora.rank": lora.rank,
        "lora.alpha": float(lora.alpha),
        "lora.target_modules": lora.target_modules,
        "lora.exclude_modules": lora.exclude_modules,
    }


def write_facts(run: Path, config: Config, tasks: Dataset) -> None:
    (run / FACTS).write_text(json.dumps(facts_of(config, tasks), indent=2) + "\n", encoding="utf-8")


def _check_parts(run: Path, step: int, config: Config) -> None:
    """verl's checkpoint is cut into one part for each GPU, and is read by as many."""
    folder = run / CHECKPOINTS / f"global_step_{step}" / "actor"
    found = sorted(
        {
            int(m[1])
            for file in folder.glob("model_world_size_*")
            if (m := re.match(r"model_world_size_(\d+)_", file.name))
        }
    )
    gpus = config.verl.get("trainer.nnodes", 1) * config.verl.get("trainer.n_gpus_per_node", 1)
    if not found:
        raise ConfigError(f"trainer.resume={run}: {folder} has no weights (model_world_size_*.pt); give another run")
    if gpus not in found:
        raise ConfigError(
            f"trainer.resume={run}: step {step} was saved by {found[0]} GPU{'s' * (found[0] != 1)} and can be read by as many only; this "
            f"config has {gpus} (trainer.nnodes x trainer.n_gpus_per_node). Start anew from lora.adapter_path={run}/adapter-step-{step} instead"
        )
