"""When a run has learned what it will: watches one validation metric.

Knows numbers only; validating, saving and ending the run is the trainer's.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.config.schema import Config, EarlyStopConfig
from rllm.errors import ConfigError


def check_early_stop(config: Config, val_tasks: Sequence[Any] | None, total: int) -> None:
    """Raise a `ConfigError` if ``trainer.early_stop`` would never see a validation in a run of `total` steps."""
    t = config.trainer
    if t.early_stop.metric is None or t.val_only:
        return
    found = f"trainer.early_stop.metric={t.early_stop.metric}"
    if val_tasks is None:
        raise ConfigError(
            f"{found}: there are no validation tasks; give val_dataset=, or data.val_files=<file or built-in name>"
        )
    if t.test_freq > total:
        raise ConfigError(
            f"{found} with trainer.test_freq={t.test_freq}: the run has {total} steps, so its first validation never comes; lower "
            "trainer.test_freq"
        )


@dataclass
class EarlyStop:
    """The course of ``trainer.early_stop.metric`` over the validations during training. Without a metric it never says anything."""

    settings: EarlyStopConfig
    best: float | None = None
    best_step: int = 0
    without_best: int = 0
    reason: str = ""

    def check_name(self, metrics: Mapping[str, float]) -> None:
        """Raise a `ConfigError` with the names there are if the metric is not among those of a validation."""
        name = self.settings.metric
        if name is None or name in metrics:
            return
        near = difflib.get_close_matches(name, metrics, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"trainer.early_stop.metric={name}: no such validation metric{hint}; there are {', '.join(sorted(metrics))}"
        )

    def see(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take in the validation after `step`; True if it is the best so far. `reason` is then set if the run should end."""
        s = self.settings
        if s.metric is None:
            return False
        self.check_name(metrics)
        value = metrics[s.metric]
        is_best = math.isfinite(value) and (self.best is None or self._sign() * (value - self.best) > s.min_delta)
        if is_best:
            self.best, self.best_step, self.without_best = value, step, 0
        else:
            self.without_best += 1
        self.reason = self._why_end(value)
        return is_best

    def _why_end(self, value: float) -> str:
        """Why the run ends, the newest validation having `value`; empty while it goes on."""
        s = self.settings
        if s.target is not None and self._sign() * (value - s.target) >= 0:
            return f"{s.metric} is {value:g}, the target {s.target:g} is reached"
        if self.without_best >= s.patience:
            best = "none was finite" if self.best is None else f"the best is {self.best:g} after step {self.best_step}"
            return f"{s.metric} has no new best in {self.without_best} validations; {best}"
        return ""

    def _sign(self) -> float:
        return 1.0 if self.settings.mode == "max" else -1.0

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        watched = {"metric": self.settings.metric, "mode": self.settings.mode}
        return watched | {"best": self.best, "best_step": self.best_step, "without_best": self.without_best}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Be where `state` was; what was seen of another metric says nothing of this one."""
        s = self.settings
        if s.metric is None or (state["metric"], state["mode"]) != (s.metric, s.mode):
            return
        self.best, self.best_step, self.without_best = state["best"], state["best_step"], state["without_best"]
        self.reason = self._why_end(math.nan if self.best is None else self.best)

    def to_dict(self) -> dict[str, Any]:
        """What `result.json` says of it."""
        return {
            "metric": self.settings.metric,
            "best": self.best,
            "best_step": self.best_step,
            "stopped": self.reason or None,
        }
