"""Things that break in the middle of a step, with the real model: the step ends with the others, and the counts add up."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI
from test_trainer import lines, train

import rllm
from rllm.errors import RunError
from rllm.tools import PythonTool

TOOL = PythonTool(timeout_s=1.0)


async def ask(config, **more):
    async with AsyncOpenAI(base_url=config.base_url, api_key="x", max_retries=0) as client:
        messages = [{"role": "user", "content": "Using the numbers [3, 5, 7], make 26."}]
        return await client.chat.completions.create(model=config.model, messages=messages, **more)


def index(config):
    """Which of a task's episodes this is: session ids are made of ``task:index``."""
    return int(config.session_uid.split("-")[-2].rpartition("_")[2])


def breaks(what):
    """A flow of which the second episode of each task breaks in a way of its own."""

    @rllm.rollout(name="solver")
    async def flow(task, config):
        first = await ask(config, max_tokens=8)
        if index(config) == 1:
            if what == "sleeps":
                await asyncio.sleep(3600)
            if what == "will not be cancelled":
                while True:
                    try:
                        await asyncio.sleep(3600)
                    except asyncio.CancelledError:
                        pass
            if what == "raises":
                raise ValueError("broke in the middle")
            if what == "exits":
                raise SystemExit(1)
            if what == "cancels itself":
                asyncio.current_task().cancel()
                await asyncio.sleep(1)
            if what == "client hangs up":
                body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}
                async with httpx.AsyncClient(timeout=0.01) as client:
                    await client.post(f"{config.base_url}/chat/completions", json=body)
            if what == "prompt is too long":
                async with AsyncOpenAI(base_url=config.base_url, api_key="x", max_retries=0) as client:
                    messages = [{"role": "user", "content": "9 " * 500}]
                    await client.chat.completions.create(model=config.model, messages=messages)
            if what == "tool is killed":
                text = await TOOL.call(json.dumps({"code": "import os\nos.abort()"}))
                assert text == "error: ended by SIGABRT"
                raise ValueError(text)
        return rllm.Trajectory(steps=[rllm.Step(id=first.id)], output=index(config))

    return flow


@rllm.evaluator
def by_index(task, episode):
    return float(episode.trajectories[0].output % 2 == 0)


@rllm.evaluator
def stuck_on_one(task, episode):
    while episode.trajectories[0].output == 1:
        pass
    return float(episode.trajectories[0].output)


@rllm.evaluator
def killed_on_one(task, episode):
    if episode.trajectories[0].output == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(episode.trajectories[0].output)


def one_step(tmp_path, flow, evaluator=by_index, **rollout):
    settings = {"n": 4, "episode_timeout_s": 60.0, "reward_workers": 0} | rollout
    started = time.monotonic()
    result = train(tmp_path, flow, evaluator, tasks=1, val=0, trainer={"total_steps": 1}, rollout=settings)
    episodes = lines(tmp_path / "runs" / "latest" / "episodes.jsonl")
    account = result["accounting"]
    assert (
        account["generated"]
        == 4
        == account["trained"] + sum(account["dropped"].values()) + sum(account["failed"].values())
    )
    step = lines(tmp_path / "runs" / "latest" / "metrics.jsonl")[0]["timing_s/step"]
    assert step < time.monotonic() - started
    return account, [e for e in episodes if e["termination_reason"] in ("error", "timeout")], step


def others():
    """Processes that this one started and that still run (Linux)."""
    stats = [p for p in Path("/proc").glob("[0-9]*/stat") if p.exists()]
    return [
        s
        for s in (p.read_text().rpartition(")")[2].split() for p in stats if p.exists())
        if s[1] == str(os.getpid()) and s[0] != "Z"
    ]


@pytest.mark.parametrize("what", ["sleeps", "will not be cancelled"])
def test_one_rollout_of_four_that_sleeps_an_hour_ends_at_its_limit_and_three_are_trained(tmp_path, what):
    account, [failed], seconds = one_step(tmp_path, breaks(what), episode_timeout_s=2.0)
    assert seconds < 10
    assert account["trained"] == 3 and account["failed"] == {"timeout": 1}
    assert failed["error"] == "no result within 2 s (rollout.episode_timeout_s)"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raises", "ValueError: broke in the middle"),
        ("exits", "RuntimeError: the flow or evaluator ended with SystemExit: 1"),
        ("cancels itself", "was ended from inside (CancelledError)"),
        ("client hangs up", "httpx.ReadTimeout"),
        ("prompt is too long", "tokens; at most 200 are allowed (data.max_prompt_length"),
        ("tool is killed", "ValueError: error: ended by SIGABRT"),
    ],
)
def test_a_flow_that_breaks_in_the_middle_is_one_failed_sample_and_three_are_trained(tmp_path, what, says):
    account, [failed], _ = one_step(tmp_path, breaks(what))
    assert account["trained"] == 3 and account["failed"] == {"error": 1}
    assert (failed["error"].count(says) == 1 and failed["id"] == "countdown-train-0:1") or failed["id"].endswith(":1")


@pytest.mark.parametrize(
    ("evaluator", "reason", "says"),
    [
        (stuck_on_one, "timeout", "no reward within 1 s (rollout.reward_timeout_s); the evaluator was at"),
        (killed_on_one, "error", "the evaluator's process ended with status -9"),
    ],
)
def test_a_reward_that_never_ends_or_is_killed_is_one_failed_sample_and_leaves_no_process(
    tmp_path, evaluator, reason, says
):
    before = len(others())
    account, [failed], seconds = one_step(
        tmp_path, breaks("nothing"), evaluator, reward_timeout_s=1.0, reward_workers=2
    )
    assert account["trained"] == 3 and account["failed"] == {reason: 1} and seconds < 40
    assert says in failed["error"]
    assert len(others()) == before


def test_the_same_traceback_is_kept_once_and_above_the_share_the_run_stops_with_it(tmp_path):
    @rllm.rollout
    async def always(task, config):
        raise ValueError("broke in the middle")

    with pytest.raises(
        RunError, match=r"(?s)4 of 4 episodes failed, more than rollout.max_failed_fraction=0.5.*in always"
    ) as raised:
        one_step(tmp_path, always)
    assert str(raised.value).count("Traceback") == 1

    account, _, _ = one_step(tmp_path, always, max_failed_fraction=1.0)
    assert account["failed"] == {"error": 4}
    errors = [e["error"] for e in lines(tmp_path / "runs" / "latest" / "episodes.jsonl")]
    assert sum("Traceback" in error for error in errors) == 1
    assert sum("the same traceback as episode" in error for error in errors) == 3


def test_a_failed_episode_is_tried_again_and_says_for_what_reason(tmp_path):
    tries = []

    @rllm.rollout
    async def second_time(task, config):
        response = await ask(config, max_tokens=8)
        tries.append(index(config))
        if index(config) == 1 and tries.count(1) == 1:
            raise ConnectionError("the line was cut")
        return rllm.Trajectory(steps=[rllm.Step(id=response.id)], output=index(config))

    account, failed, _ = one_step(tmp_path, second_time, retries=1)
    assert account["trained"] == 4 and not failed
    [again] = [e for e in lines(tmp_path / "runs" / "latest" / "episodes.jsonl") if "retries" in e["metadata"]]
    assert again["metadata"]["retry_reasons"] == ["ConnectionError: the line was cut"]


def test_with_few_tokens_in_flight_every_episode_still_gets_its_turn(tmp_path):
    account, failed, _ = one_step(tmp_path, breaks("nothing"), max_tokens_in_flight=60, max_concurrency=4)
    assert account["trained"] == 4 and not failed


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_ctrl_c_ends_a_run_whose_flow_and_evaluator_hang_and_leaves_no_process_or_port(tmp_path):
    flow = tmp_path / "hangs.py"
    flow.write_text(
        "import rllm\nfrom openai import AsyncOpenAI\n\n"
        "@rllm.rollout\nasync def hangs(task, config):\n"
        "    async with AsyncOpenAI(base_url=config.base_url, api_key='x') as client:\n"
        "        await client.chat.completions.create(model=config.model, max_tokens=4, messages=[{'role': 'user', 'content': 'Hi'}])\n"
        "    open('called', 'a').write('x')\n\n"
        "@rllm.evaluator\ndef never(task, episode):\n"
        "    open('judging', 'a').write('x')\n    while True:\n        pass\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "tasks.jsonl").write_text('{"question": "?"}\n')
    command = [
        sys.executable,
        "-m",
        "rllm.cli",
        "train",
        str(flow),
        "data.train_files=tasks.jsonl",
        "trainer.total_steps=1",
    ]
    run = subprocess.Popen(
        [*command, f"gateway.port={port}", "model.device=cpu"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while not (tmp_path / "judging").exists():
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.1)
    assert len(in_session(run.pid)) == 3, "the run and two processes for its evaluator"
    os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to all of them
    errors = run.communicate(timeout=60)[1]
    assert "Traceback" not in errors
    assert not in_session(run.pid)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def in_session(leader):
    """Processes of the session that `leader` began."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[3] == str(leader) and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
