"""On-policy distillation: what a teacher says of the tokens that the student sampled, as one advantage a token.

Pure functions over floats; knows no models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rllm.algorithms.advantages import returns
from rllm.types import Step

# exp() of more than this says no more than "much larger".
MAX_LOG_RATIO = 20.0


def reverse_kl_advantages(
    student: Sequence[float], teacher: Sequence[float], coef: float = 1.0, gamma: float = 0.0
) -> list[float]:
    """``A_t = coef * sum over s >= t of gamma^(s - t) (log p_teacher(y_s) - log p_student(y_s))`` [N].

    `student` and `teacher` [N] are log-probabilities of the same sampled tokens of one row, at the same temperature. With samples of
    the student, ``E[A_t grad log p_student(y_t)]`` at `gamma` 0 is minus `coef` times the gradient of KL(student || teacher) of the
    next token; with `gamma` 1 it is that of the whole row (Gu et al. 2024, MiniLLM, eq. 2; Agarwal et al. 2024, GKD; "On-Policy
    Distillation", Thinking Machines 2025, which takes 0).
    """
    gaps = [coef * (t - s) for s, t in zip(student, teacher, strict=True)]
    return returns(gaps, gamma)


def kl_estimates(student: Sequence[float], teacher: Sequence[float]) -> tuple[float, float]:
    """(k1, k3): estimates of KL(student || teacher) per token from samples of the student (Schulman 2020), means over N > 0 tokens.
    With ``d = log p_student - log p_teacher``, k1 is ``d`` and k3 is ``exp(-d) - 1 + d``, which is never negative."""
    gaps = [s - t for s, t in zip(student, teacher, strict=True)]
    k3 = [math.expm1(min(-d, MAX_LOG_RATIO)) + d for d in gaps]
    return math.fsum(gaps) / len(gaps), math.fsum(k3) / len(k3)


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of single tokens, beside those that are made of rewards. `values`: by ``id()`` of the step, one for each of its
    sampled tokens. `replace`: they take the place of the reward's; else they are added to it."""

    values: Mapping[int, list[float]] = field(default_factory=dict)
    replace: bool = False

    def of(self, step: Step, from_reward: float | list[float] | None) -> float | list[float] | None:
        """The advantage of `step`; None: it is not trained."""
        own = self.values.get(id(step))
        if own is None:
            return from_reward
        if self.replace or from_reward is None:
            return own
        base = from_reward if isinstance(from_reward, list) else [from_reward] * len(own)
        return [a + b for a, b in zip(base, own, strict=True)]
