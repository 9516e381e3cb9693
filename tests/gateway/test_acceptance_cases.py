"""BH-24 to BH-34 and every token_stitch case of the reference, over HTTP and the runner, with the templates of Qwen3 and of SmolLM2."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from chat_tokenizers import BOTH, ScriptedBackend, chat_tokenizer
from openai import AsyncOpenAI, BadRequestError, InternalServerError, OpenAI

import rllm
from rllm.algorithms.datums import build_datums, rows_of
from rllm.algorithms.grouping import Accounting, group_by_role, usable_trajectories
from rllm.backends.base import Completion
from rllm.config.schema import Config
from rllm.errors import RunError
from rllm.gateway.server import Gateway
from rllm.rollouts.batch import Rollouts
from rllm.tools import parse_tool_calls
from rllm.types import AgentConfig, Episode, Step, Task, TerminationReason, Trajectory

CASES = json.loads((Path(__file__).parents[1] / "reference" / "cases.json").read_text())
STITCH = {case["id"]: case for case in CASES if case["kind"] == "token_stitch"}
THINK = "<think>\nhm\n</think>\n\n"
RAN: list[int] = []


@rllm.tool(timeout_s=1.0)
async def double(a: int) -> int:
    """Doubles."""
    RAN.append(a)
    if a == 13:
        raise LookupError("bad luck")
    await asyncio.sleep(3600 if a == 7 else 0)
    return 2 * a


TOOLS = rllm.Toolset([double])


@pytest.fixture(params=BOTH)
def backend(request: Any) -> Any:
    return ScriptedBackend(chat_tokenizer(request.param), max_model_len=2000)


@pytest.fixture
def gateway(backend: Any) -> Iterator[Gateway]:
    with Gateway(backend) as running:
        yield running


Ask = Callable[..., Any]


@pytest.fixture
def talk(gateway: Gateway, backend: Any) -> Iterator[tuple[Any, Ask]]:
    """A session, and a client in it: ``ask(messages, answer)`` samples `answer` and gives the response."""
    session = gateway.open_session("s")
    with OpenAI(base_url=gateway.agent_config(session).base_url, api_key="x", max_retries=0) as client:

        def ask(messages: Any, answer: Any, **more: Any) -> Any:
            backend.script = lambda _: answer
            return client.chat.completions.create(model="m", messages=messages, **more)

        yield session, ask


def user(text: Any) -> Any:
    return {"role": "user", "content": text}


def letter_by_letter(tokenizer: Any, text: str) -> list[int]:
    """`text` as tokens that no encoder would choose."""
    return [tokenizer(piece, add_special_tokens=False)["input_ids"][0] for piece in text]


def rows_in(session: Any) -> list[Any]:
    steps = [Step() for _ in session.recorded()]
    for step, call in zip(steps, session.recorded().values(), strict=True):
        step.fill(call.output)
    return rows_of(Trajectory(steps=steps), [1.0] * len(steps))


def run(
    backend: Any, flow: Any, evaluator: Any = lambda task, episode: 1.0, tasks: int = 1, n: int = 4, **rollout: Any
) -> list[Episode]:
    data = {"max_prompt_length": 200, "max_response_length": 100}
    config = Config.model_validate({"rollout": {"reward_workers": 0} | rollout, "data": data})
    with Rollouts(backend, config, rllm.rollout(flow), None, {}, evaluator) as rollouts:
        return rollouts.run([Task(id=f"t{i}", instruction=f"question {i}") for i in range(tasks)], n=n)


async def ask_in(config: AgentConfig, messages: Any, **more: Any) -> Any:
    async with AsyncOpenAI(base_url=config.base_url, api_key="x", max_retries=0) as client:
        return await client.chat.completions.create(model=config.model, messages=messages, **more)


async def one_call(task: Task, config: AgentConfig) -> Trajectory:
    response = await ask_in(config, [user(task.instruction)])
    return Trajectory(steps=[Step(id=response.id)], output=index(config))


def index(config: AgentConfig) -> int:
    """Which of a task's episodes this is: session ids are made of ``task:index``."""
    return int(config.session_uid.split("-")[-2].rpartition("_")[2])


# token_stitch, over the endpoint


def test_stitch_prefix_ok_is_one_row_with_the_sampled_ids_verbatim(talk: Any, backend: Any) -> None:
    session, ask = talk
    messages = [user("go")]
    for answer, told in (("It is 4", "tool says 5"), ("Then 9", None)):
        messages.append(ask(messages, letter_by_letter(backend.tokenizer, answer)).choices[0].message)
        messages += [user(told)] if told else []
    [row] = rows_in(session)
    (prompt, first, first_logp), (second_prompt, second, second_logp) = backend.said
    told_ids = second_prompt[len(prompt) + len(first) :]
    assert second_prompt[: len(prompt) + len(first)] == prompt + first and told_ids
    zeros = [0] * len(prompt), [0] * len(told_ids)
    assert row.ids == prompt + first + told_ids + second
    assert row.mask == zeros[0] + [1] * len(first) + zeros[1] + [1] * len(second)
    assert row.logprobs == zeros[0] + first_logp + zeros[1] + second_logp
    case = STITCH["stitch-prefix-ok"]  # the same masks come of the same lengths
    assert len(case["expected"]["segments"]) == 1 and case["expected"]["divergence"] is None
    assert session.counts() == {"calls": 2, "segments": 1, "rewritten": 0}


class Gives(ScriptedBackend):
    """Answers with exactly these tokens and log-probabilities."""

    def __init__(self, tokenizer: Any, ids: list[int], logprobs: list[float]):
        super().__init__(tokenizer)
        self.gives = ids, logprobs

    async def sample(self, prompt_ids: Any, params: Any, adapter: str = "default", on_token: Any = None) -> Completion:
        ids, logprobs = self.gives
        return Completion(list(ids), list(logprobs), [0] * len(ids), "stop")


@pytest.mark.parametrize("template", BOTH)
def test_stitch_empty_completion_is_no_row_is_counted_and_the_chat_goes_on(template: str) -> None:
    backend = Gives(chat_tokenizer(template), [], [])
    sizes = []

    async def two_turns(task: Task, config: AgentConfig) -> None:
        first = await ask_in(config, [user("go")])
        assert first.choices[0].message.content == ""
        second = await ask_in(config, [user("go"), first.choices[0].message.to_dict(), user("and?")])
        sizes.append((first.usage.completion_tokens, second.usage.completion_tokens))

    episodes = run(backend, two_turns, n=2)
    account = Accounting()
    assert not any(episode.failed for episode in episodes) and sizes == [(0, 0)] * 2
    assert usable_trajectories(episodes, account) == [] and account.dropped == {"no_tokens": 2}
    assert rows_of(episodes[0].trajectories[0], [1.0, 1.0]) == STITCH["stitch-empty-completion"]["expected"]["segments"]


@pytest.mark.parametrize("template", BOTH)
@pytest.mark.parametrize("stream", [False, True])
def test_stitch_logp_misaligned_is_an_error_by_name_and_nothing_is_recorded(template: str, stream: bool) -> None:
    turn = STITCH["stitch-logp-misaligned"]["input"]["turns"][0]
    with Gateway(Gives(chat_tokenizer(template), turn["completion"], turn["logp"])) as gateway:  # pyright: ignore[reportArgumentType]
        session = gateway.open_session("s")
        client = OpenAI(base_url=gateway.agent_config(session).base_url, api_key="x", max_retries=0)
        with pytest.raises(InternalServerError, match="gave 2 tokens, 1 log-probabilities"):
            client.chat.completions.create(model="m", messages=[user("go")], stream=stream)
        assert session.recorded() == {}


# Behaviour


def test_bh24_a_turn_begins_with_the_ids_of_the_one_before_or_starts_a_counted_segment(talk: Any, backend: Any) -> None:
    session, ask = talk
    messages = [user("hi")]
    for text in ("hello", "well", THINK + "so"):
        messages += [ask(messages, letter_by_letter(backend.tokenizer, text)).choices[0].message, user("and?")]
    ask(messages, "stripped by Qwen3's template, kept by SmolLM2's")
    messages[0] = user("hi there")
    ask(messages, "edited by the client")
    calls = list(session.recorded().values())
    for before, call in itertools.pairwise(calls):
        known = [*before.output.prompt_ids, *before.output.completion_ids]
        if call.rewrote is None:
            assert call.extends == before.output.id and call.output.prompt_ids[: len(known)] == known
        else:
            at, recorded, found = call.rewrote.at, call.rewrote.recorded, call.rewrote.found
            assert call.output.prompt_ids[at] == found != recorded
    rewritten = {"qwen3": ["template", "client"], "smollm2": ["client"]}
    template = "qwen3" if "<think>" in backend.tokenizer.chat_template else "smollm2"
    assert [call.rewrote.by for call in calls if call.rewrote] == rewritten[template]
    counts = session.counts()
    assert counts == {"calls": 5, "segments": 1 + len(rewritten[template]), "rewritten": len(rewritten[template])}
    rows = rows_in(session)
    assert len(rows) == counts["segments"]
    assert sum(sum(row.mask) for row in rows) == sum(len(ids) for _, ids, _ in backend.said)


def test_bh25_masks_sum_to_the_sampled_tokens_of_the_whole_batch(backend: Any) -> None:
    backend.script = lambda ids: "answer " * (len(ids) % 5) + str(len(ids))

    async def turns(task: Task, config: AgentConfig) -> None:
        messages = [user(task.instruction)]
        for k in range(1 + index(config)):
            response = await ask_in(config, messages)
            messages += [response.choices[0].message.to_dict(), user("again")]
            if index(config) == 3 and k == 1:
                messages[0] = user("another question")

    episodes = run(backend, turns, lambda task, episode: float(len(episode.trajectories[0].steps)), tasks=3)
    account = Accounting()
    rows = build_datums(group_by_role(usable_trajectories(episodes, account)), account, estimator="grpo")
    account.check()
    assert account.trained == 12 and len(backend.said) == 3 * (1 + 2 + 3 + 4)
    assert sum(sum(row.mask) for row in rows) == sum(len(ids) for _, ids, _ in backend.said)
    trained = sorted(p for row in rows for p, m in zip(row.logprobs, row.mask, strict=True) if m)
    assert trained == sorted(p for _, _, logprobs in backend.said for p in logprobs)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ('{"name": "double", "arguments": {"a": 1,', None),
        ('{"name": "double", "arguments": "{\\"a\\": 1,"}', None),
        ('{"name": "double", "arguments": {"b": 1}}', "error: wrong arguments for double: "),
        ('{"name": "double", "arguments": {}}', "error: wrong arguments for double: a: Field required"),
        ('{"name": "halve", "arguments": {"a": 1}}', "error: there is no tool called 'halve'; there are double"),
        ('{"name": "double", "arguments": {"a": 13}}', "error: double failed: LookupError: bad luck"),
        ('{"name": "double", "arguments": {"a": 7}}', "error: double did not end within 1 s"),
        ('{"name": "double", "arguments": {"a": 4}}', "8"),
    ],
)
def test_bh27_every_fault_of_a_tool_call_is_told_and_the_turn_goes_on(
    talk: Any, backend: Any, call: str, says: str | None
) -> None:
    session, ask = talk
    RAN.clear()
    text = f"<tool_call>\n{call}\n</tool_call>"
    message = ask([user("go")], text, tools=TOOLS.schemas).choices[0].message
    messages = [user("go"), message]
    if says is None:  # no call is made up: the text is the content, and the flow tells what is wrong with it
        assert not message.tool_calls and message.content == text
        [found] = parse_tool_calls(message.content)
        told = asyncio.run(TOOLS.answer(found))
        assert told.startswith("error: the ") and "not valid JSON" in told and RAN == []
        messages.append(user(told))
    else:
        [wanted] = message.tool_calls
        told = asyncio.run(TOOLS.call(wanted.function.name, wanted.function.arguments))
        assert told.startswith(says)
        messages.append({"role": "tool", "tool_call_id": wanted.id, "content": told})
    assert (
        [json.loads(call)["arguments"]["a"]] if "did not" in told or "LookupError" in told or told == "8" else []
    ) == RAN
    assert ask(messages, "done", tools=TOOLS.schemas).choices[0].message.content == "done"
    assert session.counts() == {"calls": 2, "segments": 1, "rewritten": 0}
    assert told in backend.tokenizer.decode(backend.said[-1][0])


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("tokens", TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED),
        ("turns", TerminationReason.MAX_TURNS_EXCEEDED),
        ("nothing", TerminationReason.ENV_DONE),
    ],
)
def test_bh28_an_episode_out_of_turns_or_tokens_is_flagged_and_no_completion_is_longer_than_allowed(
    backend: Any, what: str, reason: TerminationReason
) -> None:
    backend.script = lambda ids: "word " * 500 if what == "tokens" else "short"

    async def flow(task: Task, config: AgentConfig) -> Episode:
        response = await ask_in(config, [user(task.instruction)])
        ended = TerminationReason.MAX_TURNS_EXCEEDED if what == "turns" else None
        return Episode(trajectories=[Trajectory(steps=[Step(id=response.id)])], termination_reason=ended)

    episodes = run(backend, flow, n=2, max_tokens=30)
    assert [episode.termination_reason for episode in episodes] == [reason] * 2
    lengths = {len(episode.trajectories[0].steps[0].response_ids) for episode in episodes}
    assert lengths == {30} if what == "tokens" else max(lengths) < 30


def test_bh29_a_prompt_longer_than_allowed_fails_its_sample_with_both_sizes_and_no_other(backend: Any) -> None:
    async def flow(task: Task, config: AgentConfig) -> Trajectory:
        text = "9 " * 500 if index(config) == 1 else task.instruction
        response = await ask_in(config, [user(text)])
        return Trajectory(steps=[Step(id=response.id)])

    episodes = run(backend, flow)
    assert [episode.failed for episode in episodes] == [False, True, False, False]
    with Gateway(backend, max_prompt_length=200) as gateway, pytest.raises(BadRequestError) as raised:
        OpenAI(base_url=f"{gateway.url}/v1", api_key="x").chat.completions.create(
            model="scripted", messages=[user("9 " * 500)]
        )
    assert raised.value.code == "context_length_exceeded"
    size = raised.value.message.partition("the prompt has ")[2].partition(" ")[0]
    assert int(size) > 500 and f"the prompt has {size} tokens; at most 200 are allowed" in (episodes[1].error or "")


def test_bh31_a_reward_that_raises_on_one_of_eight_leaves_seven_and_its_traceback_once(backend: Any) -> None:
    def reward(bad: int) -> Any:
        def judge(task: Task, episode: Episode) -> float:
            if episode.trajectories[0].output < bad:
                raise ArithmeticError("no reward here")
            return float(episode.trajectories[0].output)

        return judge

    episodes = run(backend, one_call, reward(1), n=8)
    account = Accounting()
    assert len(usable_trajectories(episodes, account)) == 7 and account.failed == {"error": 1}
    assert (episodes[0].error or "").count("Traceback (most recent call last)") >= 1
    two = run(backend, one_call, reward(2), n=8)
    assert "in judge" in (two[0].error or "") and "the same traceback as episode t0:0" in (two[1].error or "")
    with pytest.raises(RunError, match=r"(?s)5 of 8 episodes failed, more than rollout.max_failed_fraction.*in judge"):
        run(backend, one_call, reward(5), n=8)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        ("1.0", None),
        ([1.0, 2.0], None),
        (float("inf"), None),
        (None, None),
    ],
    ids=repr,
)
def test_bh32_a_reward_is_of_an_accepted_type_or_a_named_failure_of_its_sample(
    backend: Any, value: Any, reward: float | None
) -> None:
    def judge(task: Task, episode: Episode) -> Any:
        return value if episode.trajectories[0].output == 1 else 0.25

    episodes = run(backend, one_call, judge)
    assert [e.trajectories[0].reward for e in episodes] == [0.25, reward, 0.25, 0.25]
    if reward is None:
        assert episodes[1].failed and "EvaluationError: evaluator 'judge' for task 't0': found" in (
            episodes[1].error or ""
        )


def test_bh34_one_of_four_that_sleeps_an_hour_ends_at_its_limit_and_three_are_the_group(backend: Any) -> None:
    async def flow(task: Task, config: AgentConfig) -> Trajectory:
        response = await ask_in(config, [user(task.instruction)])
        await asyncio.sleep(3600 if index(config) == 2 else 0)
        return Trajectory(steps=[Step(id=response.id)])

    started = time.monotonic()
    episodes = run(backend, flow, episode_timeout_s=2.0)
    assert time.monotonic() - started < 10
    assert [episode.termination_reason for episode in episodes].count(TerminationReason.TIMEOUT) == 1
    [group] = group_by_role(usable_trajectories(episodes, Accounting()))
    assert len(group.trajectories) == 3


class Flag(threading.Event):
    """Set in one event loop, awaited in another."""

    async def wait(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self.is_set():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("how", ["client", "flow", "reward", "tool"])
def test_bh31_whatever_is_killed_in_the_middle_the_others_complete_and_counts_add_up(backend: Any, how: str) -> None:
    sample, began, ended = backend.sample, Flag(), Flag()

    async def sampled(prompt_ids: Any, *more: Any, **named: Any) -> Completion:
        if "for ever" in backend.tokenizer.decode(prompt_ids):
            began.set()
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()
        return await sample(prompt_ids, *more, **named)

    backend.sample = sampled

    async def flow(task: Task, config: AgentConfig) -> Trajectory:
        response = await ask_in(config, [user(task.instruction)])
        if index(config) == 1 and how == "client":
            async with httpx.AsyncClient(base_url=config.base_url) as client:
                pending = asyncio.ensure_future(client.post("/chat/completions", json={"messages": [user("for ever")]}))
                await began.wait()
                pending.cancel()
            await asyncio.wait_for(ended.wait(), 10)
            raise ConnectionError("the client is gone")
        if index(config) == 1 and how == "flow":
            asyncio.current_task().cancel()  # pyright: ignore[reportOptionalMemberAccess]
            await asyncio.sleep(0)
        if index(config) == 1 and how == "tool":
            told = await rllm.PythonTool().call(json.dumps({"code": "import os; os.abort()"}))
            raise RuntimeError(told)
        return Trajectory(steps=[Step(id=response.id)], output=index(config))

    def judge(task: Task, episode: Episode) -> float:
        if how == "reward" and episode.trajectories[0].output == 1:
            raise SystemExit(1)
        return 1.0

    episodes = run(backend, flow, judge)
    account = Accounting()
    usable = usable_trajectories(episodes, account)
    assert len(usable) == 3 and account.failed == {"error": 1} and account.generated == 4
