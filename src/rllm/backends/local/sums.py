"""Sums of per-token numbers over micro-batches, kept on the device until the end, and the metrics they become."""

from __future__ import annotations

from torch import Tensor


class Sums:
    """Adds up statistics of the trained tokens; `metrics` reads them from the device, once."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._tokens = 0

    def tokens(self, n: int) -> None:
        self._tokens += n

    def add(self, name: str, value: Tensor) -> None:
        """A number that is reported as the sum over micro-batches."""
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def mean(self, name: str, values: Tensor) -> None:
        """Per-token numbers of which the mean over all tokens that have them is reported."""
        self.add(name, values.sum())
        self._counts[name] = self._counts.get(name, 0) + len(values)

    def maximum(self, name: str, values: Tensor) -> None:
        """Per-token numbers of which the largest is reported."""
        top = values.max()
        self._maxima[name] = self._maxima[name].maximum(top) if name in self._maxima else top

    def weights(self, values: Tensor) -> None:
        """Importance ratios: reported are mean, maximum and the effective sample size as a share of the tokens."""
        self.mean("ratio_mean", values)
        self.maximum("ratio_max", values)
        self.add("ratio_squares", values.square().sum())

    def metrics(self) -> dict[str, float]:
        """``loss``, ``tokens`` and what was counted; of no tokens nothing but these two, as 0.

        ``ess`` is ``(sum r)^2 / (N sum r^2)`` over the N ratios (Kish 1965): 1 where all are equal, 1 / N where one has all weight.
        """
        if not self._tokens:
            return {"loss": 0.0, "tokens": 0.0}
        values = {name: value.item() for name, value in self._sums.items()}
        squares = values.pop("ratio_squares", 0.0)
        result = {name: value / self._counts.get(name, 1) for name, value in values.items()}
        result |= {name: value.item() for name, value in self._maxima.items()}
        if squares > 0:
            result["ess"] = values["ratio_mean"] ** 2 / (self._counts["ratio_mean"] * squares)
        return {"loss": result.pop("loss"), "tokens": float(self._tokens)} | result
