"""Whether the verl that this package is written for is installed, told in one line where it is not.

Imports nothing of verl.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

from rllm.errors import ConfigError

VERSION, VLLM_VERSION = "0.9.1", "0.24.0"
_INSTALL = "pip install 'rllm[verl]'"
# Modules that verl's v1 trainer imports and that verl itself does not always bring.
_NEEDED = {
    "ray": "ray[default]",
    "tensordict": "tensordict",
    "transfer_queue": "TransferQueue",
    "torchdata": "torchdata",
}


def require_verl(engine: str = "vllm") -> None:
    """Raise a `ConfigError` where verl, what it needs or the rollout `engine` is missing, or verl has another version."""
    try:
        found = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"backend=verl: verl is not installed; {_INSTALL}") from None
    if found != VERSION:
        raise ConfigError(
            f"backend=verl: found verl {found}, which has other hooks; this version of rllm runs verl {VERSION}: {_INSTALL}"
        )
    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if engine in ("vllm", "sglang") and importlib.util.find_spec(engine) is None:
        missing.append(engine)
    if missing:
        raise ConfigError(f"backend=verl: verl {VERSION} is here, but not {', '.join(missing)}; {_INSTALL}")
    if engine == "vllm" and not _same_release(found := importlib.metadata.version("vllm"), VLLM_VERSION):
        raise ConfigError(
            f"backend=verl: found vllm {found}; verl {VERSION} runs vllm {VLLM_VERSION}, into whose insides it reaches to send weights: {_INSTALL}"
        )


def _same_release(found: str, wanted: str) -> bool:
    """Whether `found` is `wanted`, built for whatever (``0.24.0+cu130``)."""
    return found.partition("+")[0] == wanted
