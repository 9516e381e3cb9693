"""On-policy distillation in a training step: the trajectories that were collected go to the teacher, and come back as advantages of
their tokens. What the teacher does not score is a failed sample.

Knows trajectories and a teacher; nothing of episodes, losses or files.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rllm.algorithms.datums import rows_of
from rllm.algorithms.distillation import TokenAdvantages, kl_estimates, reverse_kl_advantages
from rllm.backends.base import Backend, Datum
from rllm.collect import Collected
from rllm.config.schema import Config
from rllm.errors import RunError
from rllm.teacher import Teacher, Unscored, make_teacher
from rllm.types import Trajectory

NOT_FINITE = "teacher_not_finite"


@dataclass
class _Answer:
    """What the teacher says of one trajectory: per sampled token, in order."""

    trajectory: Trajectory
    student: list[float]
    teacher: list[float]
    advantages: list[float]
    failure: Unscored | None = None


@dataclass(frozen=True)
class Distiller:
    """Scores what a step collected."""

    teacher: Teacher
    config: Config

    @classmethod
    def of(cls, config: Config, backend: Backend) -> Distiller | None:
        """The distiller that `config` asks for, its teacher tried once; None where there is no teacher."""
        if not config.distill.enabled or config.trainer.val_only:
            return None
        return cls(make_teacher(config, backend), config)

    @property
    def note(self) -> str:
        """What a run says of it."""
        d = self.config.distill
        whom = "all roles" if d.roles is None else ", ".join(d.roles)
        how = "in place of rewards" if d.mode == "only" else "added to the advantages of rewards"
        return f"distillation of {whom} from {self.teacher.name}, {how} (coef {d.coef:g})"

    def run(self, found: Collected) -> tuple[TokenAdvantages, dict[str, float]]:
        """Advantages of the tokens of every trajectory that is taught. Those that the teacher did not score leave `found` and are counted
        as failed, by reason; more than ``rollout.max_failed_fraction`` of them end the run.

        ``distill/kl`` is the mean over tokens of the student's log-probability less the teacher's (k1, an estimate of KL(student ||
        teacher) per token; with several roles also ``distill/<role>/kl``), ``distill/kl_k3`` the estimate of less variance,
        ``distill/teacher_logprob`` the teacher's mean and ``distill/tokens`` their number.
        """
        started = time.monotonic()
        taught = [t for g in found.groups if self.config.distill.teaches(g.role) for t in g.trajectories]
        answers = self._answers(taught)
        failed = [answer for answer in answers if answer.failure is not None]
        self._check_share(failed, len(answers))
        _leave_out(found, failed)
        scored = [answer for answer in answers if answer.failure is None]
        values: dict[int, list[float]] = {}
        for answer in scored:
            at = 0
            for step in answer.trajectory.steps:
                values[id(step)] = answer.advantages[at : at + len(step.response_ids)]
                at += len(step.response_ids)
        metrics = _metrics(scored) | {"timing_s/teacher": time.monotonic() - started}
        return TokenAdvantages(values, self.config.distill.mode == "only"), metrics

    def _answers(self, trajectories: Sequence[Trajectory]) -> list[_Answer]:
        d = self.config.distill
        rows = [rows_of(t, [0.0] * len(t.steps)) for t in trajectories]
        told = iter(self.teacher.logprobs([row for own in rows for row in own]))
        answers: list[_Answer] = []
        for trajectory, own in zip(trajectories, rows, strict=True):
            answer = _Answer(trajectory, [], [], [])
            for row in own:
                values = next(told)
                if not isinstance(values, Unscored):
                    student, teacher = _sampled(row, row.logprobs), _sampled(row, values)
                    if all(map(math.isfinite, teacher)):
                        answer.student += student
                        answer.teacher += teacher
                        answer.advantages += reverse_kl_advantages(student, teacher, d.coef, d.gamma)
                        continue
                    at = next(i for i, value in enumerate(teacher) if not math.isfinite(value))
                    values = Unscored(
                        NOT_FINITE,
                        f"{self.teacher.name} gives sampled token {at} of a row the log-probability {teacher[at]}",
                    )
                answer.failure = answer.failure or values
            answers.append(answer)
        return answers

    def _check_share(self, failed: Sequence[_Answer], asked: int) -> None:
        share = self.config.rollout.max_failed_fraction
        if failed and len(failed) > share * asked:
            first = failed[0].failure
            assert first is not None
            raise RunError(
                f"the teacher did not score {len(failed)} of {asked} trajectories, more than rollout.max_failed_fraction={share}. The "
                f"first failure ({first.reason}): {first.detail}"
            )


def _sampled(row: Datum, values: Sequence[float]) -> list[float]:
    return [value for value, m in zip(values, row.mask, strict=True) if m]


def _leave_out(found: Collected, failed: Sequence[_Answer]) -> None:
    """Take trajectories out of the groups; groups and units of which nothing is left go too."""
    gone = {id(answer.trajectory) for answer in failed}
    if not gone:
        return
    for answer in failed:
        assert answer.failure is not None
        found.account.failed[answer.failure.reason] += 1
    units = []
    for unit in found.units:
        groups = [replace(g, trajectories=[t for t in g.trajectories if id(t) not in gone]) for g in unit]
        if left := [group for group in groups if group.trajectories]:
            units.append(left)
    found.units = units


def _metrics(scored: Sequence[_Answer]) -> dict[str, float]:
    student = [v for answer in scored for v in answer.student]
    teacher = [v for answer in scored for v in answer.teacher]
    if not student:
        return {"distill/tokens": 0.0}
    k1, k3 = kl_estimates(student, teacher)
    metrics = {
        "distill/kl": k1,
        "distill/kl_k3": k3,
        "distill/teacher_logprob": math.fsum(teacher) / len(teacher),
        "distill/tokens": float(len(student)),
    }
    roles: dict[str, list[_Answer]] = defaultdict(list)
    for answer in scored:
        roles[answer.trajectory.role].append(answer)
    for role, own in roles.items() if len(roles) > 1 else ():
        gaps = [s - t for answer in own for s, t in zip(answer.student, answer.teacher, strict=True)]
        metrics[f"distill/{role}/kl"] = math.fsum(gaps) / len(gaps)
    return metrics
