"""What every process of a run on verl needs of the run: the flow, the evaluator, our config, the folder. One file, read by all.

Knows pickling; nothing of verl.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm.config.schema import Config
from rllm.errors import ConfigError

FILE = "job.pkl"


@dataclass
class Job:
    """One run. `folder` is the run's, which every machine of the cluster must see under this path."""

    config: Config
    folder: Path
    flow: Any = None
    workflow_class: type | None = None
    workflow_args: dict[str, Any] = field(default_factory=dict)
    evaluator: Any = None
    notes: list[str] = field(default_factory=list)

    def save(self) -> Path:
        """Write the job into its folder. What the user's own files define travels by value, so that no other machine has to import them."""
        from ray import cloudpickle

        modules = {id(m): m for m in map(_module_of, self._users_own()) if m is not None}.values()
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            body = cloudpickle.dumps(self)
        except Exception as error:  # cloudpickle raises what the objects' own code raises
            raise ConfigError(
                f"backend=verl: the flow or the evaluator cannot be sent to other processes ({type(error).__name__}: {error}); make what "
                "it holds (clients, locks, files) inside of the function"
            ) from error
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
        path = self.folder.resolve() / FILE
        path.write_bytes(pickle.dumps((list(sys.path), body)))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """The job that `save` wrote; modules are found where the script that started the run found them."""
        paths, body = pickle.loads(Path(path).read_bytes())
        sys.path += [entry for entry in paths if entry not in sys.path]
        return pickle.loads(body)

    def _users_own(self) -> list[Any]:
        return [getattr(self.flow, "fn", self.flow), self.workflow_class, getattr(self.evaluator, "fn", self.evaluator)]


def _module_of(thing: Any) -> Any:
    """The module of `thing` where it is one of the user's own files, and not an installed package or the script itself."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return None
    return None if "site-packages" in file or module.__name__.startswith("rllm.") else module
