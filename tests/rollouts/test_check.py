"""Flows and evaluators that give what no step could be made of: their episode fails and says why, and no other one notices."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

import rllm
from rllm.algorithms.grouping import Accounting, group_by_role, usable_trajectories
from rllm.algorithms.metrics import episode_metrics, validation_metrics
from rllm.config.schema import Config
from rllm.gateway.server import Gateway
from rllm.rollouts.runner import EpisodeRequest, EpisodeRunner
from rllm.types import AgentConfig, Episode, Step, Task, TerminationReason, Trajectory

CLIENT = openai.AsyncOpenAI(base_url="http://unused", api_key="x", max_retries=0)


async def ask(config: AgentConfig, text: str) -> str:
    client = CLIENT.with_options(base_url=config.base_url)
    response = await client.chat.completions.create(model=config.model, messages=[{"role": "user", "content": text}])
    return response.id


def run(gateway: Gateway, make: Callable[[str], Any], judge: Callable[[Episode], Any] = lambda _: 1.0) -> list[Episode]:
    """Three episodes, of which `make` and `judge` have the second."""

    @rllm.rollout(name="solver")
    async def flow(task: Task, config: AgentConfig) -> Any:
        call = await ask(config, task.id)
        return make(call) if task.id == "t1" else Trajectory(steps=[Step(id=call)])

    @rllm.evaluator
    def evaluator(task: Task, episode: Episode) -> Any:
        return judge(episode) if task.id == "t1" else 1.0

    config = Config.model_validate({"rollout": {"reward_workers": 0, "retries": 1}})
    runner = EpisodeRunner(gateway, flow=flow, evaluator=evaluator, config=config)
    try:
        episodes = runner.run([EpisodeRequest(Task(id=f"t{i}"), f"t{i}:0") for i in range(3)])
    finally:
        runner.close()
    account = Accounting()
    groups = group_by_role(usable_trajectories(episodes, account))
    assert episode_metrics(episodes) and validation_metrics(episodes, [1]) and [e.to_dict() for e in episodes]
    account.trained = sum(len(group.trajectories) for group in groups)
    account.check()
    assert account.generated >= 3 and [e.failed for e in (episodes[0], episodes[2])] == [False, False]
    return episodes


class Odd(BaseException):
    """As test frameworks raise."""


def raises(error: BaseException) -> Any:
    raise error


OWN: Any = {"prompt_ids": [1], "response_ids": [2, 3], "logprobs": [-1.0, -1.0]}
FLOWS: list[tuple[Callable[[str], Any], str]] = [
    (lambda call: Episode(trajectories=[Trajectory()], metrics={"acc": "good"}), "metric 'acc' is 'good'"),  # type: ignore
    (lambda call: Episode(trajectories=[Trajectory()], metrics={"acc": None}), "metric 'acc' is None"),  # type: ignore
    (lambda call: Episode(trajectories=[Trajectory()], metrics={"acc": math.nan}), "metric 'acc' is nan"),
    (lambda call: Episode(trajectories=[Trajectory()], metrics={3: 1.0}), "a name in Episode.metrics is 3"),  # type: ignore
    (lambda call: Episode(trajectories=[Trajectory()], metrics=None), "Episode.metrics is None"),  # type: ignore
    (lambda call: Episode(trajectories=[Trajectory()], metadata=None), "Episode.metadata is None"),  # type: ignore
    (lambda call: Episode(trajectories=[Trajectory()], termination_reason="odd"), "Episode.termination_reason is 'odd'"),  # type: ignore
    (lambda call: Trajectory(name=None), "Trajectory.name is None"),  # type: ignore
    (lambda call: Trajectory(name=["a"]), "Trajectory.name is ['a']"),  # type: ignore
    (lambda call: Trajectory(uid=5), "Trajectory.uid is 5"),  # type: ignore
    (lambda call: Trajectory(steps=None), "steps is None"),  # type: ignore
    (lambda call: Trajectory(steps=["a"]), "steps is 'a'"),  # type: ignore
    (lambda call: [one := Trajectory(), one], "the same Trajectory object is in it twice"),
    (lambda call: Trajectory(steps=[Step(id=call, reward=math.nan)]), "Step.reward is nan"),
    (lambda call: Trajectory(steps=[Step(id=call, reward="1")]), "Step.reward is '1'"),  # type: ignore
    (lambda call: Trajectory(steps=[Step(id=[call])]), "Step.id is ["),  # type: ignore
    (lambda call: Trajectory(steps=[Step(prompt_ids=[1], response_ids=[2, 3])]), "2 sampled tokens but 0 log-probabilities"),
    (lambda call: Trajectory(steps=[Step(**OWN | {"logprobs": [-1.0, math.nan]})]), "a log-probability is nan"),
    (lambda call: Trajectory(steps=[Step(**OWN | {"response_ids": ["a", "b"]})]), "token ids must be whole numbers"),
    (lambda call: Trajectory(steps=[Step(**OWN | {"response_ids": [1, 10**6]})]), "token ids go from 0 to"),
    (lambda call: Trajectory(steps=[Step(**OWN | {"response_ids": [1, -1]})]), "token ids go from 0 to"),
    (lambda call: Trajectory(steps=[Step(**OWN | {"prompt_ids": [1] * 5000})]), "5002 tokens; the model takes 4096"),
    (lambda call: Trajectory(steps=[Step(**OWN, temperature=0)]), "temperature is 0.0"),
    (lambda call: Trajectory(steps=[Step(**OWN, adapter="mine")]), "adapter is 'mine'"),
    (lambda call: Trajectory(steps=[Step(id=call, **OWN)]), "are not those that were sampled"),
    (lambda call: raises(Odd("x")), "raised Odd, which is no Exception"),
    (lambda call: raises(BaseExceptionGroup("g", [SystemExit(1)])), "raised BaseExceptionGroup"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "says"), FLOWS, ids=[says for _, says in FLOWS])
def test_a_flow_that_gives_what_is_no_episode_fails_alone(
    gateway: Gateway, backend: Any, make: Callable[[str], Any], says: str
) -> None:
    bad = run(gateway, make)[1]
    assert bad.termination_reason is TerminationReason.ERROR and says in (bad.error or "")


JUDGES: list[tuple[Callable[[Episode], Any], str]] = [
    (lambda e: e.trajectories[0].steps[0].logprobs.clear(), "are not those that were sampled"),
    (lambda e: e.trajectories[0].steps[0].response_ids.__setitem__(0, 7), "are not those that were sampled"),
    (lambda e: setattr(e.trajectories[0].steps[0], "temperature", 0.1), "are not those that were sampled"),
    (lambda e: e.trajectories.clear(), "Episode.trajectories is []"),
    (lambda e: setattr(e, "trajectories", [Trajectory(name="new")]), "the evaluator removed 1 of 1 trajectories (solver)"),
    (lambda e: e.trajectories.append(Trajectory(steps=[*e.trajectories[0].steps])), "two steps claim the call"),
    (lambda e: setattr(e, "metrics", None), "Episode.metrics is None"),
    (lambda e: setattr(e, "metadata", "x"), "Episode.metadata is 'x'"),
    (lambda e: setattr(e.trajectories[0], "name", ["x"]), "Trajectory.name is ['x']"),
    (lambda e: setattr(e.trajectories[0], "steps", None), "steps is None"),
    (lambda e: raises(Odd("x")), "raised Odd, which is no Exception"),
]  # fmt: skip


@pytest.mark.parametrize(("judge", "says"), JUDGES, ids=[f"{i} {says}" for i, (_, says) in enumerate(JUDGES)])
def test_an_evaluator_that_breaks_its_episode_fails_it_alone(
    gateway: Gateway, backend: Any, judge: Callable[[Episode], Any], says: str
) -> None:
    bad = run(gateway, lambda call: Trajectory(steps=[Step(id=call)]), lambda episode: (judge(episode), 1.0)[1])[1]
    assert bad.termination_reason is TerminationReason.ERROR and says in (bad.error or "")


def test_numbers_of_other_libraries_and_reasons_by_value_are_taken(gateway: Gateway, backend: Any) -> None:
    def make(call: str) -> Episode:
        own: Any = {
            "prompt_ids": [np.int64(1)],
            "response_ids": list(np.array([2, 3])),
            "logprobs": [np.float32(-1)] * 2,
        }
        steps = [Step(id=call, reward=np.float32(0.5)), Step(**own)]  # pyright: ignore[reportArgumentType]
        reason: Any = "max_turns_exceeded"
        return Episode(
            trajectories=[Trajectory(steps=steps)], metrics={"acc": np.float64(1)}, termination_reason=reason
        )

    taken = run(gateway, make)[1]
    assert (taken.failed, taken.termination_reason) == (False, TerminationReason.MAX_TURNS_EXCEEDED)
    own = taken.trajectories[0].steps[1]
    assert [type(token) for token in (*own.prompt_ids, *own.response_ids)] == [int] * 3 and own.logprobs == [-1.0, -1.0]


def test_tokens_that_a_flow_asked_for_itself_are_those_of_the_record(gateway: Gateway, backend: Any) -> None:
    @rllm.rollout
    async def flow(task: Task, config: AgentConfig) -> Trajectory:
        client: Any = CLIENT.with_options(base_url=config.base_url)
        more = {"return_token_ids": True}
        response = await client.chat.completions.create(
            model=config.model, messages=[{"role": "user", "content": "a"}], extra_body=more
        )
        choice = response.choices[0]
        return Trajectory(
            steps=[Step(id=response.id, prompt_ids=choice.prompt_token_ids, response_ids=choice.token_ids)]
        )

    runner = EpisodeRunner(gateway, flow=flow, evaluator=lambda task, episode: 1.0, config=Config())
    [episode] = runner.run([EpisodeRequest(Task(id="t"), "t:0")])
    runner.close()
    [step] = episode.trajectories[0].steps
    assert not episode.failed and len(step.logprobs) == len(step.response_ids)


def test_what_a_flow_does_to_its_task_is_not_seen_by_the_other_attempts(gateway: Gateway, backend: Any) -> None:
    @rllm.rollout
    async def flow(task: Task, config: AgentConfig) -> None:
        numbers: list[int] = task.metadata["numbers"]
        await ask(config, str(numbers.pop()))
        task.metadata["used"] = len(numbers)

    @rllm.evaluator
    def evaluator(task: Task, episode: Episode) -> bool:
        return task.metadata.pop("used") == 1

    task = Task(id="t", metadata={"numbers": [1, 2]})
    runner = EpisodeRunner(gateway, flow=flow, evaluator=evaluator, config=Config())
    episodes = runner.run([EpisodeRequest(task, f"t:{k}") for k in range(4)])
    runner.close()
    assert [episode.is_correct for episode in episodes] == [True] * 4
    assert all(episode.task is task for episode in episodes) and task.metadata == {"numbers": [1, 2]}


def test_a_workflow_that_commits_what_is_no_trajectory_fails_alone(gateway: Gateway, backend: Any) -> None:
    class Broken(rllm.Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            output = await self.rollout_engine.get_model_response([{"role": "user", "content": "a"}])
            step = Step.from_model_output(output)
            if uid == "t:1":
                step.response_ids.pop()
            self.commit(trajectory=Trajectory(steps=[step], name="x" if uid != "t:2" else None))  # pyright: ignore[reportArgumentType]
            await asyncio.sleep(0)

    runner = EpisodeRunner(gateway, workflow_class=Broken, config=Config())
    episodes = runner.run([EpisodeRequest(Task(id="t"), f"t:{k}") for k in range(3)])
    runner.close()
    assert [episode.failed for episode in episodes] == [False, True, True]
    assert "are not those that were sampled" in (episodes[1].error or "")
    assert "Trajectory.name is None" in (episodes[2].error or "")
