"""Where a run's numbers go besides its folder: the terminal, TensorBoard and W&B.

A tracker has `start(facts, total_steps)`, `step(metrics)` and `finish(result)`. Knows nothing of how numbers come about.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rllm.config.schema import Config
from rllm.errors import UserError
from rllm.tracking.run_folder import RunFolder


class Tracker(Protocol):
    """A place that shows or keeps a run's numbers."""

    def start(self, facts: Mapping[str, Any], total_steps: int) -> None: ...

    def say(self, text: str) -> None: ...

    def step(self, metrics: Mapping[str, float]) -> None: ...

    def finish(self, result: Mapping[str, Any]) -> None: ...


def make_trackers(config: Config, folder: RunFolder) -> list[Tracker]:
    """The trackers that ``trainer.logger`` names."""
    makers = {
        "console": lambda: ConsoleTracker(folder, config),
        "tensorboard": lambda: TensorBoardTracker(folder.path / "tensorboard"),
        "wandb": lambda: WandbTracker(folder.path, config),
    }
    return [makers[name]() for name in config.trainer.logger]


class ConsoleTracker:
    """A banner, one line per step, and a before/after table. Times are seconds."""

    def __init__(self, folder: RunFolder, config: Config, console: Console | None = None):
        self.folder, self.config = folder, config
        self.console = console or Console(highlight=False)
        self.total, self.done, self.began = 0, 0, time.monotonic()

    def start(self, facts: Mapping[str, Any], total_steps: int) -> None:
        self.total = total_steps
        trained, parameters = (
            facts["trainable"],
            facts["parameters"],
        )  # None: the weights are elsewhere, and nobody told
        formula = " = sum of rank x (in + out)" if facts.get("adapters") else ""
        size = "" if parameters is None else f"{parameters:,} parameters, "
        rows = {
            "model": f"{facts['model']}, {size}{facts['dtype']} on {facts['device']}",
            **({"path": facts["path"]} if "path" in facts else {}),
            "base": f"fingerprint {facts['base_fingerprint']}" if "base_fingerprint" in facts else "",
            "method": facts["method"],
            "trained": f"{trained:,} parameters ({100 * trained / max(parameters or 1, 1):.2f} %){formula}"
            if trained
            else "",
            "dtypes": facts.get("dtypes", facts["dtype"]),
            "memory": ", ".join(f"{part} {_bytes(size)}" for part, size in facts.get("memory_bytes", {}).items()),
            "steps": f"{total_steps} of {self.config.data.train_batch_size} tasks x {self.config.rollout.n} episodes",
            "folder": str(self.folder.path),
        }
        for name, value in ((name, value) for name, value in rows.items() if value):
            self.console.print(f"  [bold]{name:<8}[/bold] {escape(value)}", soft_wrap=True)
        for note in facts.get("notes", []):
            self.console.print(f"  [yellow]note[/yellow]     {escape(note)}", soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(f"  {text}", soft_wrap=True, markup=False)

    def step(self, metrics: Mapping[str, float]) -> None:
        step = int(metrics["step"])
        if not self.done:
            self.began = time.monotonic() - metrics["timing_s/step"]
        self.done += 1
        roles = {
            name.split("/")[1]: value
            for name, value in metrics.items()
            if name.startswith("reward/") and name.endswith("/mean")
        }
        rewards = "  ".join(f"{escape(role)} [bold]{value:.3f}[/bold]" for role, value in roles.items())
        left = (time.monotonic() - self.began) / self.done * (self.total - step)
        line = (
            f"  step {step:>{len(str(self.total))}}/{self.total}  {rewards}  {metrics['perf/tokens_per_s']:,.0f} tok/s  "
            f"{metrics['timing_s/step']:.1f} s  ETA {int(left) // 60}:{int(left) % 60:02d}"
        )
        failed = sum(value for name, value in metrics.items() if name.startswith("samples/failed/"))
        if failed:
            line += f"  [red]{failed:.0f} failed[/red]"
        if metrics.get("train/nonfinite_steps"):
            line += "  [yellow]loss or gradient not finite: no step[/yellow]"
        elif metrics.get("train/skipped_steps"):
            line += "  [yellow]skipped: nothing to learn from[/yellow]"
        self.console.print(line, soft_wrap=True)

    def finish(self, result: Mapping[str, Any]) -> None:
        before, after = result["val"].get("before", {}), result["val"].get("after", {})
        if before or after:
            table = Table(title="validation", title_justify="left")
            for heading in ("metric", "before", "after", "change"):
                table.add_column(heading, justify="left" if heading == "metric" else "right")
            for name in dict.fromkeys([*before, *after]):
                if "/reward/" in name or (name.endswith("/failed") and not (before.get(name) or after.get(name))):
                    continue  # what the other rows say already; result.json has all of them
                b, a = before.get(name), after.get(name)
                change = f"{a - b:+.3f}" if a is not None and b is not None else ""
                table.add_row(name, "" if b is None else f"{b:.3f}", "" if a is None else f"{a:.3f}", change)
            self.console.print(table)
        account = result["accounting"]
        dropped, failed = sum(account["dropped"].values()), sum(account["failed"].values())
        self.console.print(
            f"  {account['generated']} trajectories: {account['trained']} trained, {dropped} dropped {account['dropped'] or ''}, "
            f"{failed} failed {account['failed'] or ''}, {account['stale']} stale",
            soft_wrap=True,
            markup=False,
        )
        name = result.get("adapter") or result.get("model")
        if name is None:
            return
        path = self.folder.path / name
        if result.get("interrupted"):
            self.console.print(
                f"  interrupted after {result['steps']} steps; what was learned is saved", soft_wrap=True
            )
        self.console.print(
            f"  saved    [bold]{escape(str(path))}[/bold] ({result['seconds']:.0f} s in all)", soft_wrap=True
        )
        stop = result.get("early_stop")
        if stop and stop["kept"]:
            best = f"{stop['metric']} {stop['best']:.3f} after step {stop['best_step']}"
            kept = escape(str(self.folder.path / stop["kept"]))
            self.console.print(f"  best     [bold]{kept}[/bold] ({escape(best)})", soft_wrap=True)
        base = self.config.model.path
        if result.get("adapter"):
            start, served = f"lora.adapter_path={path}", f"--model {base} --adapter {path}"
        else:
            start, served = f"model.path={path}", f"--model {path}"
        lines = []
        if result.get("state"):
            more = [] if result["interrupted"] else [f"trainer.total_steps={2 * result['steps']}"]
            lines.append(f"  continue {_this_command(f'trainer.resume={self.folder.path}', *more)}")
        if self.config.backend == "local":  # elsewhere a run starts from no file
            lines.append(f"  anew     {_this_command(start, without=_RESUME)}   (a new run from what was learned)")
        lines += [
            f"  chat     {_program('rllm')} serve {served}   and then   {_program('python')} examples/chat_client.py",
        ]
        for line in lines:
            self.console.print(line, soft_wrap=True, markup=False)


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


def _program(name: str) -> str:
    """How to call `name` from here: by its name where that is the one of this environment, else by its path."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    return name if not beside.exists() or (found and Path(found) == beside) else os.path.relpath(beside)


# Every spelling of trainer.resume: a command that begins anew must not also go on with the old run.
_RESUME = ("trainer.resume", "trainer.resume_from_path", "training.resume_from_path")


def _this_command(*extra: str, without: tuple[str, ...] = ()) -> str:
    """The command that started this process, with more `key=value` and not the keys in `without`."""
    script, *arguments = sys.argv
    keys = tuple(key + "=" for key in (*(one.partition("=")[0] for one in extra), *without))
    kept = [argument for argument in arguments if not argument.lstrip("+").startswith(keys)]
    is_cli = Path(script).name in ("rllm", "__main__.py")
    return shlex.join([*([_program("rllm")] if is_cli else [_program("python"), script]), *kept, *extra])


class TensorBoardTracker:
    """Scalars for ``tensorboard --logdir``."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("trainer.logger: tensorboard is not installed; pip install 'rllm[tensorboard]'") from error
        self.writer = SummaryWriter(str(folder))

    def start(self, facts: Mapping[str, Any], total_steps: int) -> None:
        self.writer.add_text("run", "\n\n".join(f"{name}: {value}" for name, value in facts.items()))

    def say(self, text: str) -> None:
        pass

    def step(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, int(metrics["step"]))

    def finish(self, result: Mapping[str, Any]) -> None:
        self.writer.close()


class WandbTracker:
    """A W&B run named like the run folder, with the whole config. ``WANDB_MODE=offline`` keeps it in the folder, for ``wandb sync``."""

    def __init__(self, folder: Path, config: Config):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError("trainer.logger: wandb is not installed; pip install 'rllm[wandb]'") from error
        try:
            self.run = wandb.init(
                project=config.trainer.project_name,
                name=folder.name,
                dir=str(folder),
                config=config.model_dump(mode="json"),
                reinit="create_new",  # a second run in one process is a run of its own
            )
        except wandb.Error as error:
            raise UserError(
                f"trainer.logger: wandb did not start: {str(error).rstrip('.')}; or set WANDB_MODE=offline to keep the run in its "
                "folder, or leave wandb out of trainer.logger"
            ) from error

    def start(self, facts: Mapping[str, Any], total_steps: int) -> None:
        self.run.config.update({"facts": dict(facts), "total_steps": total_steps})

    def say(self, text: str) -> None:
        pass

    def step(self, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=int(metrics["step"]))

    def finish(self, result: Mapping[str, Any]) -> None:
        for when, values in result["val"].items():
            self.run.summary.update({f"{when}/{name}": value for name, value in values.items()})
        self.run.finish()
