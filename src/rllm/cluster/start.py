"""Starts a run on verl: the folder, verl's config, Ray, and what it came to.

Imports verl inside of functions only, after it was checked for.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import difflib
import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rllm.backends.base import refuse_impossible
from rllm.backends.verl.install import require_verl
from rllm.backends.verl.render import ROLLOUT, Rendered, hydra_value, parameters_of, positions_of, render
from rllm.cluster.job import Job
from rllm.cluster.resume import saved_run, write_facts
from rllm.cluster.room import check_room, connect
from rllm.cluster.tasks import task_to_text, write_tasks
from rllm.config.load import Resolved
from rllm.config.schema import Config
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError, DataError, ModelError, RunError, UserError
from rllm.tracking.run_folder import RunFolder
from rllm.types import Task

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
    config, notes = with_saved_adapter(config)
    resolved = replace(resolved, config=config, notes=[*resolved.notes, *notes])
    base = resolve_model(config.model.path)
    model, facts = _model(config, base)
    asked = with_named_targets(config, base)
    rendered = render(asked, model, steps, "run", **facts)
    tree = check_against_verl(rendered)  # before there is a folder
    saved = saved_run(config, Dataset(tasks), steps)
    job = Job(config, Path(), parts.flow, parts.workflow_class, parts.workflow_args, parts.evaluator, bool(val))
    job.pickled()  # what cannot be sent is told before there is a folder too
    for task in (*tasks, *(val or ())):
        task_to_text(task)
    resolved.notes += [note for note in rendered.notes if note not in resolved.notes]
    with _ray(tree, config):
        folder = RunFolder.create(resolved) if saved is None else RunFolder.reopen(saved.run, resolved, saved.step)
        path = folder.path.resolve()
        rendered = render(asked, model, steps, str(path), **facts)
        if saved is None:
            write_facts(path, config, Dataset(tasks))
        job.folder = path
        tree = compose(rendered, _own_keys(job, tasks, list(val or ()), goes_on=saved is not None))
        for note in resolved.notes:
            print(f"rllm: {note}")
        _run(tree)
    return json.loads((path / "result.json").read_text())


def _model(config: Config, folder: Path) -> tuple[str, dict[str, Any]]:
    """What verl is told to load where this machine has it in `folder`, and what `render` wants to know of it and of this machine. On several machines a model of the hub goes
    by its name, since the folder that it was fetched into is this machine's own."""
    of_hub = config.model.path != "default" and not Path(config.model.path).expanduser().is_dir()
    name = config.model.path if of_hub and config.verl.get("trainer.nnodes", 1) > 1 else str(folder)
    flash = importlib.util.find_spec("flash_attn") is not None
    return name, {
        "parameters": parameters_of(folder),
        "positions": positions_of(folder),
        "flash_attention": flash,
    }


def with_named_targets(config: Config, folder: Path) -> Config:
    """`config` with the modules that an expression in ``lora.target_modules`` means, by name: PEFT would hold it against norms and whole blocks
    too, and stop there. Raises a `ConfigError` where LoRA's targets match no module, which PEFT would say in a worker at the end of a long
    traceback. Only for dense decoders: others may have modules that their files name otherwise."""
    from rllm.lora.checkpoint import read_places
    from rllm.lora.match import ALL_LINEAR, OUTPUT_HEAD, adapted_modules

    lora, dense = config.lora, parameters_of(folder)
    if not lora.trains_adapters or lora.adapter_path or dense is None or not math.isfinite(dense):
        return config
    try:
        places = read_places(folder)
    except ModelError:  # weights in another form, which verl may read
        return config
    matrices = [name.removesuffix(".weight") for name, place in places.items() if len(place.shape) == 2]
    names = [name for name in matrices if "embed" not in name and name != OUTPUT_HEAD]
    chosen = adapted_modules([*names, OUTPUT_HEAD], lora)
    if not isinstance(lora.target_modules, str) or lora.target_modules == ALL_LINEAR:
        return config
    config = config.model_copy(deep=True)
    config.lora.target_modules, config.lora.exclude_modules = chosen, None
    return config


def with_saved_adapter(config: Config) -> tuple[Config, list[str]]:
    """`config` with the rank and scale of ``lora.adapter_path``, which count in that case, and a note where they are others."""
    from rllm.lora.files import read_adapter

    lora = config.lora
    if not lora.adapter_path:
        return config, []
    folder = Path(lora.adapter_path).expanduser()
    saved, matrices = read_adapter(folder)
    if (
        len({a.shape[0] for a, _, _ in matrices.values()}) > 1
        or saved.get("rank_pattern")
        or saved.get("alpha_pattern")
    ):
        raise ConfigError(
            f"lora.adapter_path: {folder} has several ranks or alphas; vLLM reads one of each. Merge it into its base (rllm merge) and "
            "train a fresh adapter on that"
        )
    config = config.model_copy(deep=True)
    config.lora.rank, config.lora.alpha, config.lora.adapter_path = saved["r"], saved["lora_alpha"], str(folder)
    refuse_impossible(config)
    note = (
        f"lora.adapter_path: rank {saved['r']}, alpha {saved['lora_alpha']:g} and the modules are taken from {folder}"
    )
    return config, [note]


def _own_keys(job: Job, tasks: Sequence[Task], val: Sequence[Task], goes_on: bool) -> dict[str, Any]:
    """Where verl finds the tasks, the flow and our classes."""
    files = {"train": write_tasks(tasks, job.folder / "tasks-train.pkl")}
    files["val"] = write_tasks(val, job.folder / "tasks-val.pkl") if val else files["train"]
    keys: dict[str, Any] = {f"data.{split}_files": str(path) for split, path in files.items()}
    keys |= {"data.custom_cls.path": "pkg://rllm.cluster.tasks", "data.custom_cls.name": "TaskRows"}
    keys |= {f"+{ROLLOUT}.agent.agent_loop_manager_class": _MANAGER, "+rllm.job": str(job.save())}
    if not val:
        keys["trainer.test_freq"] = -1
    if not val or (goes_on and not job.config.trainer.val_only):
        keys["trainer.val_before_train"] = False
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


def check_against_verl(rendered: Rendered) -> Any:
    """verl's tree of it. Every key must be in that tree, and its own check of the whole must pass."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    tree = compose(rendered)
    try:
        validate_config(config=tree, use_reference_policy=need_reference_policy(tree), use_critic=need_critic(tree))
    except (
        Exception
    ) as error:  # asserts of its own, and whatever its config classes and those of transformers raise inside of Hydra
        raise ConfigError(f"verl refuses this config: {str(error.__cause__ or error).strip()}") from error
    return tree


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


@contextmanager
def _ray(tree: Any, config: Config) -> Iterator[None]:
    """Ray as verl's ``run_ppo`` would start it, or the cluster that there is; ended again where it was started here."""
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    began = not ray.is_initialized()
    try:
        if began:
            asked: Any = OmegaConf.to_container(tree.ray_kwargs.get("ray_init", OmegaConf.create()), resolve=True)
            asked["runtime_env"] = OmegaConf.to_container(
                OmegaConf.merge(get_ppo_ray_runtime_env(tree), asked.get("runtime_env") or {})
            )
            connect(asked)
        check_room(config.verl.get("trainer.nnodes", 1), config.verl.get("trainer.n_gpus_per_node", 1))
        yield
    finally:
        if began:
            ray.shutdown()


def _run(tree: Any) -> None:
    """verl's `run_ppo` with our runner. An error of ours that was raised on the cluster is raised here as what it is."""
    import ray
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.device import auto_set_device

    from rllm.cluster.trainer import FlowTaskRunner

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        auto_set_device(tree)
        run_ppo(tree, task_runner_class=ray.remote(num_cpus=1)(FlowTaskRunner))
    except ray.exceptions.RayTaskError as error:
        cause: BaseException | None = error.cause
        if isinstance(cause, UserError):
            raise type(cause)(str(cause)) from error
        if cause is not None and isinstance(cause, ray.exceptions.RayActorError):
            raise _lost(cause) from error
        raise RunError(f"the run on verl failed:\n{error}") from error
    except ray.exceptions.RayError as error:
        raise _lost(error) from error


def _lost(error: BaseException) -> RunError:
    return RunError(
        "the run on verl was lost: one of its processes, or its machine, has died (out of memory, a crash, a kill); trainer.resume=<its "
        f"folder> goes on after the last step that trainer.save_freq saved. {error}"
    )
