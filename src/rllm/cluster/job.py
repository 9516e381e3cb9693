"""What every process of a run on verl needs of the run: the flow, the evaluator, our config, the folder. One file, read by all.

Knows pickling; nothing of verl.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import pickle
import sys
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rllm.config.schema import Config
from rllm.errors import ConfigError

FILE = "job.pkl"


@dataclass
class Job:
    """One run. `folder` is the run's, which every machine of the cluster must see under this path; `validates`: there are tasks for it."""

    config: Config
    folder: Path
    flow: Any = None
    workflow_class: type | None = None
    workflow_args: dict[str, Any] = field(default_factory=dict)
    evaluator: Any = None
    validates: bool = False

    def save(self) -> Path:
        """Write the job into its folder. What the user's own files define travels by value, so that no other machine has to import them:
        all of them that are loaded, since those of the flow may use others; where one of them cannot travel, those of the flow alone."""
        path = self.folder.resolve() / FILE
        path.write_bytes(pickle.dumps((list(sys.path), self.pickled())))
        return path

    def pickled(self) -> bytes:
        """Raises a `ConfigError` for a flow or an evaluator that cannot be sent."""
        own = _users_modules()
        try:
            return self._pickled(own)
        except ConfigError:
            return self._pickled({m for m in map(_module_of, self._parts()) if m in own})

    def _pickled(self, by_value: Collection[ModuleType]) -> bytes:
        from ray import cloudpickle

        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
        try:
            return cloudpickle.dumps(self)
        except Exception as error:  # cloudpickle raises what the objects' own code raises
            raise ConfigError(
                f"backend=verl: the flow or the evaluator cannot be sent to other processes ({type(error).__name__}: {error}); make what "
                "it holds (clients, locks, files) inside of the function"
            ) from error
        finally:
            for module in by_value:
                cloudpickle.unregister_pickle_by_value(module)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """The job that `save` wrote; modules are found where the script that started the run found them."""
        paths, body = pickle.loads(Path(path).read_bytes())
        sys.path += [entry for entry in paths if entry not in sys.path]
        return pickle.loads(body)

    def _parts(self) -> list[Any]:
        return [getattr(self.flow, "fn", self.flow), self.workflow_class, getattr(self.evaluator, "fn", self.evaluator)]


def _module_of(thing: Any) -> ModuleType | None:
    return sys.modules.get(getattr(thing, "__module__", None) or "")


def _users_modules() -> set[ModuleType]:
    """The loaded modules that are files of the user's own, and not Python's, rllm's, an installed package's or the script itself (which
    always travels by value)."""
    loaded = [(name, module, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    standard = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")}
    installed = {entry for entry in sys.path if any(Path(entry or ".").glob("*.dist-info"))}
    outside = tuple(f"{folder}{os.sep}" for folder in standard | installed)
    return {
        module
        for name, module, file in loaded
        if file
        and name == module.__name__ != "__main__"
        and name.partition(".")[0] != "rllm"
        and not file.startswith(outside)
    }
