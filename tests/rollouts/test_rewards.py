"""Evaluators in processes of their own: ended within their limit, replaced, and gone when the run is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rllm
from rllm.cli.target import load_target
from rllm.config.schema import Config
from rllm.gateway.server import Gateway
from rllm.rollouts.rewards import RewardError, RewardPool, RewardTimeout, reference_to
from rllm.rollouts.runner import EpisodeRequest, EpisodeRunner
from rllm.types import Episode, Step, Task, TerminationReason, Trajectory

JUDGE = """
import os, re, sys, time
import rllm
from dataclasses import dataclass

@dataclass
class Answer:
    text: str

@rllm.rollout(name="solver")
async def solve(task, config):
    from openai import AsyncOpenAI
    async with AsyncOpenAI(base_url=config.base_url, api_key="x", max_retries=0) as client:
        response = await client.chat.completions.create(model=config.model, messages=[{"role": "user", "content": task.id}])
    return rllm.Trajectory(output=Answer(task.id), steps=[rllm.Step(id=response.id)])

@rllm.evaluator
def judge(task, episode):
    what = task.metadata["do"]
    if what == "loop":
        while True:
            pass
    if what == "regex":
        re.fullmatch(r"(a+)+b", "a" * 60)
    if what == "sleep":
        time.sleep(3600)
    if what == "raise":
        raise ValueError("no numbers")
    if what == "die":
        os._exit(7)
    if what == "exit":
        sys.exit(3)
    if what == "print":
        print("x" * 100_000)
        os.write(1, b"y" * 1000)
    if what == "none":
        return None
    if what.startswith("fork") and os.fork() == 0 and what != "fork and return":
        time.sleep(600)
    if what.startswith("raw fork"):  # no hook of Python's hears of it
        import ctypes
        libc = ctypes.CDLL(None)
        if libc.fork() == 0:
            libc.setsid()
            libc.sleep(20)
            os._exit(0)
    if what.endswith("and loop"):
        while True:
            pass
    if what.endswith("and die"):
        os._exit(7)
    for trajectory in episode.trajectories:
        trajectory.reward = 0.25
        trajectory.metadata["pid"] = os.getpid()
    return rllm.EvalOutput(reward=1.0, is_correct=True, signals=[rllm.Signal("acc", 0.5)])
"""
# The module's name must not be one that another test's file has.
NAMES = iter(f"judge_module_{i}" for i in range(1000))


@pytest.fixture
def judge(tmp_path: Path) -> Any:
    file = tmp_path / f"{next(NAMES)}.py"
    file.write_text(JUDGE)
    return load_target(str(file))


@pytest.fixture
def pool(judge: Any) -> Iterator[RewardPool]:
    reference = reference_to(judge.evaluator)
    assert not isinstance(reference, str)
    pool = RewardPool(reference, workers=1)
    yield pool
    pool.close()


def episode_of(task: Task) -> Episode:
    return Episode(id=f"{task.id}:0", task=task, trajectories=[Trajectory(name="solver", steps=[Step()])])


def evaluate(pool: RewardPool, what: str, limit_s: float = 20.0) -> Any:
    task = Task(id=what, metadata={"do": what})
    return asyncio.run(pool.evaluate(task, episode_of(task), limit_s))


def children() -> set[int]:
    """Processes that this one started and that still run (Linux)."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = folder.joinpath("stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(status[1]) == os.getpid() and status[0] != "Z":
            found.add(int(folder.name))
    return found


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")


def test_what_an_evaluator_gives_and_sets_comes_back_from_its_process(pool: RewardPool) -> None:
    output, episode = evaluate(pool, "fine")
    assert (output.reward, output.is_correct, output.signals[0].value) == (1.0, True, 0.5)
    assert episode.trajectories[0].reward == 0.25
    assert episode.trajectories[0].metadata["pid"] != os.getpid()


def test_the_process_stays_warm_from_one_call_to_the_next(pool: RewardPool) -> None:
    pids = {evaluate(pool, "fine")[1].trajectories[0].metadata["pid"] for _ in range(3)}
    started = time.monotonic()
    evaluate(pool, "fine")
    assert len(pids) == 1 and time.monotonic() - started < 0.5


@pytest.mark.parametrize("what", ["loop", "regex", "sleep"])
def test_an_evaluator_that_never_returns_is_ended_within_its_limit_and_its_process_replaced(
    pool: RewardPool, what: str
) -> None:
    first = evaluate(pool, "fine")[1].trajectories[0].metadata["pid"]
    started = time.monotonic()
    with pytest.raises(RewardTimeout, match="in judge"):
        evaluate(pool, what, limit_s=0.5)
    assert time.monotonic() - started < 3
    assert evaluate(pool, "fine")[1].trajectories[0].metadata["pid"] != first


def test_a_raising_dying_or_printing_evaluator_is_told_apart(pool: RewardPool) -> None:
    with pytest.raises(RewardError, match="ValueError: no numbers"):
        evaluate(pool, "raise")
    with pytest.raises(RewardError, match="status 7"):
        evaluate(pool, "die")
    with pytest.raises(RewardError, match="raised SystemExit"):
        evaluate(pool, "exit")
    with pytest.raises(RewardError, match="EvaluationError: evaluator 'judge' for task 'none': found None"):
        evaluate(pool, "none")
    assert evaluate(pool, "print")[0].reward == 1.0


@linux
@pytest.mark.parametrize("fork", ["fork", "raw fork"])
def test_a_child_that_the_evaluator_forked_holds_nothing_up(pool: RewardPool, fork: str) -> None:
    started = time.monotonic()
    with pytest.raises(RewardTimeout, match="in judge"):
        evaluate(pool, f"{fork} and loop", limit_s=0.5)
    with pytest.raises(RewardError, match="status 7"):
        evaluate(pool, f"{fork} and die", limit_s=3)
    assert time.monotonic() - started < 12
    assert evaluate(pool, "fine")[0].reward == 1.0


@linux
def test_a_child_that_returns_from_the_evaluator_gives_no_second_reward(pool: RewardPool) -> None:
    evaluate(pool, "fork and return")
    with pytest.raises(RewardError, match="no numbers"):
        evaluate(pool, "raise")


@linux
def test_what_the_evaluator_forked_ends_with_its_process(pool: RewardPool) -> None:
    worker = evaluate(pool, "fork")[1].trajectories[0].metadata["pid"]
    forked = [int(pid) for pid in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()]
    assert forked
    pool.close()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text() for pid in forked):
        assert time.monotonic() < deadline, "a child of the evaluator lives on"
        time.sleep(0.05)


def test_it_works_from_a_thread_that_is_not_the_main_one(pool: RewardPool) -> None:
    with pytest.raises(RewardTimeout):
        asyncio.run(asyncio.to_thread(evaluate, pool, "loop", 0.3))


def test_a_cancelled_call_ends_its_process_and_the_next_one_gets_another(pool: RewardPool) -> None:
    async def given_up() -> None:
        task = Task(id="s", metadata={"do": "sleep"})
        async with asyncio.timeout(1.0):
            await pool.evaluate(task, episode_of(task), 3600)

    evaluate(pool, "fine")
    with pytest.raises(TimeoutError):
        asyncio.run(given_up())
    assert evaluate(pool, "fine", 20)[0].reward == 1.0


@linux
def test_closing_leaves_no_process_behind_not_even_a_busy_one(judge: Any) -> None:
    before = children()
    reference = reference_to(judge.evaluator)
    assert not isinstance(reference, str)
    pool = RewardPool(reference, workers=2)
    pool.warm()
    assert len(children() - before) == 2

    async def busy() -> None:
        task = Task(id="s", metadata={"do": "loop"})
        waiting = [asyncio.ensure_future(pool.evaluate(task, episode_of(task), 3600)) for _ in range(4)]
        await asyncio.sleep(2)
        await asyncio.to_thread(pool.close)
        assert all(isinstance(r, BaseException) for r in await asyncio.gather(*waiting, return_exceptions=True))

    asyncio.run(busy())
    assert children() == before


@linux
def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    flow = tmp_path / "orphan.py"
    flow.write_text(JUDGE)
    parent = textwrap.dedent(f"""
        import sys, time
        from rllm.cli.target import load_target
        from rllm.rollouts.rewards import RewardPool, reference_to
        pool = RewardPool(reference_to(load_target({str(flow)!r}).evaluator), 1)
        pool.warm()
        [worker] = pool._all
        print(worker._process.pid, flush=True)
        time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.1)


def test_what_no_process_can_find_is_named_with_its_reason() -> None:
    @rllm.evaluator
    def inner(task: Task, episode: Episode) -> float:
        return 1.0

    @rllm.evaluator
    async def waits(task: Task, episode: Episode) -> float:
        return 1.0

    assert "not a name at the top of a module" in str(reference_to(inner))
    assert "it is async" in str(reference_to(waits))


def test_a_module_that_cannot_be_imported_again_fails_the_episode_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / f"{next(NAMES)}.py"
    marker = tmp_path / "loaded"
    file.write_text(
        f"import pathlib\nmarker = pathlib.Path({str(marker)!r})\nif marker.exists():\n    raise RuntimeError('only once')\n"
        f"marker.touch()\n{JUDGE}"
    )
    reference = reference_to(load_target(str(file)).evaluator)  # pyright: ignore[reportArgumentType]
    assert not isinstance(reference, str)
    pool = RewardPool(reference, 1)
    try:
        with pytest.raises(RewardError, match=r"cannot be imported in its own process(.|\n)*only once"):
            evaluate(pool, "fine")
    finally:
        pool.close()


Run = Callable[..., list[Episode]]


@pytest.fixture
def run(gateway: Gateway, backend: Any, judge: Any) -> Run:
    def run(does: list[str], **settings: Any) -> list[Episode]:
        config = Config.model_validate({"rollout": {"reward_workers": 2} | settings})
        runner = EpisodeRunner(gateway, flow=judge.flow, evaluator=judge.evaluator, config=config)
        try:
            assert not runner.notes
            tasks = [Task(id=f"t{i}", metadata={"do": what}) for i, what in enumerate(does)]
            return runner.run([EpisodeRequest(task, f"{task.id}:0") for task in tasks])
        finally:
            runner.close()

    return run


def test_a_reward_in_a_tight_loop_fails_its_episode_in_time_and_the_others_are_rewarded(run: Run) -> None:
    started = time.monotonic()
    looping, *others = run(["regex", "fine", "fine", "raise"], reward_timeout_s=2.0)
    assert time.monotonic() - started < 10
    assert looping.termination_reason is TerminationReason.TIMEOUT
    assert "no reward within 2 s (rollout.reward_timeout_s); the evaluator was at" in (looping.error or "")
    assert [(e.trajectories[0].reward, e.is_correct) for e in others[:2]] == [(0.25, True)] * 2
    assert others[0].trajectories[0].output.text == "t1", (
        "objects of the flow's own classes survive the way there and back"
    )
    assert others[2].termination_reason is TerminationReason.ERROR
    assert (others[2].error or "").count("ValueError: no numbers") == 1
    assert all(episode.trajectories[0].steps[0].response_ids for episode in [looping, *others])
