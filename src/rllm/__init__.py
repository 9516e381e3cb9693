"""rllm: reinforcement learning with LoRA for LLM agents. Public names load on first use, so importing this is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rllm.version import __version__

_HOMES = {
    "AgentConfig": "rllm.types",
    "Episode": "rllm.types",
    "EvalOutput": "rllm.types",
    "ModelOutput": "rllm.types",
    "Signal": "rllm.types",
    "Step": "rllm.types",
    "Task": "rllm.types",
    "TerminationEvent": "rllm.types",
    "TerminationReason": "rllm.types",
    "Trajectory": "rllm.types",
    "Workflow": "rllm.flow",
    "evaluator": "rllm.flow",
    "rollout": "rllm.flow",
    "PythonTool": "rllm.tools",
    "Tool": "rllm.tools",
    "Toolset": "rllm.tools",
    "tool": "rllm.tools",
    "Config": "rllm.config.schema",
    "load_config": "rllm.config.load",
    "Dataset": "rllm.data.dataset",
    "load_dataset": "rllm.data.dataset",
    "combine_rewards": "rllm.rewards.combine",
    "register_advantage": "rllm.algorithms.advantages",
    "register_loss": "rllm.algorithms.losses",
    "AgentTrainer": "rllm.trainer",
    "evaluate": "rllm.evaluation",
    "UserError": "rllm.errors",
    "run_cli": "rllm.errors",
}

if TYPE_CHECKING:
    from rllm.algorithms.advantages import register_advantage as register_advantage
    from rllm.algorithms.losses import register_loss as register_loss
    from rllm.config.load import load_config as load_config
    from rllm.config.schema import Config as Config
    from rllm.data.dataset import Dataset as Dataset
    from rllm.data.dataset import load_dataset as load_dataset
    from rllm.errors import UserError as UserError
    from rllm.errors import run_cli as run_cli
    from rllm.evaluation import evaluate as evaluate
    from rllm.flow import Workflow as Workflow
    from rllm.flow import evaluator as evaluator
    from rllm.flow import rollout as rollout
    from rllm.rewards.combine import combine_rewards as combine_rewards
    from rllm.tools import PythonTool as PythonTool
    from rllm.tools import Tool as Tool
    from rllm.tools import Toolset as Toolset
    from rllm.tools import tool as tool
    from rllm.trainer import AgentTrainer as AgentTrainer
    from rllm.types import AgentConfig as AgentConfig
    from rllm.types import Episode as Episode
    from rllm.types import EvalOutput as EvalOutput
    from rllm.types import ModelOutput as ModelOutput
    from rllm.types import Signal as Signal
    from rllm.types import Step as Step
    from rllm.types import Task as Task
    from rllm.types import TerminationEvent as TerminationEvent
    from rllm.types import TerminationReason as TerminationReason
    from rllm.types import Trajectory as Trajectory

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rllm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
