"""How a user's code becomes something that runs: the `rollout` and `evaluator` decorators and the `Workflow` class.

Knows the user's words only; where the model is comes in through `AgentConfig` or the rollout engine.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import copy
import ctypes
import inspect
import math
import reprlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol

from rllm.types import (
    DEFAULT_TRAJECTORY_NAME,
    AgentConfig,
    Episode,
    EvalOutput,
    Message,
    ModelOutput,
    Task,
    TerminationReason,
    Trajectory,
)


class EvaluationError(Exception):
    """An evaluator gave something that is no reward. The episode then counts as failed, never as a reward of 0."""


class Abandoned(BaseException):
    """Raised inside a thread whose caller stopped waiting (a deadline, Ctrl-C). No `Exception`, so that user code lets it through."""


async def in_thread(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn` in a daemon thread of its own: many may block at once, and one that never returns cannot hold up the end of the process.

    When the caller is cancelled, `Abandoned` is raised in the thread, so Python code ends at its next line (CPython). A thread inside
    one long call (a sleep, a socket, a regex) ends when that call does: Python has no way to end it sooner.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        elif isinstance(error, (StopIteration, asyncio.CancelledError, KeyboardInterrupt)):
            # A future cannot hold the first, and the others would end more than this call.
            done.set_exception(RuntimeError(f"{fn!r} raised {type(error).__name__}"))
        else:
            done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(fn, *args, **kwargs)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop ended first: nobody waits
            loop.call_soon_threadsafe(deliver, result, error)

    thread = threading.Thread(target=work, name=f"rllm-{getattr(fn, '__name__', 'call')}", daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        _abandon(thread)
        raise


def _abandon(thread: threading.Thread) -> None:
    if thread.is_alive() and thread.ident is not None and sys.implementation.name == "cpython":
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))


async def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await an async function; run a sync one in a thread, so that it may block."""
    if inspect.iscoroutinefunction(fn):
        return await fn(*args, **kwargs)
    result = await in_thread(fn, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def as_episode(result: Any, where: str) -> Episode:
    """An Episode, Trajectory or list of Trajectory as an Episode; anything else is a TypeError that names it."""
    trajectories = result.trajectories if isinstance(result, Episode) else result
    if isinstance(trajectories, Trajectory):
        trajectories = [trajectories]
    if not isinstance(trajectories, list):
        found = type(trajectories).__name__
    elif not trajectories:
        found = "no trajectory"
    else:
        wrong = [type(item).__name__ for item in trajectories if not isinstance(item, Trajectory)]
        found = f"a list with {wrong[0]}" if wrong else ""
    if found:
        raise TypeError(
            f"{where} returned {found}; return an Episode, a Trajectory, a list of at least one Trajectory, or nothing"
        )
    return result if isinstance(result, Episode) else Episode(trajectories=list(trajectories))


class RolloutFlow:
    """A decorated flow: ``await flow.arun(task, config)`` gives an `Episode`; ``flow.run`` is the same for sync code."""

    def __init__(self, fn: Callable[..., Any], name: str):
        self.fn, self.name = fn, name
        self.__doc__, self.__name__ = fn.__doc__, getattr(fn, "__name__", name)

    def __call__(self, task: Task, config: AgentConfig) -> Any:
        return self.fn(task, config)

    def run(self, task: Task, config: AgentConfig) -> Episode:
        return asyncio.run(self.arun(task, config))

    async def arun(self, task: Task, config: AgentConfig) -> Episode:
        """Run once. The flow may return an Episode, a Trajectory, a list of them, or nothing (steps then come from the record)."""
        result = await call(self.fn, task, config)
        episode = as_episode(Trajectory() if result is None else result, f"flow {self.name!r}")
        for trajectory in episode.trajectories:
            if trajectory.name == DEFAULT_TRAJECTORY_NAME:
                trajectory.name = self.name
        return episode


def rollout(fn: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Mark ``fn(task, config)``, sync or async, as a flow. `name` (default: the function's) names trajectories that have none."""

    def wrap(function: Callable[..., Any]) -> RolloutFlow:
        return RolloutFlow(function, name or function.__name__)

    return wrap if fn is None else wrap(fn)


class Evaluator:
    """A decorated evaluator: ``await evaluator.aevaluate(task, episode)`` gives an `EvalOutput`."""

    def __init__(self, fn: Callable[..., Any], name: str):
        self.fn, self.name = fn, name
        self.__doc__, self.__name__ = fn.__doc__, getattr(fn, "__name__", name)

    def __call__(self, task: Task, episode: Episode) -> Any:
        return self.fn(task, episode)

    def evaluate(self, task: Task, episode: Episode) -> EvalOutput:
        return asyncio.run(self.aevaluate(task, episode))

    async def aevaluate(self, task: Task, episode: Episode) -> EvalOutput:
        """Run once. Allowed results: EvalOutput, a number or bool (right when above 0), or ``(reward, is_correct)``."""
        result = await call(self.fn, task, episode)
        where = f"evaluator {self.name!r} for task {task.id!r}"
        if isinstance(result, EvalOutput):
            output = result
            output.reward = as_reward(output.reward, where)
        elif isinstance(result, tuple):
            if len(result) != 2:
                raise EvaluationError(f"{where}: found {result!r}; a tuple must be (reward, is_correct)")
            output = EvalOutput(as_reward(result[0], where), bool(as_reward(result[1], f"{where}, is_correct")))
        else:
            reward = as_reward(result, where)
            output = EvalOutput(reward, reward > 0)
        for signal in output.signals:
            signal.value = as_reward(signal.value, f"{where}, signal {signal.name!r}")
        return output


def evaluator(fn: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Mark ``fn(task, episode)``, sync or async, as the evaluator."""

    def wrap(function: Callable[..., Any]) -> Evaluator:
        return Evaluator(function, name or function.__name__)

    return wrap if fn is None else wrap(fn)


def as_reward(value: Any, where: str) -> float:
    """`value` as a finite float: numbers, bools, and one-element numpy or torch values are taken, all else is an `EvaluationError`."""
    number = value
    if not isinstance(value, (bool, int, float)) and callable(getattr(value, "item", None)):
        try:
            number = value.item()
        except (ValueError, RuntimeError) as error:
            raise EvaluationError(f"{where}: found {type(value).__name__} of several elements; give one") from error
    if not isinstance(number, (bool, int, float)):
        shown = reprlib.repr(value)
        raise EvaluationError(
            f"{where}: found {shown} ({type(value).__name__}); allowed are a finite number, a bool, "
            "(reward, is_correct) or EvalOutput"
        )
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise EvaluationError(f"{where}: found {reward}; a reward must be finite (raise an error if there is none)")
    return reward


def apply_evaluation(episode: Episode, output: EvalOutput) -> None:
    """Take over an evaluation: rewards given earlier stay, the others become `output.reward`; signals become metrics."""
    for trajectory in episode.trajectories:
        if trajectory.reward is None:
            trajectory.reward = output.reward
        trajectory.reward = as_reward(trajectory.reward, f"reward of trajectory {trajectory.name!r} of {episode.id}")
    episode.is_correct = bool(output.is_correct)
    episode.metrics |= {signal.name: signal.value for signal in output.signals}
    episode.metadata |= output.metadata
    episode.termination_reason = episode.termination_reason or TerminationReason.ENV_DONE


class RolloutEngine(Protocol):
    """What a workflow calls the model through."""

    async def get_model_response(self, messages: list[Message], **sampling: Any) -> ModelOutput: ...


class Workflow(abc.ABC):
    """The class form of a flow. One fresh instance runs one episode, so nothing leaks from one task to the next.

    Rewards are set on the trajectories (or on their steps: then their sum counts). `commit` keeps a trajectory even if `run` ends
    early by an exception.
    """

    def __init__(
        self, rollout_engine: RolloutEngine, executor: Executor | None = None, timeout: float = 1e6, **kwargs: Any
    ):
        """`timeout` in seconds ends an episode like ``rollout.episode_timeout_s`` does; the earlier of the two counts."""
        self.rollout_engine, self.executor, self.timeout = rollout_engine, executor, timeout
        self.options = kwargs
        self.committed: list[Trajectory] = []
        self.task: Any = None
        self.uid = ""

    def reset(self, task: dict[str, Any], uid: str) -> None:
        """Called before `run`; override to prepare agents and environments, and call super."""
        self.task, self.uid, self.committed = task, uid, []

    @abc.abstractmethod
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        """One attempt at `task`. None: the committed trajectories are the episode."""

    def commit(self, name: str | None = None, trajectory: Trajectory | None = None) -> None:
        """Keep a copy of `trajectory` as it is now."""
        if trajectory is None:
            raise ValueError("commit needs trajectory=")
        kept = copy.deepcopy(trajectory)
        kept.name = name or kept.name
        self.committed.append(kept)

    async def run_in_executor(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run blocking code in the executor (by default in a thread of its own)."""
        if self.executor is None:
            return await in_thread(fn, *args)
        return await asyncio.get_running_loop().run_in_executor(self.executor, fn, *args)


def apply_workflow_rewards(episode: Episode) -> None:
    """Trajectories without a reward get the sum of their steps' rewards; metrics default to the mean reward per role."""
    for trajectory in episode.trajectories:
        if trajectory.reward is None:
            trajectory.reward = sum(step.reward for step in trajectory.steps)
        trajectory.reward = as_reward(trajectory.reward, f"reward of trajectory {trajectory.name!r} of {episode.id}")
    if not episode.metrics:
        roles = dict.fromkeys(t.name for t in episode.trajectories)
        for role in roles:
            rewards = [float(t.reward or 0.0) for t in episode.trajectories if t.name == role]
            episode.metrics[f"{role}_acc"] = sum(rewards) / len(rewards)
    episode.termination_reason = episode.termination_reason or TerminationReason.ENV_DONE
