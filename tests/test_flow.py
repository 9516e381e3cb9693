"""The decorators and the class form: what a user's function may return, and what becomes of it."""

from __future__ import annotations

import asyncio
import pkgutil
import threading
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import rllm
from rllm.flow import EvaluationError, apply_evaluation
from rllm.types import AgentConfig, Episode, EvalOutput, Signal, Step, Task, TerminationReason, Trajectory

TASK = Task(id="t")
CONFIG = AgentConfig(base_url="http://nowhere/v1", model="m")


def flow_that_returns(value: Any) -> Any:
    @rllm.rollout(name="solver")
    async def flow(task: Task, config: AgentConfig) -> Any:
        return value

    return flow


def verdict(value: Any) -> EvalOutput:
    @rllm.evaluator
    def judge(task: Task, episode: Episode) -> Any:
        return value

    return judge.evaluate(TASK, Episode())


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (None, ["solver"]),
        (Trajectory(), ["solver"]),
        (Trajectory(name="judge"), ["judge"]),
        ([Trajectory(), Trajectory(name="judge")], ["solver", "judge"]),
        (Episode(trajectories=[Trajectory()]), ["solver"]),
    ],
)
def test_a_flow_may_return_an_episode_a_trajectory_a_list_or_nothing(returned: Any, names: list[str]) -> None:
    episode = flow_that_returns(returned).run(TASK, CONFIG)
    assert [trajectory.name for trajectory in episode.trajectories] == names


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("text", "str"),
        (1.0, "float"),
        ([], "no trajectory"),
        ([Trajectory(), "x"], "a list with str"),
        (Episode(), "no trajectory"),
        (Episode(trajectories=[None]), "a list with NoneType"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_anything_else_is_an_error_that_names_the_flow_what_was_found_and_what_is_allowed(
    returned: Any, found: str
) -> None:
    with pytest.raises(TypeError, match=f"'solver' returned {found}; return an Episode, a Trajectory, a list"):
        flow_that_returns(returned).run(TASK, CONFIG)


def test_a_decorated_flow_keeps_the_name_of_its_function_and_can_still_be_called() -> None:
    @rllm.rollout
    def my_agent(task: Task, config: AgentConfig) -> str:
        """What it does."""
        return task.id

    assert (my_agent.name, my_agent.__doc__, my_agent(TASK, CONFIG)) == ("my_agent", "What it does.", "t")


def test_sync_flows_block_in_their_own_threads_not_in_the_event_loop() -> None:
    meeting = threading.Barrier(40, timeout=10)

    @rllm.rollout
    def waits(task: Task, config: AgentConfig) -> None:
        meeting.wait()

    async def many() -> None:
        await asyncio.gather(*(waits.arun(TASK, CONFIG) for _ in range(40)))

    asyncio.run(many())
    assert not meeting.broken


def test_an_error_in_a_sync_flow_reaches_the_caller() -> None:
    @rllm.rollout
    def broken(task: Task, config: AgentConfig) -> None:
        raise KeyError("nums")

    with pytest.raises(KeyError, match="nums"):
        broken.run(TASK, CONFIG)


def test_a_sync_flow_that_never_ends_does_not_keep_the_caller_after_its_deadline() -> None:
    forever = threading.Event()

    @rllm.rollout
    def stuck(task: Task, config: AgentConfig) -> None:
        forever.wait(60)

    async def limited() -> None:
        async with asyncio.timeout(0.1):
            await stuck.arun(TASK, CONFIG)

    started = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(limited())
    assert time.monotonic() - started < 5
    forever.set()


@pytest.mark.parametrize(
    ("value", "reward", "correct"),
    [
        (True, 1.0, True),
        (False, 0.0, False),
        (1, 1.0, True),
        (0.25, 0.25, True),
        (-1.5, -1.5, False),
        (0, 0.0, False),
        (np.float32(0.5), 0.5, True),
        (np.bool_(True), 1.0, True),
        (np.array([0.5]), 0.5, True),
        (torch.tensor(0.5), 0.5, True),
        (torch.tensor([[2.0]]), 2.0, True),
        ((0.5, False), 0.5, False),
        ((0, True), 0.0, True),
        ((np.float64(0.5), np.bool_(False)), 0.5, False),
        (EvalOutput(0.5), 0.5, False),
        (EvalOutput(np.float32(0.5), True), 0.5, True),  # pyright: ignore[reportArgumentType]
    ],
)
def test_an_evaluator_may_return_numbers_bools_pairs_and_eval_outputs(value: Any, reward: float, correct: bool) -> None:
    output = verdict(value)
    assert (output.reward, output.is_correct) == (reward, correct)
    assert type(output.reward) is float


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        None,
        float("nan"),
        float("inf"),
        10**400,
        [1.0],
        {"reward": 1.0},
        np.array([1.0, 2.0]),
        np.array("x"),
        torch.tensor([1.0, float("nan")]),
        torch.tensor(float("nan")),
        (1.0,),
        (1.0, True, "x"),
        (1.0, "yes"),
        Fraction(1, 2),
        EvalOutput(float("nan")),
        EvalOutput("1"),  # pyright: ignore[reportArgumentType]
        EvalOutput(1.0, signals=[Signal("solver_acc", float("nan"))]),
    ],
)
def test_what_is_no_reward_is_an_evaluation_error_that_names_evaluator_and_task(value: Any) -> None:
    with pytest.raises(EvaluationError, match="evaluator 'judge' for task 't'"):
        verdict(value)


def test_an_async_evaluator_works_like_a_sync_one() -> None:
    @rllm.evaluator(name="slow")
    async def judge(task: Task, episode: Episode) -> float:
        await asyncio.sleep(0)
        return 0.5

    assert (judge.name, judge.evaluate(TASK, Episode()).reward) == ("slow", 0.5)


def test_rewards_given_earlier_stay_and_the_others_become_the_evaluators() -> None:
    episode = Episode(trajectories=[Trajectory(reward=0.25), Trajectory(reward=0), Trajectory()])
    apply_evaluation(episode, EvalOutput(1.0, True, [Signal("solver_acc", 0.5)], {"note": "x"}))
    assert [trajectory.reward for trajectory in episode.trajectories] == [0.25, 0.0, 1.0]
    assert episode.metrics == {"solver_acc": 0.5} and episode.metadata == {"note": "x"} and episode.is_correct
    assert episode.termination_reason is TerminationReason.ENV_DONE


def test_a_termination_reason_that_the_flow_gave_is_kept() -> None:
    episode = Episode(trajectories=[Trajectory()], termination_reason=TerminationReason.MAX_TURNS_EXCEEDED)
    apply_evaluation(episode, EvalOutput(0.0))
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED


@pytest.mark.parametrize("reward", ["1", float("nan")])
def test_a_trajectory_reward_that_is_no_finite_number_is_an_error(reward: Any) -> None:
    with pytest.raises(EvaluationError, match="reward of trajectory 'solver'"):
        apply_evaluation(Episode(trajectories=[Trajectory(name="solver", reward=reward)]), EvalOutput(1.0))


def test_commit_keeps_a_copy_that_later_changes_do_not_reach() -> None:
    class Keeps(rllm.Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            trajectory = Trajectory(steps=[Step(reward=1.0)])
            self.commit("solver", trajectory=trajectory)
            trajectory.steps.append(Step())

    workflow = Keeps(rollout_engine=None)  # pyright: ignore[reportArgumentType]
    asyncio.run(workflow.run({}, "t:0"))
    assert [(t.name, len(t.steps)) for t in workflow.committed] == [("solver", 1)]


def test_no_module_of_the_package_hides_a_public_name_once_it_is_imported() -> None:
    modules = {module.name for module in pkgutil.iter_modules(rllm.__path__)}
    assert not modules & set(rllm.__all__)
