"""Fills an episode's steps with the exact tokens of the recorded calls: by call id or trajectory uid, never by position.

Knows episodes and records; nothing of HTTP or models.
"""

from __future__ import annotations

from rllm.gateway.recorder import Call, Session
from rllm.types import Episode, Step, Trajectory


class AttributionError(Exception):
    """Steps and recorded calls do not fit together without guessing."""


def enrich(episode: Episode, session: Session) -> None:
    """Give every step the tokens of its call, and step-less trajectories the calls that are theirs.

    1. ``Step(id=response.id)`` takes that call. 2. A trajectory without steps takes the calls made through
    ``config.url_for(trajectory.uid)``. 3. If exactly one step-less trajectory is left, it takes all calls that nobody named.
    Raises `AttributionError` where only a guess would help.
    """
    claimed: set[str] = set()
    for trajectory in episode.trajectories:
        for step in trajectory.steps:
            _fill_step(step, trajectory, session, claimed)
    untagged: list[Trajectory] = []
    for trajectory in episode.trajectories:
        if trajectory.steps:
            continue
        calls = [c for c in session.calls.values() if c.trajectory == trajectory.uid and c.output.id not in claimed]
        if calls:
            _take(trajectory, calls, claimed)
        else:
            untagged.append(trajectory)
    left = [c for c in session.calls.values() if c.output.id not in claimed and c.trajectory is None]
    if left and len(untagged) == 1:
        _take(untagged[0], left, claimed)
    elif left and len(untagged) > 1:
        names = ", ".join(t.name for t in untagged)
        raise AttributionError(
            f"{len(left)} model calls could belong to any of {len(untagged)} trajectories without steps ({names}): "
            "name the call of each step with Step(id=response.id), or call the model through config.url_for(trajectory.uid)"
        )
    unclaimed = len(session.calls) - len(claimed)
    if unclaimed:
        episode.metadata["unclaimed_calls"] = unclaimed


def _fill_step(step: Step, trajectory: Trajectory, session: Session, claimed: set[str]) -> None:
    call = session.calls.get(step.id)
    if call is None:
        if not step.response_ids and not session.is_validation:
            raise AttributionError(
                f"a step of trajectory {trajectory.name!r} has the id {step.id!r}, which is no recorded call of this episode, "
                "and no tokens of its own: give Step(id=response.id) of the call it was"
            )
        return
    if step.id in claimed:
        raise AttributionError(f"two steps claim the call {step.id!r}; each call is one step")
    claimed.add(step.id)
    _fill(step, call)


def _take(trajectory: Trajectory, calls: list[Call], claimed: set[str]) -> None:
    for call in calls:
        step = Step(id=call.output.id)
        _fill(step, call)
        trajectory.steps.append(step)
        claimed.add(call.output.id)


def _fill(step: Step, call: Call) -> None:
    if not step.response_ids:
        step.fill(call.output)
    if not step.chat_completions:
        step.chat_completions = [*call.messages, {"role": "assistant", "content": call.output.content}]
