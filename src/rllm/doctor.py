"""What this machine can run: packages, devices, a model, each backend's row of the capability table, and what to mend.

Looks, and samples a few tokens once to be sure; changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rllm.backends.base import CAPABILITIES, Capabilities, SamplingParams
from rllm.config.load import load_config
from rllm.config.schema import Config
from rllm.version import __version__

LEAST_FREE_BYTES = 10**9
COLUMN = 22
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[.*?\])?(>=|==)([0-9.]+)(?:; extra == '(\w+)')?$")


@dataclass(frozen=True)
class Problem:
    """Something to mend. `blocks`: the default backend cannot run with it."""

    what: str
    fix: str
    blocks: bool = True


@dataclass
class Report:
    """What was found. Sizes are bytes."""

    rllm: str = __version__
    python: str = field(default_factory=platform.python_version)
    platform: str = field(default_factory=platform.platform)
    packages: dict[str, dict[str, Any]] = field(default_factory=dict)
    extras: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    devices: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def can_run(self) -> bool:
        return not any(problem.blocks for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"can_run": self.can_run}


def examine(model: str = "default") -> Report:
    """Look at everything there is to look at, and try `model` (folder, hub id, or default). Never raises: what goes wrong is a problem in
    the report."""
    report = Report()
    _look_at_packages(report)
    if report.can_run:  # without its packages the backend cannot even be asked
        _look_at_devices(report)
        _try_backend(report, model)
    _look_at_disk(report)
    for name, row in CAPABILITIES.items():
        values = {column.name: getattr(row, column.name) for column in fields(Capabilities)}
        report.backends[name] = {
            key: sorted(value) if isinstance(value, frozenset) else value for key, value in values.items()
        }
    return report


def _look_at_packages(report: Report) -> None:
    for name, relation, version, extra in _requirements():
        installed, needed = _version(name), f"{relation}{version}"
        found, wanted = _numbers(installed or ""), _numbers(version)
        enough = installed is not None and (found == wanted if relation == "==" else found >= wanted)
        entry = {"installed": installed, "needed": needed, "ok": enough}
        if extra:
            report.extras.setdefault(extra, {})[name] = entry
            continue
        report.packages[name] = entry
        if not enough:
            why = "is not installed" if installed is None else f"{installed} is too old"
            report.problems.append(Problem(f"{name} {why} (needed: {needed})", f"pip install '{name}{needed}'"))


def _requirements() -> Iterator[tuple[str, str, str, str | None]]:
    """(package, ``>=`` or ``==``, version, extra) of what the installed rllm declares; what only its developers need is left out."""
    try:
        declared = importlib.metadata.requires("rllm") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    for text in declared:
        match = _REQUIREMENT.match(text.replace('"', "'"))
        if match and match[4] != "dev":
            yield match[1], match[2], match[3], match[4]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> (2, 13, 0)"""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _look_at_devices(report: Report) -> None:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    report.devices["cpu"] = {"cores": os.cpu_count(), "memory_bytes": memory}
    report.devices["cuda"] = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            report.devices["cuda"].append(
                {
                    "name": properties.name,
                    "memory_bytes": properties.total_memory,
                    "compute_capability": f"{properties.major}.{properties.minor}",
                }
            )
    elif shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        report.problems.append(
            Problem(
                f"an NVIDIA driver is installed, but torch {torch.__version__} sees no CUDA device",
                "install a CUDA build of torch (https://pytorch.org/get-started/locally), or set model.device=cpu to say so",
                blocks=False,
            )
        )


def _try_backend(report: Report, model: str) -> None:
    """Load the model on the default backend and sample a few tokens."""
    import asyncio

    config = load_config(overrides=[f"model.path={json.dumps(model)}"], training=False).config
    try:
        from rllm.backends.local.backend import LocalBackend
        from rllm.backends.local.loading import resolve_model

        report.model = {"folder": str(resolve_model(config.model.path))}
        backend = LocalBackend.create(config)
        try:
            facts = backend.describe()
            prompt = backend.tokenizer("2 + 3 =", add_special_tokens=False)["input_ids"]
            answer = asyncio.run(backend.sample(prompt, SamplingParams(max_tokens=4, seed=0)))
        finally:
            backend.close()
    except Exception as error:  # whatever it is, it is why nothing runs
        line = str(error).strip().split("\n")[0]
        report.problems.append(
            Problem(
                f"the {config.backend} backend cannot run the model {model}: {type(error).__name__}: {line}",
                "pip install --force-reinstall rllm"
                if model == "default"
                else "give another model, or mend what is said of this one",
            )
        )
        return
    report.model |= {
        "parameters": facts["parameters"],
        "device": facts["device"],
        "dtype": facts["dtype"],
        "path": facts["path"],
        "sampled_tokens": len(answer.ids),
    }


def _look_at_disk(report: Report) -> None:
    folder = Path(Config().trainer.run_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        report.problems.append(
            Problem(f"runs cannot be written: {folder} is read-only", "start in another folder, or set trainer.run_dir")
        )
    elif shutil.disk_usage(folder).free < LEAST_FREE_BYTES:
        free = shutil.disk_usage(folder).free // 10**6
        report.problems.append(
            Problem(f"only {free} MB are free in {folder}", "make room, or set trainer.run_dir", blocks=False)
        )


def as_text(report: Report) -> str:
    """The report for the terminal: what there is, then the problems, each with the line that mends it."""
    lines = [f"rllm {report.rllm}, Python {report.python}, {report.platform}", "", "packages"]
    for name, entry in report.packages.items():
        lines.append(f"  {name:<18}{entry['installed'] or 'missing':<14}{entry['needed']}")
    for extra, packages in report.extras.items():
        for name, entry in packages.items():
            needed = f", needed {entry['needed']}" if entry["installed"] and not entry["ok"] else ""
            lines.append(
                f"  {name:<18}{entry['installed'] or 'missing':<14}optional{needed}: pip install 'rllm[{extra}]'"
            )
    lines += ["", "devices"]
    cpu = report.devices.get("cpu", {})
    lines.append(f"  cpu   {cpu.get('cores')} cores, {_size(cpu.get('memory_bytes'))}")
    for i, gpu in enumerate(report.devices.get("cuda", [])):
        lines.append(
            f"  cuda:{i} {gpu['name']}, {_size(gpu['memory_bytes'])}, compute capability {gpu['compute_capability']}"
        )
    if not report.devices.get("cuda"):
        lines.append("  cuda  none")
    model = report.model
    if "parameters" in model:
        lines += [
            "",
            "model",
            f"  {model['path']}",
            f"  {model['parameters']:,} parameters, {model['dtype']} on {model['device']}; sampled {model['sampled_tokens']} tokens",
            f"  {model['folder']}",
        ]
    lines += ["", *_table(report.backends)]
    lines.append("")
    for problem in report.problems:
        lines += [f"{'PROBLEM' if problem.blocks else 'note'}: {problem.what}", f"  fix: {problem.fix}"]
    lines.append(
        f"ready: the {Config().backend} backend runs here"
        if report.can_run
        else "not ready: mend what is called PROBLEM"
    )
    return "\n".join(lines)


def _table(backends: dict[str, dict[str, Any]]) -> list[str]:
    """What the backends can do, one in a column; what is too long for that, one in a line."""
    lines = [f"{'backend can':<28}" + "".join(f"{name:<{COLUMN}}" for name in backends).rstrip()]
    for column in fields(Capabilities):
        cells = {name: _cell(row[column.name]) for name, row in backends.items()}
        if max(map(len, cells.values())) < COLUMN:
            lines.append(f"  {column.name:<26}" + "".join(f"{cell:<{COLUMN}}" for cell in cells.values()).rstrip())
        else:
            lines += [f"  {column.name}", *(f"    {name + ':':<8}{cell}" for name, cell in cells.items())]
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def _size(size: int | None) -> str:
    return "memory unknown" if size is None else f"{size / 2**30:.1f} GiB"
