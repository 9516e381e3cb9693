"""What a TARGET argument names: a file or module with a flow (or workflow), its evaluator, defaults and datasets.

Knows how to find things in a module; runs nothing of them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rllm.errors import UserError
from rllm.flow import Evaluator, RolloutFlow, Workflow

_IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Target:
    """A module's flow or workflow class, and what goes with it."""

    flow: RolloutFlow | None
    workflow_class: type | None
    evaluator: Evaluator | None
    defaults: Mapping[str, Any]
    train_dataset: Callable[[Any], Any] | None
    val_dataset: Callable[[Any], Any] | None


def load_target(text: str) -> Target:
    """``path/to/file.py`` or ``package.module``, with ``:name`` where the module has several flows."""
    place, _, name = text.partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") or "/" in place else _load_module(place)
    runnable = _pick(module, name, place)
    flow = runnable if isinstance(runnable, RolloutFlow) else None
    workflow_class: type | None = runnable if isinstance(runnable, type) else None
    evaluators = list({id(value): value for value in vars(module).values() if isinstance(value, Evaluator)}.values())
    if flow is not None and len(evaluators) != 1:
        found = ", ".join(e.name for e in evaluators) or "none"
        raise UserError(f"{place}: a flow needs exactly one @rllm.evaluator in its module, found {found}")
    return Target(
        flow,
        workflow_class,
        evaluators[0] if flow is not None else None,
        getattr(module, "DEFAULTS", {}),
        getattr(module, "train_dataset", None),
        getattr(module, "val_dataset", None),
    )


def peek_defaults(text: str) -> Mapping[str, Any] | None:
    """The DEFAULTS of a target file without running it, so that a config mistake costs no import; None where only running it can tell."""
    place = Path(text.partition(":")[0])
    if place.suffix != ".py" or not place.is_file():
        return None
    try:
        tree = ast.parse(place.read_bytes())
    except (SyntaxError, ValueError):
        return None
    imported = {
        name.asname or name.name for node in ast.walk(tree) if isinstance(node, _IMPORTS) for name in node.names
    }
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "DEFAULTS"]
    if not uses and not imported & {"DEFAULTS", "*"}:
        return {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets == uses and not imported & {"DEFAULTS", "*"}:
            try:
                found = ast.literal_eval(node.value)
            except ValueError:
                return None
            return found if isinstance(found, dict) else None
    return None


def _pick(module: ModuleType, name: str, place: str) -> RolloutFlow | type:
    found = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, RolloutFlow)
        or (isinstance(value, type) and issubclass(value, Workflow) and value.__module__ == module.__name__)
    }
    if name:
        if name not in found:
            raise UserError(f"{place}: no flow or workflow called {name!r}; it has {', '.join(found) or 'none'}")
        return found[name]
    flows = {key: value for key, value in found.items() if isinstance(value, RolloutFlow)}
    chosen = flows or found
    if len(chosen) != 1:
        raise UserError(
            f"{place}: expected one function decorated with @rllm.rollout (or one Workflow class), found "
            f"{', '.join(chosen) or 'none'}" + (f"; say which: {place}:{next(iter(chosen))}" if chosen else "")
        )
    return next(iter(chosen.values()))


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the Python file (or module) that holds your flow")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that the file can import its neighbours, as when it is run
    name = _free_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _free_name(path: Path) -> str:
    """The file's own name, unless a module that others import has it: a flow in random.py must not become everybody's random."""
    holder = sys.modules.get(path.stem)
    theirs = holder is not None and Path(getattr(holder, "__file__", None) or "").resolve() != path.resolve()
    return f"{path.stem}_target" if theirs or path.stem in sys.stdlib_module_names else path.stem


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and not name.startswith(error.name):
            raise
        raise UserError(f"no module {name!r}; give path/to/file.py or an importable package.module") from error
