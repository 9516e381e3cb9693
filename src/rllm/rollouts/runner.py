"""Runs episodes, many at once: deadline, retries, and every failure kept as a failed sample.

Knows flows, evaluators and sessions; nothing of training.
"""

from __future__ import annotations

import asyncio
import copy
import re
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rllm.backends.base import DEFAULT_ADAPTER
from rllm.config.schema import Config
from rllm.flow import Evaluator, RolloutFlow, Workflow, apply_evaluation, apply_workflow_rewards, as_episode
from rllm.gateway.recorder import Session
from rllm.gateway.remote import RemoteGateway
from rllm.gateway.server import Gateway
from rllm.rollouts.check import check_all_there, check_tokens, checked, keep_sound
from rllm.rollouts.enrich import enrich
from rllm.rollouts.rewards import RewardError, RewardPool, RewardTimeout, reference_to
from rllm.rollouts.watchdog import Watchdog
from rllm.types import Episode, Task, TerminationEvent, TerminationReason, Trajectory, new_id

# Of a failed episode's traceback this much is kept.
TRACEBACK_CHARACTERS = 8000
# So long may a cancelled flow clean up.
CANCEL_GRACE_S = 2.0
_loops = threading.local()
T = TypeVar("T")


class OutOfTime(Exception):
    """A deadline of the episode passed."""


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
        gateway: Gateway | RemoteGateway,
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
        self.notes: list[str] = []
        self._pool = self._reward_pool()

    def run(
        self, requests: Sequence[EpisodeRequest], on_episode: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """All of `requests`, in their order. Ctrl-C cancels what runs and is passed on."""
        if self._pool is not None and requests:
            self._pool.warm()
        return _loop_of_thread().run(self._run(requests, on_episode))

    def close(self) -> None:
        """End whatever flows left running, and the processes of the evaluator."""
        if self._pool is not None:
            self._pool.close()
        _loop_of_thread().run(_cancel_others())

    def _reward_pool(self) -> RewardPool | None:
        """Processes for the evaluator, or None and a note why it runs in this process."""
        if self.evaluator is None or not self.settings.reward_workers:
            return None
        found = reference_to(self.evaluator)
        if isinstance(found, str):
            self.notes.append(
                f"the evaluator {self.evaluator.name!r} runs in this process, where code that never returns cannot be ended for "
                f"certain: {found}"
            )
            return None
        return RewardPool(found, self.settings.reward_workers)

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

        # A flow that blocks the loop uses up everybody's time, so it is ended while the others have some left.
        with Watchdog(self.settings.episode_timeout_s / 2):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in tasks]

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        """One episode, tried again up to ``rollout.retries`` times if it fails. Never raises for a fault of flow or evaluator."""
        reasons: list[str] = []
        while True:
            episode = await self._attempt(request, len(reasons))
            if reasons:
                episode.metadata |= {"retries": len(reasons), "retry_reasons": reasons}
            if not episode.failed or len(reasons) >= self.settings.retries:
                return episode
            reasons.append((episode.error or "").strip().rpartition("\n")[2])

    async def _attempt(self, request: EpisodeRequest, attempt: int) -> Episode:
        # What a flow does to its task stays with this attempt.
        original, request = request.task, replace(request, task=_copy(request.task))
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
            ends = asyncio.get_running_loop().time() + self.settings.episode_timeout_s
            await _within(self.settings.episode_timeout_s, "rollout.episode_timeout_s", run(request, session, episode))
            if self.flow is not None:
                await self._evaluate(request.task, episode, ends)
            checked(episode)
            if not request.is_validation:
                check_tokens(episode, session, self.gateway.token_limits)
        except OutOfTime as error:
            episode.termination_reason, episode.error = TerminationReason.TIMEOUT, str(error)
        except RewardError as error:
            episode.termination_reason = TerminationReason.ERROR
            episode.error = str(error)[-TRACEBACK_CHARACTERS:]
        except Exception:
            episode.termination_reason = TerminationReason.ERROR
            episode.error = traceback.format_exc()[-TRACEBACK_CHARACTERS:]
        finally:
            self.gateway.close_session(session)
        if episode.failed:
            keep_sound(episode)
        episode.task, episode.session_id = original, session.uid
        return episode

    # Both of these fill `episode` as they go, so that a failed one still shows what it had.

    async def _run_flow(self, request: EpisodeRequest, session: Session, episode: Episode) -> None:
        try:
            given = await self.flow.arun(request.task, self.gateway.agent_config(session, request.task.metadata))
        except TerminationEvent as event:  # what was recorded until then is the episode
            given = Episode(trajectories=[Trajectory(name=self.flow.name)], termination_reason=event.reason)
        _take_over(episode, checked(given))
        enrich(episode, session)

    async def _evaluate(self, task: Task, episode: Episode, ends: float) -> None:
        """Reward `episode` within ``rollout.reward_timeout_s`` and what is left of the episode's own time (`ends`, of the loop's
        clock). Waiting for a process that is busy or starts does not count."""
        _flag_truncation(episode)
        given = list(episode.trajectories)
        limit, said, name = self.settings.reward_timeout_s, self.settings.reward_timeout_s, "rollout.reward_timeout_s"
        left = ends - asyncio.get_running_loop().time()
        if left < limit:
            limit, said, name = max(left, 0.01), self.settings.episode_timeout_s, "rollout.episode_timeout_s"
        if self._pool is None:
            output = await _within(limit, name, self.evaluator.aevaluate(task, episode), said)
        else:
            try:
                output, judged = await self._pool.evaluate(task, episode, limit)
            except RewardTimeout as error:
                where = f"; the evaluator was at\n{error}" if str(error) else ""
                raise OutOfTime(f"no reward within {said:g} s ({name}){where}") from error
            _take_over(episode, checked(judged))  # an evaluator may set rewards on the trajectories
        check_all_there(given, checked(episode))
        apply_evaluation(episode, output)

    async def _run_workflow(self, request: EpisodeRequest, session: Session, episode: Episode) -> None:
        assert self.workflow_class is not None
        workflow: Workflow = self.workflow_class(self.gateway.engine(session), **self.workflow_args)
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
            _take_over(episode, checked(as_episode(given, f"workflow {self.workflow_class.__name__}")))
        elif not workflow.committed:
            raise TypeError(f"workflow {self.workflow_class.__name__} returned nothing and committed no trajectory")
        checked(episode)
        enrich(episode, session)
        _flag_truncation(episode)
        apply_workflow_rewards(episode)
        if given is None:
            episode.is_correct = sum(trajectory.reward or 0.0 for trajectory in episode.trajectories) > 0

    def _sampling(self, is_validation: bool) -> dict[str, Any]:
        s = self.settings
        temperature = s.temperature
        if is_validation and s.val_temperature is not None:
            temperature = s.val_temperature
        return {"temperature": temperature, "top_p": s.top_p, "max_tokens": self.max_tokens}


async def _within(limit_s: float, name: str, work: Coroutine[Any, Any, T], said_s: float | None = None) -> T:
    """The result of `work`, or `OutOfTime` that names the limit (as `said_s`, where that is the whole of which `limit_s` is the rest).
    Work that does not let itself be cancelled is left behind, never waited for without end."""
    task = asyncio.ensure_future(_no_exit(work))
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody may be left to ask
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            raise OutOfTime(f"no result within {said_s or limit_s:g} s ({name})")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    try:
        return task.result()
    except (
        asyncio.CancelledError
    ) as error:  # not by us: a flow that cancels itself is an error of its own, not the end of the run
        raise RuntimeError("the flow was cancelled from inside (asyncio.CancelledError)") from error


async def _no_exit(work: Coroutine[Any, Any, T]) -> T:
    """What is no `Exception` (SystemExit, what test frameworks raise) would end the run of everybody; as an error it ends this episode."""
    try:
        return await work
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as error:
        raise RuntimeError(f"the flow or evaluator ended with SystemExit: {error.code}") from error
    except BaseException as error:
        raise RuntimeError(f"the flow or evaluator raised {type(error).__name__}, which is no Exception") from error


def _flag_truncation(episode: Episode) -> None:
    """An episode whose last call was cut at its most tokens did not end by itself, unless the flow says how it ended."""
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    if episode.termination_reason is None and steps and steps[-1].finish_reason == "length":
        episode.termination_reason = TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED


def _take_over(episode: Episode, given: Episode) -> None:
    """What the user's episode says, under the id and task that the request gave."""
    for name in ("trajectories", "termination_reason", "is_correct", "metrics", "artifacts", "metadata"):
        setattr(episode, name, getattr(given, name))


def _copy(task: Task) -> Task:
    try:
        return copy.deepcopy(task)
    except Exception:  # something in it cannot be copied
        return replace(task, metadata=dict(task.metadata))


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
    if others:
        await asyncio.wait(others, timeout=CANCEL_GRACE_S)
