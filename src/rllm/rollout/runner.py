"""Runs episodes, many at once: deadline, retries, and every failure kept as a failed sample.

Knows flows, evaluators and sessions; nothing of training.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.config.schema import Config
from rllm.flow import Workflow, apply_evaluation, apply_workflow_rewards
from rllm.gateway.chat import SessionEngine
from rllm.gateway.recorder import Session
from rllm.gateway.server import Gateway
from rllm.rollout.enrich import AttributionError, enrich
from rllm.types import Episode, Task, TerminationEvent, TerminationReason, Trajectory, new_id

logger = logging.getLogger(__name__)
# Of a failed episode's traceback this much is kept.
TRACEBACK_CHARACTERS = 8000


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to run. `uid` is ``"{task id}:{rollout index}"``."""

    task: Task
    uid: str
    seed: int = 0
    is_validation: bool = False


class EpisodeRunner:
    """Runs a flow with its evaluator, or a workflow class, against a gateway."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        flow: Any = None,
        workflow_class: type | None = None,
        workflow_args: dict[str, Any] | None = None,
        evaluator: Any = None,
        config: Config,
        adapter: str = "default",
    ):
        self.gateway, self.flow, self.evaluator = gateway, flow, evaluator
        self.workflow_class, self.workflow_args = workflow_class, workflow_args or {}
        self.settings, self.adapter = config.rollout, adapter
        self.max_tokens = config.rollout.max_tokens or config.data.max_response_length
        # One event loop for the runner's life: a client that a flow keeps between episodes stays usable.
        self._loop = asyncio.Runner()

    def run(
        self, requests: Sequence[EpisodeRequest], on_episode: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """All of `requests`, in their order. Ctrl-C cancels what runs and is passed on."""
        return self._loop.run(self._run(requests, on_episode))

    def close(self) -> None:
        """End the event loop and whatever flows left running in it."""
        self._loop.close()

    async def _run(
        self, requests: Sequence[EpisodeRequest], on_episode: Callable[[Episode], None] | None
    ) -> list[Episode]:
        free = asyncio.Semaphore(self.settings.max_concurrency)

        async def one(request: EpisodeRequest) -> Episode:
            async with free:
                episode = await self.run_episode(request)
            if on_episode is not None:
                on_episode(episode)
            return episode

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in tasks]

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        """One episode, tried again up to ``rollout.retries`` times if it fails. Never raises for a fault of flow or evaluator."""
        for attempt in range(self.settings.retries + 1):
            episode = await self._attempt(request, attempt)
            if not episode.failed:
                break
        return episode

    async def _attempt(self, request: EpisodeRequest, attempt: int) -> Episode:
        session = self.gateway.open_session(
            f"{re.sub(r'[^A-Za-z0-9._-]', '_', request.uid)[:80]}-{new_id()[:12]}",
            seed=request.seed + attempt,
            is_validation=request.is_validation,
            sampling=self._sampling(request.is_validation),
            adapter=self.adapter,
        )
        episode = Episode(id=request.uid)
        try:
            async with asyncio.timeout(self.settings.episode_timeout_s):
                run = self._run_flow if self.flow is not None else self._run_workflow
                episode = await run(request, session)
        except TimeoutError:
            limit = self.settings.episode_timeout_s
            episode = self._failure(request, TerminationReason.TIMEOUT, f"no result within {limit:g} s (rollout.episode_timeout_s)")
        except Exception:
            episode = self._failure(request, TerminationReason.ERROR, traceback.format_exc()[-TRACEBACK_CHARACTERS:])
        finally:
            self.gateway.close_session(session)
        episode.id, episode.task, episode.session_id = request.uid, request.task, session.uid
        return episode

    async def _run_flow(self, request: EpisodeRequest, session: Session) -> Episode:
        episode = await self.flow.arun(request.task, self.gateway.agent_config(session, request.task.metadata))
        episode.id, episode.task = request.uid, request.task
        _fill_from_record(episode, session)
        output = await self.evaluator.aevaluate(request.task, episode)
        apply_evaluation(episode, output)
        return episode

    async def _run_workflow(self, request: EpisodeRequest, session: Session) -> Episode:
        assert self.workflow_class is not None
        workflow: Workflow = self.workflow_class(SessionEngine(self.gateway.model, session), **self.workflow_args)
        task = {"id": request.task.id, "question": request.task.instruction, "instruction": request.task.instruction}
        task |= request.task.metadata
        workflow.reset(task, request.uid)
        reason: TerminationReason | None = None
        episode: Episode | None = None
        try:
            episode = await workflow.run(task, request.uid)
        except TerminationEvent as event:
            reason = event.reason
        if episode is None:
            episode = Episode(trajectories=list(workflow.committed), termination_reason=reason)
        episode.id, episode.task = request.uid, request.task
        _fill_from_record(episode, session)
        apply_workflow_rewards(episode)
        return episode

    def _sampling(self, is_validation: bool) -> dict[str, Any]:
        s = self.settings
        temperature = s.temperature
        if is_validation and s.val_temperature is not None:
            temperature = s.val_temperature
        return {"temperature": temperature, "top_p": s.top_p, "max_tokens": self.max_tokens}

    def _failure(self, request: EpisodeRequest, reason: TerminationReason, error: str) -> Episode:
        logger.debug("episode %s failed (%s): %s", request.uid, reason.value, error)
        return Episode(id=request.uid, task=request.task, termination_reason=reason, error=error)


def _fill_from_record(episode: Episode, session: Session) -> None:
    """Steps from the record; a flow that called no model and gives no trajectory of its own is a fault."""
    if not session.calls and not any(_has_tokens(t) for t in episode.trajectories):
        raise AttributionError(
            "the flow ended without one recorded model call: call the model through config.base_url (or the workflow's "
            "rollout_engine), and return the trajectories"
        )
    enrich(episode, session)
    if not episode.trajectories:
        raise AttributionError("the flow returned an episode without trajectories; return at least one")


def _has_tokens(trajectory: Trajectory) -> bool:
    return any(step.response_ids for step in trajectory.steps)
