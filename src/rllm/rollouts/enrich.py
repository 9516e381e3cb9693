"""Fills an episode's steps with the exact tokens of the recorded calls: by call id or trajectory uid, never by position.

Knows episodes and records; nothing of HTTP or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rllm.gateway.recorder import Call, Session
from rllm.types import Episode, Step, Trajectory


class AttributionError(Exception):
    """Steps and recorded calls do not fit together without guessing."""


def enrich(episode: Episode, session: Session) -> None:
    """Give every step the tokens of its call, and step-less trajectories the calls that are theirs.

    1. ``Step(id=response.id)`` takes that call. 2. A trajectory without steps takes the calls made through
    ``config.url_for(trajectory.uid)``. 3. If exactly one step-less trajectory is left, it takes all calls without a trajectory that
    nobody named; if it is the only trajectory at all, as where a flow returns nothing, those of any uid too. Calls left over are counted in ``metadata["unclaimed_calls"]``. Raises `AttributionError` where only a guess
    would help, and where an episode shows no sign of a model call at all.
    """
    calls = session.recorded()
    _check_used_the_model(episode, calls, session.is_validation)
    claimed: set[str] = set()
    empty = [trajectory for trajectory in episode.trajectories if not trajectory.steps]
    for trajectory in episode.trajectories:
        for step in trajectory.steps:
            _fill_step(step, trajectory, calls, claimed, session.is_validation)
    untagged: list[Trajectory] = []
    for trajectory in empty:
        own = [call for call in _unclaimed(calls, claimed) if call.trajectory == trajectory.uid]
        if not own:
            untagged.append(trajectory)
        _take(trajectory, own, claimed)
    alone = len(episode.trajectories) == 1
    left = [call for call in _unclaimed(calls, claimed) if call.trajectory is None or alone]
    if left and len(untagged) > 1:
        raise AttributionError(
            f"{len(left)} model calls could belong to any of {len(untagged)} trajectories without steps "
            f"({', '.join(t.name for t in untagged)}): name the call of each step with Step(id=response.id), "
            "or call the model through config.url_for(trajectory.uid)"
        )
    for trajectory in untagged:
        _take(trajectory, left, claimed)
    for trajectory in episode.trajectories:
        _check_adapters(trajectory, session)
    if len(claimed) < len(calls):
        episode.metadata["unclaimed_calls"] = len(calls) - len(claimed)


def _check_used_the_model(episode: Episode, calls: Mapping[str, Call], is_validation: bool) -> None:
    has_tokens = any(step.response_ids for t in episode.trajectories for step in t.steps)
    # In validation only rewards matter: a flow may answer without the model if it says what.
    has_result = is_validation and any(t.steps or t.output is not None for t in episode.trajectories)
    if not (calls or has_tokens or has_result):
        raise AttributionError(
            "the flow ended without one recorded model call: call the model through config.base_url (a workflow: through "
            "self.rollout_engine)"
        )


def _check_adapters(trajectory: Trajectory, session: Session) -> None:
    """With an adapter per role, what a role is trained on must have been sampled with its own."""
    if not session.roles:
        return
    try:
        expected = session.adapter_of(trajectory.role)
    except LookupError as error:
        raise AttributionError(str(error.args[0])) from error
    for step in trajectory.steps:
        if step.response_ids and step.adapter != expected:
            raise AttributionError(
                f"trajectory {trajectory.name!r} has a step that was sampled with the adapter {step.adapter!r}, its role has "
                f"{expected!r} (lora.per_role): make the calls of this role with model=config.model_for({trajectory.role!r}), "
                f"in a workflow with get_model_response(..., role={trajectory.role!r})"
            )


def _unclaimed(calls: Mapping[str, Call], claimed: set[str]) -> list[Call]:
    return [call for call in calls.values() if call.output.id not in claimed]


def _fill_step(
    step: Step, trajectory: Trajectory, calls: Mapping[str, Call], claimed: set[str], is_validation: bool
) -> None:
    call = calls.get(step.id)
    if call is None:
        if step.response_ids or is_validation:
            return
        raise AttributionError(
            f"a step of trajectory {trajectory.name!r} has the id {step.id!r}, which is no recorded call of this episode, "
            "and no tokens of its own: give Step(id=response.id) of the call it was"
        )
    if step.id in claimed:
        raise AttributionError(f"two steps claim the call {step.id!r}; each call is one step")
    claimed.add(step.id)
    _fill(step, call)


def _take(trajectory: Trajectory, calls: Sequence[Call], claimed: set[str]) -> None:
    for call in calls:
        step = Step(id=call.output.id)
        _fill(step, call)
        trajectory.steps.append(step)
        claimed.add(call.output.id)


def _fill(step: Step, call: Call) -> None:
    brought = (step.prompt_ids, step.response_ids)
    if not step.response_ids or brought == (call.output.prompt_ids, call.output.completion_ids):
        step.fill(call.output)
    if not step.chat_completions:
        step.chat_completions = [*call.messages, call.answer]
