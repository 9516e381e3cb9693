"""Evaluating what somebody else serves: the same flows, no token ids, nothing counted twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import comb
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_tokenizers import ScriptedBackend, chat_tokenizer

import rllm
from rllm.errors import ConfigError, DataError, RunError, UserError
from rllm.gateway.server import Gateway
from rllm.tracking.episode_file import EpisodeFile
from rllm.types import AgentConfig, Episode, Step, Task, TerminationReason, Trajectory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def endpoint(backend: Any) -> Iterator[str]:
    """Our own server without sessions, as `rllm serve` runs it."""
    with Gateway(backend) as gateway:
        yield f"{gateway.url}/v1"


async def ask(config: AgentConfig, text: str, uid: str | None = None) -> Any:
    url = config.url_for(uid) if uid else config.base_url
    async with openai.AsyncOpenAI(base_url=url, api_key=config.api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": text}]
        return await client.chat.completions.create(model=config.model, messages=messages)


async def ask_streamed(config: AgentConfig, text: str, uid: str) -> str:
    async with openai.AsyncOpenAI(base_url=config.url_for(uid), api_key=config.api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": text}]
        stream = await client.chat.completions.create(model=config.model, messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


@rllm.rollout(name="solver")
async def silent(task: Task, config: AgentConfig) -> None:
    await ask(config, task.id)


@rllm.evaluator
def right(task: Task, episode: Episode) -> bool:
    return "yes" in episode.trajectories[0].steps[-1].model_response


Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluate(endpoint: str) -> Evaluate:
    def evaluate(flow: Any = silent, *, tasks: int = 3, n: int = 1, url: str = endpoint, **more: Any) -> dict[str, Any]:
        settings = {"reward_workers": 0, "n_val": n, "max_failed_fraction": 0.9} | more.pop("rollout", {})
        rows = [{"id": f"t{i}", "question": "?", "data_source": "d"} for i in range(tasks)]
        parts = {"agent_flow": flow, "evaluator": right} if flow is not None else {}
        config = {"rollout": settings, "data": {"max_response_length": 40}}
        return rllm.evaluate(**(parts | {"config": config, "dataset": rows, "base_url": url} | more))

    return evaluate


def test_a_flow_that_returns_nothing_is_judged_by_the_texts_that_came_back(evaluate: Evaluate, backend: Any) -> None:
    backend.answer = lambda text: "yes" if "t1" in text else "no"
    result = evaluate()
    assert result["metrics"]["val/d/pass@1"] == pytest.approx(1 / 3)
    assert (result["model"], result["tasks"], result["episodes"], result["failed"]) == ("echo", 3, 3, 0)
    assert {(asked[1].temperature, asked[1].max_tokens) for asked in backend.asked} == {(1.0, 40)}


def test_the_records_hold_no_token_ids_but_the_text_streamed_or_not_for_its_trajectory(
    evaluate: Evaluate, backend: Any, tmp_path: Path
) -> None:
    @rllm.rollout
    async def two(task: Task, config: AgentConfig) -> list[Trajectory]:
        first, second = Trajectory(name="a"), Trajectory(name="b")
        response = await ask(config, "first")
        first.steps.append(Step(id=response.id))
        second.output = await ask_streamed(config, "second", second.uid)
        return [first, second]

    backend.answer = lambda text: "yes 1" if "first" in text else "yes 2"
    evaluate(two, tasks=1, episodes=tmp_path / "e.jsonl")
    episode = Episode.from_dict(json.loads((tmp_path / "e.jsonl").read_text().split("\n")[1]))
    [a, b] = episode.trajectories
    assert (a.steps[0].model_response, b.steps[0].model_response, b.output) == ("yes 1", "yes 2", "yes 2")
    assert a.steps[0].chat_completions[0]["content"] == "first"
    assert not a.steps[0].response_ids and not b.steps[0].response_ids


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_flow_that_returns_nothing_is_recorded_with_its_tool_calls_over_both_apis(
    evaluate: Evaluate, api: str, streamed: bool, tmp_path: Path
) -> None:
    scripted: Any = ScriptedBackend(chat_tokenizer("qwen3"))
    scripted.script = lambda _: 'yes\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

    @rllm.rollout
    async def calls(task: Task, config: AgentConfig) -> None:
        function: Any = {"name": "f", "parameters": {"type": "object"}}
        async with openai.AsyncOpenAI(base_url=config.base_url, api_key=config.api_key) as client:
            if api == "chat":
                tools: Any = [{"type": "function", "function": function}]
                messages: Any = [{"role": "user", "content": task.id}]
                made: Any = client.chat.completions.create(
                    model=config.model, messages=messages, tools=tools, stream=streamed
                )
            else:
                tools = [{"type": "function", "strict": None, **function}]
                made = client.responses.create(model=config.model, input=task.id, tools=tools, stream=streamed)
            answer = await made
            if streamed:
                assert [event async for event in answer]

    with Gateway(scripted) as gateway:
        result = evaluate(calls, tasks=1, url=f"{gateway.url}/v1", episodes=tmp_path / "e.jsonl")
    assert (result["failed"], result["metrics"]["val/d/pass@1"]) == (0, 1.0)
    assert scripted.params[0].max_tokens == 40
    [trajectory] = Episode.from_dict(json.loads((tmp_path / "e.jsonl").read_text().split("\n")[1])).trajectories
    asked, answered = trajectory.steps[0].chat_completions
    assert asked == {"role": "user", "content": "t0"} and answered["content"] == "yes"
    assert [call["function"] for call in answered["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]
    assert trajectory.steps[0].finish_reason == "tool_calls"


def test_a_workflow_runs_against_it_too(evaluate: Evaluate, backend: Any) -> None:
    class Once(rllm.Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            output = await self.rollout_engine.get_model_response(
                [{"role": "user", "content": task["id"]}], max_tokens=5
            )
            return Episode(
                trajectories=[Trajectory("s", [Step.from_model_output(output)], float(output.content == "yes"))]
            )

    backend.answer = lambda text: "yes"
    result = evaluate(None, workflow_class=Once)
    assert result["metrics"]["val/d/reward/s"] == 1.0 and backend.asked[0][1].max_tokens == 5


def test_pass_at_k_is_the_unbiased_estimate_and_failures_are_counted_apart(evaluate: Evaluate, backend: Any) -> None:
    seen: dict[str, int] = {}

    @rllm.rollout
    async def counted(task: Task, config: AgentConfig) -> Trajectory:
        number = seen[task.id] = seen.get(task.id, 0) + 1
        if task.id == "t2" and number == 1:
            raise ValueError("broke")
        response = await ask(config, "say yes" if number <= {"t0": 1, "t1": 4, "t2": 2}[task.id] else "say no")
        return Trajectory(steps=[Step(id=response.id)])

    backend.answer = lambda text: "yes" if "say yes" in text else "no"
    result = evaluate(counted, n=4, ks=(1, 2))
    assert result["failed"] == 1 and result["failed_by_reason"] == {"error": 1}
    # (right, of): t0 1 of 4, t1 4 of 4, t2 1 of the 3 that did not fail
    expected = [1 - comb(n - c, 2) / comb(n, 2) for c, n in ((1, 4), (4, 4), (1, 3))]
    assert result["metrics"]["val/d/pass@2"] == pytest.approx(sum(expected) / 3)
    assert result["metrics"]["val/d/pass@1"] == pytest.approx((1 / 4 + 1 + 1 / 3) / 3)


def test_going_on_runs_only_what_is_missing_or_failed_and_gives_the_same_as_one_run(
    evaluate: Evaluate, backend: Any, tmp_path: Path
) -> None:
    backend.answer = lambda text: "yes" if re.search("t[02]", text) else "no"
    broken = True

    @rllm.rollout(name="solver")
    async def flaky(task: Task, config: AgentConfig) -> None:
        if broken and task.id == "t1":
            raise ValueError("broke")
        await ask(config, task.id)

    file = tmp_path / "e.jsonl"
    first = evaluate(flaky, tasks=2, n=2, episodes=file)
    assert (first["episodes"], first["failed"], len(backend.asked)) == (4, 2, 2)
    broken = False
    second = evaluate(flaky, tasks=4, n=2, episodes=file, resume=True)
    assert (second["episodes"], second["failed"], second["resumed"], len(backend.asked)) == (8, 0, 2, 2 + 6)
    assert second["metrics"] == evaluate(flaky, tasks=4, n=2)["metrics"]
    third = evaluate(flaky, tasks=4, n=2, episodes=file, resume=True)
    assert third["resumed"] == 8 and third["metrics"] == second["metrics"]
    with pytest.raises(UserError, match="begun with max_tokens=40"):
        evaluate(flaky, tasks=4, n=2, episodes=file, resume=True, rollout={"max_tokens": 9})


def test_nothing_goes_on_with_other_tasks_under_the_same_ids_nor_with_another_evaluator(
    evaluate: Evaluate, backend: Any, tmp_path: Path
) -> None:
    @rllm.rollout(name="solver")
    async def changes_its_task(task: Task, config: AgentConfig) -> None:
        task.metadata["seen"] = True
        await ask(config, task.id)

    @rllm.evaluator
    def wrong(task: Task, episode: Episode) -> bool:
        return False

    def rows(answer: int) -> list[dict[str, Any]]:
        return [{"id": "a", "question": "1 + 1", "answer": 2}, {"id": "b", "question": "?", "answer": answer}]

    def run(answer: int = 1, **more: Any) -> dict[str, Any]:
        return evaluate(changes_its_task, dataset=rows(answer), episodes=tmp_path / "e.jsonl", **more)

    run()
    assert run(resume=True)["resumed"] == 2
    with pytest.raises(DataError, match=r"e.jsonl:[23]: the task 'b' had another instruction or metadata"):
        run(answer=2, resume=True)
    with pytest.raises(DataError, match=r'begun with evaluator="right", now it is "wrong"'):
        run(resume=True, evaluator=wrong)


def test_changed_code_is_told_and_a_changed_adapter_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from rllm.evaluation import _makers

    sources = {"one": "def flow(task, config): ...\n", "two": "def flow(task, config): pass\n"}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    about = {}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        made: dict[str, Any] = {}
        exec(compile(source, str(tmp_path / f"{name}.py"), "exec"), made)
        about[name] = _makers(made["flow"], None, str(adapter))
    file = EpisodeFile(tmp_path / "e.jsonl", about["one"])
    file.append(Episode(id="t:0", termination_reason=TerminationReason.ENV_DONE))
    EpisodeFile(file.path, about["one"], resume=True)
    assert not caplog.records
    EpisodeFile(file.path, about["two"], resume=True)
    assert "the code of the flow or evaluator has changed" in caplog.text
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    with pytest.raises(DataError, match="begun with adapter_digest"):
        EpisodeFile(file.path, _makers(len, None, str(adapter)), resume=True)


class Flaky(BaseHTTPRequestHandler):
    """An endpoint that refuses without its key and answers a call only the second time."""

    calls = 0
    seen: tuple[dict[str, Any], ...] = ()

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "big"}, {"id": "small"}]} if self._knows_key() else {"error": {}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Flaky.calls += 1
        Flaky.seen += (body,)
        if Flaky.calls == 1:
            self._send(429, {"error": {"message": "slow down"}}, {"retry-after": "0.1"})
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
            self._send(200, {"id": f"c{Flaky.calls}", "choices": [choice]})

    def _knows_key(self) -> bool:
        return self.headers.get("authorization") == "Bearer hidden"

    def _send(self, status: int, data: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(data).encode()
        self.send_response(status if self._knows_key() else 401)
        for name, value in {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def flaky_endpoint() -> Iterator[str]:
    Flaky.calls, Flaky.seen = 0, ()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_key_stays_out_of_the_flow_and_a_busy_endpoint_is_asked_again(
    evaluate: Evaluate, flaky_endpoint: str
) -> None:
    told: list[AgentConfig] = []

    @rllm.rollout
    async def listens(task: Task, config: AgentConfig) -> None:
        told.append(config)
        await ask(config, task.id)

    result = evaluate(listens, tasks=1, url=flaky_endpoint, model="small", api_key="hidden")
    assert result["metrics"]["val/d/pass@1"] == 1.0 and Flaky.calls == 2
    assert Flaky.seen[1]["model"] == "small" and Flaky.seen[1]["max_tokens"] == 40
    assert "hidden" not in repr(told)


def test_an_endpoint_that_cannot_be_used_is_explained_before_anything_runs(
    evaluate: Evaluate, flaky_endpoint: str, endpoint: str, tmp_path: Path
) -> None:
    for url, more, says in (
        ("http://127.0.0.1:9/v1", {}, "nothing answers there"),
        ("127.0.0.1:9", {}, "nothing answers there"),
        (flaky_endpoint, {}, "refuses the API key (status 401); name the environment variable"),
        (endpoint, {"model": "gpt"}, "--model 'gpt'"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            evaluate(url=url, **more)
    with pytest.raises(ConfigError, match="--adapter has no meaning"):
        evaluate(adapter=str(tmp_path))
    with pytest.raises(ConfigError, match="--resume goes on with a file"):
        evaluate(resume=True)


@pytest.mark.slow
def test_an_endpoint_that_dies_in_the_middle_fails_its_episodes_and_stops_the_run_with_the_reason(backend: Any) -> None:
    gateway = Gateway(backend)
    gateway.start()

    @rllm.rollout
    async def dies(task: Task, config: AgentConfig) -> None:
        await ask(config, task.id)
        if task.id == "t0":
            gateway.stop()

    with pytest.raises(RunError, match=r"(?s)5 of 6 episodes failed.*does not answer"):
        rllm.evaluate(
            agent_flow=dies,
            evaluator=right,
            base_url=f"{gateway.url}/v1",
            dataset=[{"id": f"t{i}", "question": "?"} for i in range(6)],
            config={"rollout": {"reward_workers": 0, "max_concurrency": 1}},
        )


def test_a_real_server_is_evaluated_stopped_and_gone_on_with_from_the_command_line(tmp_path: Path) -> None:
    flow = tmp_path / "greet.py"
    flow.write_text(
        "import time\nimport rllm\nfrom openai import OpenAI\n\n"
        "@rllm.rollout\ndef greet(task, config):\n"
        "    with OpenAI(base_url=config.base_url, api_key=config.api_key) as client:\n"
        "        client.chat.completions.create(model=config.model, messages=[{'role': 'user', 'content': 'Hello'}])\n"
        "    time.sleep(task.metadata['sleep'])\n\n"
        "@rllm.evaluator\ndef polite(task, episode):\n"
        "    return 'ello' in episode.trajectories[0].steps[0].model_response\n"
    )
    rows = [{"id": f"t{i}", "question": "?", "sleep": 0 if i < 3 else 3600} for i in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "rllm.cli"]
    server = subprocess.Popen(
        [*command, "serve", "--port", "0", "--set", "model.device=cpu"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert server.stdout is not None
        found = re.search(r"at (http://\S+/v1)", server.stdout.readline())
        assert found
        run = [*command, "eval", str(flow), "--base-url", found[1], "--episodes", "e.jsonl", "--n", "2", "--k", "2"]
        run += ["data.val_files=tasks.jsonl", "rollout.val_temperature=0"]
        first = subprocess.Popen(run, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not (tmp_path / "e.jsonl").exists() or (tmp_path / "e.jsonl").read_text().count("\n") < 7:
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.1)
        first.send_signal(signal.SIGINT)
        assert "--resume goes on" in first.communicate(timeout=30)[1] and first.returncode == 130
        rows[3]["sleep"] = 0
        (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
        second = subprocess.run([*run, "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert second.returncode == 0, second.stderr
        result = json.loads(second.stdout)
        assert (result["episodes"], result["resumed"], result["failed"]) == (8, 6, 0)
        assert result["metrics"]["val/unknown/pass@2"] == 1.0, "it greets back"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    assert TerminationReason.ENV_DONE.value in (tmp_path / "e.jsonl").read_text() and os.path.exists(
        tmp_path / "e.jsonl"
    )
