"""Running episodes over a live gateway: nothing swapped, nothing lost, nothing waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

import rllm
from rllm.config.schema import Config
from rllm.gateway.server import Gateway
from rllm.rollouts.runner import EpisodeRequest, EpisodeRunner
from rllm.types import AgentConfig, Episode, Step, Task, TerminationEvent, TerminationReason, Trajectory

SHARED = openai.AsyncOpenAI(base_url="http://unused", api_key="x", max_retries=0)


@rllm.evaluator
def always_one(task: Task, episode: Episode) -> float:
    return 1.0


async def ask(config: AgentConfig, text: str, trajectory: str | None = None) -> Any:
    client = SHARED.with_options(base_url=config.url_for(trajectory) if trajectory else config.base_url)
    return await client.chat.completions.create(model=config.model, messages=[{"role": "user", "content": text}])


@rllm.rollout(name="solver")
async def one_call(task: Task, config: AgentConfig) -> None:
    await ask(config, task.id)


Run = Callable[..., list[Episode]]


@pytest.fixture
def run(gateway: Gateway, backend: Any) -> Run:
    def run(
        flow: Any = None,
        *,
        evaluator: Any = always_one,
        workflow_class: Any = None,
        workflow_args: Any = None,
        tasks: int = 1,
        is_validation: bool = False,
        on_episode: Any = None,
        **settings: Any,
    ) -> list[Episode]:
        config = Config.model_validate(
            {"rollout": {"temperature": 0.7, "val_temperature": 0.2, "reward_workers": 0} | settings}
        )
        runner = EpisodeRunner(
            gateway,
            flow=flow,
            evaluator=evaluator,
            workflow_class=workflow_class,
            workflow_args=workflow_args,
            config=config,
        )
        requests = [EpisodeRequest(Task(id=f"t{i}"), f"t{i}:0", i, is_validation) for i in range(tasks)]
        try:
            return runner.run(requests, on_episode)
        finally:
            runner.close()

    return run


def prompt_text(backend: Any, step: Step) -> str:
    return backend.tokenizer.decode(step.prompt_ids)


def test_episodes_come_back_in_the_order_asked_for_whatever_order_they_ended_in(run: Run, backend: Any) -> None:
    backend.delay = lambda text: 0.15 if "t0" in text else 0.0
    ended: list[str] = []
    episodes = run(one_call, tasks=4, on_episode=lambda episode: ended.append(episode.id))
    assert [episode.id for episode in episodes] == ["t0:0", "t1:0", "t2:0", "t3:0"]
    assert ended[-1] == "t0:0" and sorted(ended) == sorted(episode.id for episode in episodes)
    for episode in episodes:
        [trajectory] = episode.trajectories
        [step] = trajectory.steps
        assert f"user\n{episode.task.id}<|im_end|>" in prompt_text(backend, step)
        assert (trajectory.name, trajectory.reward, step.temperature) == ("solver", 1.0, 0.7)
        assert (episode.is_correct, episode.termination_reason) == (True, TerminationReason.ENV_DONE)


@pytest.mark.parametrize("named_by", ["response id", "url"])
def test_parallel_solvers_with_different_delays_are_never_swapped(run: Run, backend: Any, named_by: str) -> None:
    backend.delay = lambda text: (sum(text.encode()) * 7 % 13) / 100

    @rllm.rollout
    async def solvers(task: Task, config: AgentConfig) -> list[Trajectory]:
        async def solve(i: int) -> Trajectory:
            trajectory = Trajectory(name="solver", input=f"{task.id} solver {i}.")
            response = await ask(config, trajectory.input, trajectory.uid if named_by == "url" else None)
            trajectory.output = response.choices[0].message.content
            if named_by == "response id":
                trajectory.steps.append(Step(id=response.id))
            return trajectory

        return list(await asyncio.gather(*(solve(i) for i in range(6))))

    episodes = run(solvers, tasks=8)
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    assert len(trajectories) == 48 and not any(episode.failed for episode in episodes)
    for trajectory in trajectories:
        [step] = trajectory.steps
        assert trajectory.input in prompt_text(backend, step)
        assert (
            trajectory.output
            == step.model_response
            == backend.tokenizer.decode(step.response_ids, skip_special_tokens=True)
        )


def test_a_blocking_client_inside_an_async_flow_does_not_deadlock(run: Run) -> None:
    @rllm.rollout
    async def blocks(task: Task, config: AgentConfig) -> None:
        body = {"messages": [{"role": "user", "content": task.id}]}
        httpx.post(f"{config.base_url}/chat/completions", json=body, timeout=10).raise_for_status()

    assert [len(episode.trajectories[0].steps) for episode in run(blocks, tasks=3)] == [1, 1, 1]


def test_a_sync_flow_with_the_sync_client_works(run: Run) -> None:
    @rllm.rollout
    def plain(task: Task, config: AgentConfig) -> None:
        with openai.OpenAI(base_url=config.base_url, api_key="x") as client:
            client.chat.completions.create(model=config.model, messages=[{"role": "user", "content": task.id}])

    assert [len(episode.trajectories[0].steps) for episode in run(plain, tasks=3)] == [1, 1, 1]


def test_undecorated_functions_work_too(run: Run) -> None:
    async def agent(task: Task, config: AgentConfig) -> None:
        await ask(config, task.id)

    [episode] = run(agent, evaluator=lambda task, episode: 0.5)
    assert (episode.trajectories[0].name, episode.trajectories[0].reward) == ("agent", 0.5)


def test_a_client_kept_between_runs_stays_usable(run: Run) -> None:
    assert not any(run(one_call)[0].failed for _ in range(3))


def test_a_flow_that_raises_is_a_failed_episode_with_its_traceback_once_and_the_others_go_on(run: Run) -> None:
    @rllm.rollout
    async def sometimes(task: Task, config: AgentConfig) -> None:
        await ask(config, task.id)
        if task.id == "t1":
            raise ValueError("no numbers")

    good, bad, other = run(sometimes, tasks=3)
    assert not good.failed and not other.failed
    assert bad.termination_reason is TerminationReason.ERROR and bad.error
    assert bad.error.count("ValueError: no numbers") == 1 and "in sometimes" in bad.error


def test_a_flow_that_returns_nothing_and_calls_nothing_is_a_failed_episode_that_says_so(run: Run) -> None:
    @rllm.rollout
    async def idle(task: Task, config: AgentConfig) -> None:
        pass

    [episode] = run(idle)
    assert episode.failed and "without one recorded model call" in (episode.error or "")


def test_a_flow_that_returns_something_else_is_a_failed_episode_that_names_it(run: Run) -> None:
    @rllm.rollout(name="talker")
    async def talker(task: Task, config: AgentConfig) -> str:
        return "42"

    [episode] = run(talker)
    assert episode.failed and "flow 'talker' returned str" in (episode.error or "")


NO_REWARDS = [
    float("nan"),
    float("inf"),
    -np.inf,
    "1.0",
    None,
    [1.0, 0.0],
    [],
    np.zeros(2),
    torch.zeros(2),
    {"reward": 1.0},
    1j,
]


@pytest.mark.parametrize("value", NO_REWARDS, ids=str)
def test_an_evaluator_that_gives_no_reward_fails_the_episode_and_never_counts_as_0(run: Run, value: Any) -> None:
    @rllm.evaluator
    def judge(task: Task, episode: Episode) -> Any:
        return value

    [episode] = run(one_call, evaluator=judge)
    assert episode.failed and "EvaluationError: evaluator 'judge' for task 't0'" in (episode.error or "")
    [trajectory] = episode.trajectories
    assert trajectory.reward is None and trajectory.steps[0].response_ids, "what was sampled is still shown"


@pytest.mark.parametrize(
    ("value", "reward"),
    [(True, 1.0), (np.float32(0.5), 0.5), (np.bool_(False), 0.0), (torch.tensor(0.25), 0.25), (np.array([2]), 2.0)],
)
def test_bools_and_numpy_numbers_are_rewards(run: Run, value: Any, reward: float) -> None:
    [episode] = run(one_call, evaluator=lambda task, episode: value)
    assert episode.trajectories[0].reward == reward


@pytest.mark.parametrize("kind", ["async", "sync", "evaluator"])
def test_an_episode_that_does_not_end_is_timed_out_and_the_others_are_done(run: Run, kind: str) -> None:
    forever = threading.Event()

    async def hangs(task: Task, config: AgentConfig) -> None:
        await ask(config, task.id)
        if task.id == "t0":
            await asyncio.sleep(3600)

    def hangs_sync(task: Task, config: AgentConfig) -> None:
        httpx.post(f"{config.base_url}/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        if task.id == "t0":
            forever.wait(3600)

    def judge(task: Task, episode: Episode) -> float:
        if task.id == "t0":
            forever.wait(3600)
        return 1.0

    flow = {"async": hangs, "sync": hangs_sync, "evaluator": one_call}[kind]
    started = time.monotonic()
    episodes = run(flow, evaluator=judge if kind == "evaluator" else always_one, tasks=4, episode_timeout_s=1.0)
    forever.set()
    assert time.monotonic() - started < 5
    assert [episode.failed for episode in episodes] == [True, False, False, False]
    assert episodes[0].termination_reason is TerminationReason.TIMEOUT
    assert episodes[0].error == "no result within 1 s (rollout.episode_timeout_s)"


def test_a_tight_loop_in_an_async_flow_is_told_ended_and_the_others_go_on(run: Run, caplog: Any) -> None:
    @rllm.rollout
    async def computes(task: Task, config: AgentConfig) -> None:
        await ask(config, task.id)
        while task.id == "t0":
            pass

    started = time.monotonic()
    episodes = run(computes, tasks=4, episode_timeout_s=4.0)
    assert time.monotonic() - started < 10
    assert [episode.failed for episode in episodes] == [True, False, False, False]
    assert "BlockedLoop" in (episodes[0].error or "") and "in computes" in (episodes[0].error or "")
    assert "has blocked the event loop" in caplog.text and "in computes" in caplog.text


def test_a_tight_loop_in_a_sync_flow_ends_with_its_thread(run: Run) -> None:
    @rllm.rollout
    def spins(task: Task, config: AgentConfig) -> None:
        while True:
            pass

    [episode] = run(spins, episode_timeout_s=0.5)
    assert episode.termination_reason is TerminationReason.TIMEOUT
    deadline = time.monotonic() + 5
    while any(thread.name == "rllm-spins" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "its thread still runs"
        time.sleep(0.02)


def test_a_sync_flow_in_one_long_call_is_left_behind_and_holds_up_nobody(run: Run) -> None:
    """What remains: a daemon thread until its call returns."""
    release = threading.Event()

    @rllm.rollout
    def sleeps(task: Task, config: AgentConfig) -> None:
        release.wait(60)

    started = time.monotonic()
    assert [e.termination_reason for e in run(sleeps, tasks=3, episode_timeout_s=0.5)] == [
        TerminationReason.TIMEOUT
    ] * 3
    assert time.monotonic() - started < 5
    release.set()


def test_a_termination_event_in_a_flow_ends_it_with_that_reason_and_keeps_what_was_recorded(run: Run) -> None:
    @rllm.rollout(name="solver")
    async def stops(task: Task, config: AgentConfig) -> None:
        await ask(config, task.id)
        raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)

    [episode] = run(stops)
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED and not episode.failed
    [trajectory] = episode.trajectories
    assert (trajectory.name, trajectory.reward, len(trajectory.steps)) == ("solver", 1.0, 1)


def test_an_episode_cut_at_its_most_tokens_is_flagged_unless_the_flow_says_how_it_ended(run: Run) -> None:
    @rllm.rollout
    async def talks(task: Task, config: AgentConfig) -> Episode:
        client = SHARED.with_options(base_url=config.base_url)
        messages: Any = [{"role": "user", "content": task.id}]
        response = await client.chat.completions.create(model=config.model, messages=messages, max_tokens=3)
        said = TerminationReason.ENV_DONE if task.id == "t1" else None
        return Episode(trajectories=[Trajectory(steps=[Step(id=response.id)])], termination_reason=said)

    seen: list[Any] = []
    flagged, said = run(talks, evaluator=lambda task, episode: seen.append(episode.termination_reason) or 1.0, tasks=2)
    assert set(seen) == {TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED, TerminationReason.ENV_DONE}, (
        "the evaluator is told"
    )
    assert len(flagged.trajectories[0].steps[0].response_ids) == 3
    assert flagged.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED and not flagged.failed
    assert said.termination_reason is TerminationReason.ENV_DONE


def test_a_timeout_ends_the_sampling_it_waited_for(run: Run, backend: Any) -> None:
    backend.delay = lambda _: 3600.0
    [episode] = run(one_call, episode_timeout_s=0.3)
    assert episode.termination_reason is TerminationReason.TIMEOUT
    deadline = time.monotonic() + 5
    while not backend.cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backend.cancelled == 1


def test_a_timeout_error_of_the_flows_own_is_an_error_and_not_the_deadline(run: Run) -> None:
    @rllm.rollout
    async def impatient(task: Task, config: AgentConfig) -> None:
        await asyncio.wait_for(asyncio.sleep(60), 0.01)

    [episode] = run(impatient)
    assert episode.termination_reason is TerminationReason.ERROR and "in impatient" in (episode.error or "")


def test_a_failed_episode_is_tried_again_in_a_fresh_session(run: Run) -> None:
    sessions: list[str] = []

    @rllm.rollout
    async def second_time_lucky(task: Task, config: AgentConfig) -> None:
        sessions.append(config.session_uid)
        await ask(config, task.id)
        if len(sessions) == 1:
            raise ConnectionError

    [episode] = run(second_time_lucky, retries=2)
    assert not episode.failed and len(set(sessions)) == 2 and episode.metadata["retries"] == 1
    assert len(episode.trajectories[0].steps) == 1


def test_no_more_episodes_run_at_once_than_allowed(run: Run) -> None:
    now, most = 0, 0

    @rllm.rollout
    async def counted(task: Task, config: AgentConfig) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await ask(config, task.id)
        now -= 1

    run(counted, tasks=12, max_concurrency=3)
    assert most == 3


def test_validation_samples_with_its_own_temperature_and_tells_the_flow(run: Run, backend: Any) -> None:
    told: list[AgentConfig] = []

    @rllm.rollout
    async def listens(task: Task, config: AgentConfig) -> None:
        told.append(config)
        await ask(config, task.id)

    run(listens, is_validation=True)
    assert backend.asked[0][1].temperature == told[0].sampling_params["temperature"] == 0.2
    assert told[0].is_validation


def test_the_same_seed_samples_the_same_and_another_does_not(run: Run, backend: Any) -> None:
    def seeds() -> list[int | None]:
        backend.asked.clear()
        run(one_call, tasks=4)
        return sorted(asked[1].seed for asked in backend.asked)

    first = seeds()
    assert first == seeds() and len(set(first)) == 4


def test_ctrl_c_ends_every_episode_and_is_passed_on(run: Run, backend: Any) -> None:
    backend.delay = lambda _: 3600.0
    started = time.monotonic()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run(one_call, tasks=4)
    assert time.monotonic() - started < 5
    backend.delay = lambda _: 0.0
    assert not run(one_call)[0].failed, "the runner works on, e.g. to validate before it saves"


class Turns(rllm.Workflow):
    """Two turns; a task may make it end early in several ways."""

    def __init__(self, rollout_engine: Any, end: str = "", **kwargs: Any):
        super().__init__(rollout_engine, **kwargs)
        self.end, self.seen = end, []

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
        self.seen.append(uid)
        assert self.seen == [uid], "a fresh instance runs each episode"
        messages = [{"role": "user", "content": task["id"]}]
        trajectory = Trajectory(name="solver")
        for _ in range(2):
            output = await self.rollout_engine.get_model_response(messages)
            step = Step.from_model_output(output, messages)
            step.reward = 0.5
            trajectory.steps.append(step)
            messages = [*step.chat_completions, {"role": "user", "content": "again"}]
            if self.end == "event before commit":
                raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)
            self.committed.clear()
            self.commit(trajectory=trajectory)
            if self.end == "event":
                raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)
            if self.end == "error":
                raise ValueError("broke")
            if self.end == "hang":
                await asyncio.sleep(3600)
        if self.end == "none":
            return None
        if self.end == "nothing":
            self.committed.clear()
            return None
        return "text" if self.end == "text" else Episode(trajectories=[trajectory], metrics={"solver_acc": 0.25})


def test_a_workflow_runs_in_process_with_the_same_record(run: Run, backend: Any) -> None:
    first, second = run(workflow_class=Turns, tasks=2)
    for episode in (first, second):
        one, two = episode.trajectories[0].steps
        assert two.prompt_ids[: len(one.prompt_ids + one.response_ids)] == one.prompt_ids + one.response_ids
        assert episode.trajectories[0].reward == 1.0 and episode.metrics == {"solver_acc": 0.25}
        assert not episode.is_correct, "the workflow's own word counts"
    assert (first.id, second.id) == ("t0:0", "t1:0")


def test_what_a_workflow_committed_is_the_episode_if_it_returns_nothing(run: Run) -> None:
    [episode] = run(workflow_class=Turns, workflow_args={"end": "none"})
    assert [len(trajectory.steps) for trajectory in episode.trajectories] == [2]
    assert episode.is_correct and episode.metrics == {"solver_acc": 1.0}


def test_a_termination_event_keeps_what_was_committed(run: Run) -> None:
    [episode] = run(workflow_class=Turns, workflow_args={"end": "event"})
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED and not episode.failed
    assert episode.trajectories[0].reward == 0.5 and episode.trajectories[0].steps[0].response_ids


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("event before commit", "max_turns_exceeded) before it committed a trajectory"),
        ("nothing", "workflow Turns returned nothing and committed no trajectory"),
        ("text", "workflow Turns returned str"),
        ("error", "ValueError: broke"),
    ],
)
def test_a_workflow_that_ends_badly_is_a_failed_episode_that_says_why(run: Run, end: str, says: str) -> None:
    [episode] = run(workflow_class=Turns, workflow_args={"end": end})
    assert episode.failed and says in (episode.error or "")
    assert len(episode.trajectories) == (1 if end in ("error", "text") else 0), "what was committed is still shown"


def test_a_workflows_own_timeout_counts_too(run: Run) -> None:
    [episode] = run(workflow_class=Turns, workflow_args={"end": "hang", "timeout": 0.2})
    assert episode.termination_reason is TerminationReason.TIMEOUT
    assert episode.error == "no result within 0.2 s (the workflow's timeout)"
