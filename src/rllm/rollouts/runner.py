"""Runs episodes, many at once: deadline, retries, and every failure kept as a failed sample.

Knows flows, evaluators and sessions; nothing of training.
"""

from __future__ import annotations

import asyncio
import re
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rllm.backends.base import DEFAULT_ADAPTER
from rllm.config.schema import Config
from rllm.flow import Evaluator, RolloutFlow, Workflow, apply_evaluation, apply_workflow_rewards, as_episode
from rllm.gateway.chat import SessionEngine
from rllm.gateway.recorder import Session
from rllm.gateway.server import Gateway
from rllm.rollouts.enrich import enrich
from rllm.types import Episode, Task, TerminationEvent, TerminationReason, new_id

# Of a failed episode's traceback this much is kept.
TRACEBACK_CHARACTERS = 8000
_loops = threading.local()
T = TypeVar("T")


class OutOfTime(Exception):
    """An episode's deadline passed."""


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to run. `uid` is ``"{task id}:{rollout index}"``."""

    task: Task
    uid: str
    seed: int = 0
    is_validation: bool = False
    adapter: str = DEFAULT_ADAPTER


class EpisodeRunner:
    """Runs a flow with its evaluator, or a workflow class, against a gateway. Undecorated functions are taken as they are."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        flow: Any = None,
        workflow_class: type | None = None,
        workflow_args: dict[str, Any] | None = None,
        evaluator: Any = None,
        config: Config,
    ):
        self.gateway = gateway
        self.flow, self.evaluator = flow, evaluator
        if flow is not None and not hasattr(flow, "arun"):
            self.flow = RolloutFlow(flow, _name(flow))
        if evaluator is not None and not hasattr(evaluator, "aevaluate"):
            self.evaluator = Evaluator(evaluator, _name(evaluator))
        self.workflow_class, self.workflow_args = workflow_class, workflow_args or {}
        self.settings = config.rollout
        self.max_tokens = config.rollout.max_tokens or config.data.max_response_length

    def run(
        self, requests: Sequence[EpisodeRequest], on_episode: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """All of `requests`, in their order. Ctrl-C cancels what runs and is passed on."""
        return _loop_of_thread().run(self._run(requests, on_episode))

    def close(self) -> None:
        """End whatever flows left running."""
        _loop_of_thread().run(_cancel_others())

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
        attempt = 0
        while True:
            episode = await self._attempt(request, attempt)
            if not episode.failed or attempt >= self.settings.retries:
                return episode
            attempt += 1

    async def _attempt(self, request: EpisodeRequest, attempt: int) -> Episode:
        session = self.gateway.open_session(
            f"{re.sub(r'[^A-Za-z0-9._-]', '_', request.uid)[:80]}-{new_id()[:12]}",
            seed=request.seed + attempt,
            is_validation=request.is_validation,
            sampling=self._sampling(request.is_validation),
            adapter=request.adapter,
        )
        episode = Episode(id=request.uid, task=request.task)
        try:
            run = self._run_flow if self.flow is not None else self._run_workflow
            await _within(self.settings.episode_timeout_s, "rollout.episode_timeout_s", run(request, session, episode))
        except OutOfTime as error:
            episode.termination_reason, episode.error = TerminationReason.TIMEOUT, str(error)
        except Exception:
            episode.termination_reason = TerminationReason.ERROR
            episode.error = traceback.format_exc()[-TRACEBACK_CHARACTERS:]
        finally:
            self.gateway.close_session(session)
        episode.session_id = session.uid
        if attempt:
            episode.metadata["retries"] = attempt
        return episode

    # Both of these fill `episode` as they go, so that a failed one still shows what it had.

    async def _run_flow(self, request: EpisodeRequest, session: Session, episode: Episode) -> None:
        given = await self.flow.arun(request.task, self.gateway.agent_config(session, request.task.metadata))
        _take_over(episode, given)
        enrich(episode, session)
        output = await self.evaluator.aevaluate(request.task, episode)
        apply_evaluation(episode, output)

    async def _run_workflow(self, request: EpisodeRequest, session: Session, episode: Episode) -> None:
        assert self.workflow_class is not None
        workflow: Workflow = self.workflow_class(SessionEngine(self.gateway.model, session), **self.workflow_args)
        instruction = request.task.instruction
        task = {"id": request.task.id, "question": instruction, "instruction": instruction} | request.task.metadata
        workflow.reset(task, request.uid)
        episode.trajectories = workflow.committed
        given: Episode | None = None
        try:
            given = await _within(workflow.timeout, "the workflow's timeout", workflow.run(task, request.uid))
        except TerminationEvent as event:
            episode.termination_reason = event.reason
            if not workflow.committed:
                raise RuntimeError(
                    f"the workflow ended ({event.reason.value}) before it committed a trajectory; "
                    "self.commit(trajectory=...) keeps one"
                ) from event
        if given is not None:
            _take_over(episode, as_episode(given, f"workflow {self.workflow_class.__name__}"))
        elif not workflow.committed:
            raise TypeError(f"workflow {self.workflow_class.__name__} returned nothing and committed no trajectory")
        enrich(episode, session)
        apply_workflow_rewards(episode)
        if given is None:
            episode.is_correct = sum(trajectory.reward or 0.0 for trajectory in episode.trajectories) > 0

    def _sampling(self, is_validation: bool) -> dict[str, Any]:
        s = self.settings
        temperature = s.temperature
        if is_validation and s.val_temperature is not None:
            temperature = s.val_temperature
        return {"temperature": temperature, "top_p": s.top_p, "max_tokens": self.max_tokens}


async def _within(limit_s: float, name: str, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or `OutOfTime`. A TimeoutError of the work's own stays what it is."""
    deadline = asyncio.timeout(limit_s)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if deadline.expired():
            raise OutOfTime(f"no result within {limit_s:g} s ({name})") from error
        raise


def _take_over(episode: Episode, given: Episode) -> None:
    """What the user's episode says, under the id and task that the request gave."""
    for name in ("trajectories", "termination_reason", "is_correct", "metrics", "artifacts", "metadata"):
        setattr(episode, name, getattr(given, name))


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _loop_of_thread() -> asyncio.Runner:
    """The event loop of this thread, kept for good: a client that a flow keeps from one run to the next stays usable."""
    runner = getattr(_loops, "runner", None)
    if runner is None:
        runner = _loops.runner = asyncio.Runner()
    return runner


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
