"""Starts a run on verl: the folder, verl's config, Ray, and what it came to.

Imports verl inside of functions only, after it was checked for.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import difflib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm.backends.verl.install import require_verl
from rllm.backends.verl.render import ROLLOUT, Rendered, hydra_value, parameters_of, positions_of, render
from rllm.cluster.job import Job
from rllm.cluster.tasks import write_tasks
from rllm.config.load import Resolved
from rllm.config.schema import Config
from rllm.errors import ConfigError, DataError, RunError, UserError
from rllm.tracking.run_folder import RunFolder
from rllm.types import Task

STEP_FILE = "latest_checkpointed_iteration.txt"
_MANAGER = "rllm.cluster.worker.FlowManager"


@dataclass
class Parts:
    """What runs and rewards an episode."""

    flow: Any = None
    workflow_class: type | None = None
    workflow_args: dict[str, Any] = field(default_factory=dict)
    evaluator: Any = None


def train_on_verl(
    resolved: Resolved[Config],
    parts: Parts,
    train: Sequence[Task] | None,
    val: Sequence[Task] | None,
    steps: int,
) -> dict[str, Any]:
    """Run to the end and return what ``result.json`` holds.

    The Ray cluster is the one of ``RAY_ADDRESS`` (or ``ray_kwargs.ray_init.address``), else this machine alone.
    """
    config = resolved.config
    require_verl(str(config.verl.get(f"{ROLLOUT}.name", "vllm")))
    from rllm.backends.local.loading import resolve_model

    tasks = list(train or val or ())
    if not config.trainer.val_only and len(tasks) < config.data.train_batch_size:
        raise DataError(
            f"data.train_batch_size={config.data.train_batch_size}, but there are {len(tasks)} training tasks; verl's loader leaves out a "
            "batch that is not full: lower the batch size, or give more tasks"
        )
    model = resolve_model(config.model.path)
    facts: dict[str, Any] = {
        "parameters": parameters_of(model),
        "positions": positions_of(model),
        "flash_attention": importlib.util.find_spec("flash_attn") is not None,
    }
    rendered = render(config, str(model), steps, "run", **facts)
    check_against_verl(rendered)  # before there is a folder
    folder = _folder(resolved)
    resolved.notes += [note for note in rendered.notes if note not in resolved.notes]
    rendered = render(config, str(model), steps, str(folder.path.resolve()), **facts)
    job = Job(config, folder.path.resolve(), parts.flow, parts.workflow_class, parts.workflow_args, parts.evaluator)
    tree = compose(rendered, _own_keys(job, tasks, list(val or ())))
    for note in resolved.notes:
        print(f"rllm: {note}")
    _run(tree)
    return json.loads((folder.path / "result.json").read_text())


def _own_keys(job: Job, tasks: Sequence[Task], val: Sequence[Task]) -> dict[str, Any]:
    """Where verl finds the tasks, the flow and our classes."""
    files = {"train": write_tasks(tasks, job.folder / "tasks-train.jsonl")}
    files["val"] = write_tasks(val, job.folder / "tasks-val.jsonl") if val else files["train"]
    keys: dict[str, Any] = {f"data.{split}_files": str(path) for split, path in files.items()}
    keys |= {"data.custom_cls.path": "pkg://rllm.cluster.tasks", "data.custom_cls.name": "TaskRows"}
    keys |= {f"+{ROLLOUT}.agent.agent_loop_manager_class": _MANAGER, "+rllm.job": str(job.save())}
    if not val:
        keys |= {"trainer.test_freq": -1, "trainer.val_before_train": False}
    return keys


def compose(rendered: Rendered, more: Mapping[str, Any] | None = None) -> Any:
    """verl's whole config, as its own ``main_ppo`` would compose it from these overrides. Raises `ConfigError` for a key that it lacks."""
    import verl.trainer
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    overrides = rendered.overrides() + [f"{key}={hydra_value(value)}" for key, value in (more or {}).items()]
    folder = Path(next(iter(verl.trainer.__path__))) / "config"
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return hydra_compose("ppo_trainer", overrides=overrides)
    except HydraException as error:
        raise _unknown(error, rendered) or ConfigError(f"verl's config: {error}") from error


def check_against_verl(rendered: Rendered) -> None:
    """Every key must be in verl's tree, and its own check of the whole must pass."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    tree = compose(rendered)
    try:
        validate_config(config=tree, use_reference_policy=need_reference_policy(tree), use_critic=need_critic(tree))
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"verl refuses this config: {error}") from error


def _unknown(error: Exception, rendered: Rendered) -> ConfigError | None:
    """Which of the keys verl's tree does not have, with the nearest that it has."""
    from omegaconf import OmegaConf

    from rllm.config.explain import flatten

    text = f"{error} {error.__cause__ or ''}"
    tree: Any = OmegaConf.to_container(compose(Rendered()), resolve=False)
    known = [key for key, _ in flatten(tree)]
    missing = [
        key for key in rendered.values if key.lstrip("+") == key and key not in known and key.rpartition(".")[2] in text
    ]
    missing = [key for key in missing if not any(name.startswith(f"{key}.") for name in known)]
    if not missing:
        return None
    near = difflib.get_close_matches(missing[0], known, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]!r}?" if near else f"verl.+{missing[0]}=... adds a key to its tree"
    return ConfigError(f"{missing[0]}: verl 0.9.1 has no such key; {hint}")


def _folder(resolved: Resolved[Config]) -> RunFolder:
    """A new run folder, or that of the run to go on with."""
    trainer = resolved.config.trainer
    if trainer.resume is None:
        return RunFolder.create(resolved)
    path = Path(trainer.run_dir) / (trainer.experiment_name or "") if trainer.resume == "auto" else Path(trainer.resume)
    saved = path / "checkpoints" / STEP_FILE
    if saved.is_file():
        return RunFolder.reopen(path, resolved, int(saved.read_text()))
    if trainer.resume == "auto":
        return RunFolder.create(resolved)
    raise RunError(
        f"trainer.resume={trainer.resume}: there is no {saved}; name the folder of a run on verl that saved a step"
    )


def _run(tree: Any) -> None:
    """verl's `run_ppo` with our runner. An error of ours that was raised on the cluster is raised here as what it is."""
    import ray
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.device import auto_set_device

    from rllm.cluster.trainer import FlowTaskRunner

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    began = not ray.is_initialized()
    try:
        auto_set_device(tree)
        run_ppo(tree, task_runner_class=ray.remote(num_cpus=1)(FlowTaskRunner))
    except ray.exceptions.RayTaskError as error:
        cause: BaseException | None = error.cause
        if isinstance(cause, UserError):
            raise type(cause)(str(cause)) from error
        raise RunError(f"the run on verl failed:\n{error}") from error
    finally:
        if began:
            ray.shutdown()
