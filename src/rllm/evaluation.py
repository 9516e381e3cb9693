"""Runs a flow on a dataset without training: with a model of our own, or against any OpenAI endpoint.

Knows the order of things; episodes are run by `rollouts`, metrics are `algorithms/metrics.py`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rllm.algorithms.metrics import validation_metrics
from rllm.backends.base import BASE, DEFAULT_ADAPTER
from rllm.collect import dataset_of
from rllm.config.load import Resolved, load_config
from rllm.config.schema import Config
from rllm.config.schema_distill import DistillConfig
from rllm.errors import ConfigError, DataError
from rllm.gateway.remote import RemoteGateway
from rllm.lora.files import match_config_to_adapter
from rllm.rollouts.batch import Rollouts, refuse_running_loop
from rllm.tracking.episode_file import CODE, EpisodeFile, digest_of
from rllm.trainer import create_backend
from rllm.types import Episode


def evaluate(
    *,
    agent_flow: Any = None,
    workflow_class: type | None = None,
    workflow_args: dict[str, Any] | None = None,
    evaluator: Any = None,
    config: Any = None,
    dataset: Any = None,
    adapter: str | None = None,
    ks: Sequence[int] = (1,),
    base_url: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    episodes: str | Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Mean metrics, pass@1 and unbiased pass@k of the flow; ``rollout.n_val`` episodes a task (at least the largest k).

    The model is ``config.model.path``, with the PEFT folder `adapter` or (None) alone; or, with `base_url`, whatever that OpenAI
    endpoint serves as `model` (None: the first that it lists), reached with `api_key`. `episodes` is a JSONL file to which each episode
    is written as it ends; with `resume` those that are in it are not run again.
    """
    refuse_running_loop("evaluate")
    if (agent_flow is None) == (workflow_class is None):
        raise ConfigError("evaluate: give exactly one of agent_flow and workflow_class")
    if base_url is not None and adapter is not None:
        raise ConfigError(
            "--adapter has no meaning with --base-url: the endpoint decides what it serves; name it with --model"
        )
    if resume and episodes is None:
        raise ConfigError("--resume goes on with a file: name it with --episodes")
    resolved = config if isinstance(config, Resolved) else load_config(base=config, training=False)
    if base_url is not None and resolved.config.rollout.reasoning == "split":
        raise ConfigError(
            "rollout.reasoning=split has no meaning with --base-url: the endpoint decides where it tells thoughts; leave it out"
        )
    if adapter is not None and resolved.config.backend == "tinker":
        raise ConfigError(
            f"--adapter {adapter} with backend=tinker: a server of Tinker's API takes no adapter files; leave backend out to evaluate the "
            "folder on this machine"
        )
    config = _for_evaluation(resolved.config, adapter, ks)
    tasks = dataset_of(dataset, config.data.val_files, "val", config)
    if tasks is None:
        raise DataError("no tasks to evaluate on: give dataset=, or data.val_files=<file or built-in name>")
    started = time.monotonic()
    parts = (agent_flow, workflow_class, workflow_args or {}, evaluator)
    remote = _remote(config, base_url, model, api_key) if base_url else None
    about = {
        "flow": getattr(agent_flow or workflow_class, "__name__", str(agent_flow)),
        "model": remote.model_name if remote else config.model.path,
        "base_url": remote.base_url if remote else None,
        "adapter": adapter,
        **_sampling(config),
    }
    file = None
    if episodes is not None:
        described = about | _makers(agent_flow or workflow_class, evaluator, adapter)
        file = EpisodeFile(Path(episodes), described, tasks, resume=resume)
    with _rollouts(config, parts, remote) as rollouts:
        ran = rollouts.run(
            list(tasks),
            n=config.rollout.n_val,
            validation=True,
            adapter=DEFAULT_ADAPTER if adapter else BASE,
            known=file.done if file else None,
            on_episode=file.append if file else None,
        )
    return _result(about, len(tasks), ran, ks, file) | {"seconds": round(time.monotonic() - started, 2)}


def _for_evaluation(config: Config, adapter: str | None, ks: Sequence[int]) -> Config:
    """A copy of `config` that samples with `adapter` and runs enough episodes for `ks`."""
    config = config.model_copy(deep=True)
    config.lora.adapter_path = adapter
    config.distill = DistillConfig()  # nobody is taught here
    if adapter:
        config = match_config_to_adapter(config)
    config.rollout.n_val = max(config.rollout.n_val, *ks)
    return config


def _remote(config: Config, base_url: str, model: str | None, api_key: str | None) -> RemoteGateway:
    r = config.rollout
    return RemoteGateway(
        base_url, model, api_key=api_key, call_timeout_s=r.call_timeout_s, template=r.chat_template_kwargs
    )


@contextlib.contextmanager
def _rollouts(config: Config, parts: tuple[Any, ...], remote: RemoteGateway | None) -> Iterator[Rollouts]:
    """Rollouts over the endpoint, or over the config's backend, which is closed in the end."""
    backend = None if remote else create_backend(config)
    try:
        with Rollouts(backend, config, *parts, gateway=remote) as rollouts:
            yield rollouts
    finally:
        if backend is not None:
            backend.close()


def _sampling(config: Config) -> dict[str, Any]:
    """What must be the same for two parts of one evaluation to be one."""
    r = config.rollout
    return {
        "temperature": r.temperature if r.val_temperature is None else r.val_temperature,
        "top_p": r.top_p,
        "max_tokens": r.max_tokens or config.data.max_response_length,
    }


def _makers(flow: Any, evaluator: Any, adapter: str | None) -> dict[str, Any]:
    """What else decides the episodes: the evaluator, the weights in the adapter's folder, and the files of the code."""
    files = {
        inspect.getsourcefile(fn) for fn in (getattr(one, "fn", one) for one in (flow, evaluator)) if _has_source(fn)
    }
    weights = sorted(Path(adapter).rglob("*.safetensors")) if adapter else []
    return {
        "evaluator": getattr(evaluator, "__name__", None),
        "adapter_digest": _digest(weights) if adapter else None,
        CODE: _digest(sorted(Path(file) for file in files if file)),
    }


def _has_source(fn: Any) -> bool:
    return inspect.isclass(fn) or inspect.isfunction(fn)


def _digest(files: Iterable[Path]) -> str:
    return digest_of([hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()])


def _result(
    about: dict[str, Any], n_tasks: int, episodes: Sequence[Episode], ks: Sequence[int], file: EpisodeFile | None
) -> dict[str, Any]:
    failed = [episode for episode in episodes if episode.failed]
    kept = sum(episode.id in file.done for episode in episodes) if file else 0
    return about | {
        "tasks": n_tasks,
        "episodes": len(episodes),
        "failed": len(failed),
        "failed_by_reason": dict(Counter(e.termination_reason.value for e in failed if e.termination_reason)),
        "resumed": kept,
        "episodes_file": str(file.path) if file else None,
        "metrics": validation_metrics(episodes, sorted({1, *ks})),
    }
