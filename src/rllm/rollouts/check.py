"""Whether an episode is what the rest of a step can work with. What is not fails alone, here, and never takes the step with it.

Knows the user's words and records; nothing of HTTP or models.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rllm.flow import EvaluationError, as_reward
from rllm.gateway.recorder import Session
from rllm.gateway.server import TokenLimits
from rllm.types import Episode, ModelOutput, Step, TerminationReason, Trajectory


class EpisodeError(Exception):
    """A flow or evaluator gave something that cannot be an episode; the text says what, and what is allowed."""


def checked(episode: Episode) -> Episode:
    """`episode` itself, its fields of the kinds they are declared as: numbers of numpy and torch are made Python's, the value of a
    termination reason the reason. Raises `EpisodeError` where that cannot be."""
    for name in ("metrics", "artifacts", "metadata"):
        _need(isinstance(getattr(episode, name), dict), f"Episode.{name}", getattr(episode, name), "a dict")
    reason = episode.termination_reason
    if reason is not None and not isinstance(reason, TerminationReason):
        values = [one.value for one in TerminationReason]
        _need(reason in values, "Episode.termination_reason", reason, f"one of {', '.join(values)}, or None")
        episode.termination_reason = TerminationReason(reason)
    for name in episode.metrics:
        _need(isinstance(name, str), "a name in Episode.metrics", name, "text")
    episode.metrics = {name: _number(value, f"metric {name!r}") for name, value in episode.metrics.items()}
    _need(isinstance(episode.trajectories, list), "Episode.trajectories", episode.trajectories, "a list")
    _need(bool(episode.trajectories), "Episode.trajectories", episode.trajectories, "at least one")
    for trajectory in episode.trajectories:
        _check_trajectory(trajectory)
    if len({id(trajectory) for trajectory in episode.trajectories}) < len(episode.trajectories):
        raise EpisodeError("Episode.trajectories: the same Trajectory object is in it twice; make one for each")
    return episode


def _check_trajectory(trajectory: Any) -> None:
    _need(isinstance(trajectory, Trajectory), "Episode.trajectories", trajectory, "a list of Trajectory")
    for name in ("name", "uid"):
        value = getattr(trajectory, name)
        _need(isinstance(value, str) and bool(value), f"Trajectory.{name}", value, "a text that is not empty")
    where = f"trajectory {trajectory.name!r}"
    _need(isinstance(trajectory.steps, list), f"{where}: steps", trajectory.steps, "a list of Step")
    for step in trajectory.steps:
        _need(isinstance(step, Step), f"{where}: steps", step, "a list of Step")
        _need(isinstance(step.id, str), f"{where}: Step.id", step.id, "the id of a response")
        for name in ("prompt_ids", "response_ids", "logprobs"):
            _need(isinstance(getattr(step, name), list), f"{where}: Step.{name}", getattr(step, name), "a list")
        step.reward = _number(step.reward, f"{where}: Step.reward")


def check_tokens(episode: Episode, session: Session, limits: TokenLimits | None) -> None:
    """Whether every step can be trained: those of recorded calls have exactly the recorded tokens, each call is one step at most, and
    tokens that a flow brought itself are whole. Raises `EpisodeError`."""
    calls = session.recorded()
    steps = [(step, t.name) for t in episode.trajectories for step in t.steps if step.response_ids]
    claims = Counter(step.id for step, _ in steps if step.id in calls)
    if claims and max(claims.values()) > 1:
        raise EpisodeError(f"two steps claim the call {claims.most_common(1)[0][0]!r}; each call is one step")
    for step, name in steps:
        where = f"step {step.id} of trajectory {name!r}"
        if step.id in calls:
            if not same_tokens(step, calls[step.id].output):
                raise EpisodeError(
                    f"{where}: its tokens or log-probabilities are not those that were sampled; leave them as they are recorded (to "
                    "leave a step out of training, leave it out of the trajectory)"
                )
        else:
            _check_own(step, where, session, limits)


def same_tokens(step: Step, output: ModelOutput) -> bool:
    """Whether what was sampled is what `step` would train."""
    return (step.prompt_ids, step.response_ids, step.logprobs) == (
        output.prompt_ids,
        output.completion_ids,
        output.logprobs,
    ) and (step.temperature, step.adapter) == (output.temperature, output.adapter)


def _check_own(step: Step, where: str, session: Session, limits: TokenLimits | None) -> None:
    """Tokens that no recorded call has."""
    step.prompt_ids, step.response_ids = (_ids(ids, where, limits) for ids in (step.prompt_ids, step.response_ids))
    n, found = len(step.response_ids), len(step.logprobs)
    if n != found:
        raise EpisodeError(
            f"{where}: {n} sampled tokens but {found} log-probabilities; fill steps from the record (Step(id=response.id)) or give both"
        )
    step.logprobs = [_number(logprob, f"{where}: a log-probability") for logprob in step.logprobs]
    if limits is not None and len(step.prompt_ids) + n > limits.length:
        raise EpisodeError(f"{where}: {len(step.prompt_ids) + n} tokens; the model takes {limits.length}")
    temperature = _number(step.temperature, f"{where}: temperature")
    _need(temperature > 0, f"{where}: temperature", temperature, "above 0")
    if not session.roles and step.adapter != session.adapter_of(None):
        _need(False, f"{where}: adapter", step.adapter, repr(session.adapter_of(None)))


def _ids(given: Sequence[Any], where: str, limits: TokenLimits | None) -> list[int]:
    try:
        ids = [operator.index(token) for token in given]
    except TypeError as error:
        raise EpisodeError(f"{where}: token ids must be whole numbers, found {reprlib.repr(given)}") from error
    most = limits.vocab_size if limits is not None else math.inf
    if ids and not 0 <= min(ids) <= max(ids) < most:
        raise EpisodeError(f"{where}: token ids go from 0 to {most - 1}, found {min(ids)} to {max(ids)}")
    return ids


def check_all_there(before: Sequence[Trajectory], after: Episode) -> None:
    """Raise `EpisodeError` if an evaluator took a trajectory out: no sample is lost without a reason that is counted."""
    left = {trajectory.uid for trajectory in after.trajectories}
    gone = [trajectory.name for trajectory in before if trajectory.uid not in left]
    if gone:
        raise EpisodeError(
            f"the evaluator removed {len(gone)} of {len(before)} trajectories ({', '.join(gone)}); leave them in, or do not return them "
            "from the flow"
        )


def keep_sound(episode: Episode) -> None:
    """Of an episode that failed, what others can read."""
    for name in ("metrics", "artifacts", "metadata"):
        if not isinstance(getattr(episode, name), dict):
            setattr(episode, name, {})
    given: Any = episode.trajectories
    episode.trajectories = [one for one in given if _is_sound(one)] if isinstance(given, list) else []


def _is_sound(trajectory: Any) -> bool:
    try:
        _check_trajectory(trajectory)
    except Exception:
        return False
    return True


def _number(value: Any, what: str) -> float:
    try:
        return as_reward(value, what)
    except EvaluationError as error:
        raise EpisodeError(
            f"{what} is {reprlib.repr(value)} ({type(value).__name__}); it must be a finite number"
        ) from error


def _need(holds: bool, what: str, found: Any, allowed: str) -> None:
    if not holds:
        raise EpisodeError(f"{what} is {reprlib.repr(found)} ({type(found).__name__}); it must be {allowed}")
