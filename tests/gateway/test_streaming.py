"""Streams: text comes while tokens are sampled, ends where the answer ends, and a caller that hangs up ends the sampling."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from chat_tokenizers import BOTH, ScriptedBackend, chat_tokenizer

from rllm.backends.base import Completion
from rllm.gateway.server import Gateway

HELLO: Any = [{"role": "user", "content": "hello"}]


class StepBackend:
    """Samples one token each time the test allows one; `text` is what it says."""

    model_name, max_model_len, policy_version = "step", 4096, 0

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.text = tokenizer, "abcdef"
        self.allowed, self.fails_after = threading.Semaphore(0), 10**9
        self.sampled = self.cancelled = 0

    async def sample(self, prompt_ids: Any, params: Any, adapter: str = "default", on_token: Any = None) -> Completion:
        ids = [*self.tokenizer(self.text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        try:
            for i, token in enumerate(ids):
                while not self.allowed.acquire(blocking=False):
                    await asyncio.sleep(0.002)
                if i == self.fails_after:
                    raise RuntimeError("the device is gone")
                self.sampled += 1
                if on_token is not None:
                    on_token(token, -0.25)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Completion(ids, [-0.25] * len(ids), [0] * len(ids), "stop")

    def allow(self, n: int) -> None:
        self.allowed.release(n)


@pytest.fixture
def step(tokenizer: Any) -> StepBackend:
    return StepBackend(tokenizer)


@pytest.fixture
def served(step: StepBackend) -> Iterator[Gateway]:
    with Gateway(step) as gateway:  # pyright: ignore[reportArgumentType]
        yield gateway


def client_of(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 5
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert holds()


def test_each_token_reaches_the_client_before_the_next_is_sampled(served: Gateway, step: StepBackend) -> None:
    step.allow(1)
    stream = client_of(served).chat.completions.create(model="step", messages=HELLO, stream=True)
    seen = []
    for chunk in stream:
        if chunk.choices[0].delta.content:
            seen.append((chunk.choices[0].delta.content, step.sampled))
        step.allow(1)
    assert seen == [(letter, i + 1) for i, letter in enumerate("abcdef")]


def test_a_responses_stream_reaches_the_client_as_it_is_sampled(served: Gateway, step: StepBackend) -> None:
    step.allow(1)
    seen = []
    for event in client_of(served).responses.create(model="step", input="hello", stream=True):
        if event.type == "response.output_text.delta":
            seen.append((event.delta, step.sampled))
            step.allow(1)
    assert seen == [(letter, i + 1) for i, letter in enumerate("abcdef")]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_caller_that_hangs_up_ends_its_sampling_at_once(served: Gateway, step: StepBackend, path: str) -> None:
    step.text = "<tool_call> nothing of this is shown"
    ask = {"chat/completions": {"messages": HELLO}, "completions": {"prompt": "a"}, "responses": {"input": "a"}}[path]
    tools = [{"type": "function", "function": {"name": "f"}}] if path == "chat/completions" else []
    body = {**ask, "stream": True} | ({"tools": tools} if tools else {})
    with pytest.raises(httpx.ReadTimeout):  # nothing was sent yet
        httpx.post(f"{served.url}/v1/{path}", json=body, timeout=0.3)
    wait_until(lambda: step.cancelled == 1)


def test_a_caller_that_hangs_up_in_the_middle_ends_its_sampling(served: Gateway, step: StepBackend) -> None:
    step.allow(2)
    body = {"messages": HELLO, "stream": True, "n": 2}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=5) as response:
        next(response.iter_lines())
    wait_until(lambda: step.cancelled == 2)
    assert step.sampled == 2


def test_a_failure_before_the_first_token_has_a_status_and_one_after_it_an_event(
    served: Gateway, step: StepBackend
) -> None:
    step.fails_after = 0
    step.allow(1)
    with pytest.raises(openai.InternalServerError, match="the device is gone"):
        client_of(served).chat.completions.create(model="step", messages=HELLO, stream=True)
    step.fails_after = 1
    step.allow(1)
    text = ""
    with pytest.raises(openai.APIError, match="the device is gone"):
        for chunk in client_of(served).chat.completions.create(model="step", messages=HELLO, stream=True):
            text += chunk.choices[0].delta.content or ""
            step.allow(1)
    assert text == "a"


def test_a_stream_that_cannot_be_served_is_refused_with_a_status(served: Gateway) -> None:
    for body in ({"temperature": -1}, {"model": "nobody"}, {"messages": [{"role": "user", "content": "x" * 5000}]}):
        response = httpx.post(f"{served.url}/v1/chat/completions", json={"messages": HELLO, "stream": True} | body)
        assert response.status_code in (400, 404) and response.json()["error"]["message"]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_says_all_that_the_whole_answer_says(gateway: Gateway, backend: Any) -> None:
    body = {"messages": HELLO, "n": 3, "logprobs": True, "return_token_ids": True}
    whole = httpx.post(f"{gateway.url}/v1/chat/completions", json=body).json()
    told = events(
        httpx.post(
            f"{gateway.url}/v1/chat/completions",
            json=body | {"stream": True, "stream_options": {"include_usage": True}},
        )
    )
    assert told[-1]["choices"] == [] and told[-1]["usage"] == whole["usage"]
    assert len({event["id"] for event in told}) == 1 and {e["object"] for e in told} == {"chat.completion.chunk"}
    for expected in whole["choices"]:
        parts = [c for event in told for c in event["choices"] if c["index"] == expected["index"]]
        assert parts[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content") or "" for part in parts) == expected["message"]["content"]
        assert [t for part in parts for t in (part["logprobs"] or {}).get("content", [])] == expected["logprobs"][
            "content"
        ]
        assert [t for part in parts for t in part.get("token_ids", [])] == expected["token_ids"]
        assert parts[-1]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]


@pytest.mark.parametrize("template", BOTH)
def test_the_bytes_of_logprobs_come_to_the_text_where_characters_are_split_over_tokens(template: str) -> None:
    scripted: Any = ScriptedBackend(chat_tokenizer(template))
    scripted.script = lambda _: "naïve 東京 🙂 \n\tdone"
    body = {"messages": HELLO, "logprobs": True, "return_token_ids": True}
    with Gateway(scripted) as gateway:
        [whole] = httpx.post(f"{gateway.url}/v1/chat/completions", json=body).json()["choices"]
        told = events(httpx.post(f"{gateway.url}/v1/chat/completions", json=body | {"stream": True}))
    content = whole["logprobs"]["content"]
    assert len(content) == len(whole["token_ids"]) and any("\ufffd" in token["token"] for token in content)
    text = b"".join(bytes(token["bytes"]) for token in content).decode()
    assert text == whole["message"]["content"] + "<|im_end|>" == scripted.script(None) + "<|im_end|>"
    parts = [choice for event in told for choice in event["choices"]]
    assert [t for part in parts for t in (part["logprobs"] or {}).get("content", [])] == content
    assert "".join(part["delta"].get("content") or "" for part in parts) == whole["message"]["content"]


def test_a_stop_text_and_its_beginnings_never_reach_the_client(gateway: Gateway, backend: Any) -> None:
    backend.answer = lambda _: "12 </b> 34</answer>56"
    body = {"messages": HELLO, "stream": True, "stop": ["</answer>"]}
    response = httpx.post(f"{gateway.url}/v1/chat/completions", json=body)
    text = "".join(c["delta"].get("content") or "" for event in events(response) for c in event["choices"])
    assert text == "12 </b> 34"


def test_64_sessions_that_stream_at_once_never_mix(gateway: Gateway, backend: Any) -> None:
    backend.delay = lambda text: (sum(text.encode()) % 17) / 500
    backend.answer = lambda text: text.rpartition("hello ")[2].partition("<")[0] * 5
    sessions = [gateway.open_session(f"s{i}") for i in range(64)]

    async def talk(client: openai.AsyncOpenAI, i: int) -> list[str]:
        ids = []
        for agent in ("one", "two"):
            mine = client.with_options(base_url=gateway.agent_config(sessions[i]).url_for(agent))
            text = ""
            async for chunk in await mine.chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"hello {i} {agent}"}], stream=True
            ):
                text += chunk.choices[0].delta.content or ""
                ids.append(chunk.id)
            assert text == f"{i} {agent}" * 5
        return list(dict.fromkeys(ids))

    async def all_of_them() -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url="http://unused", api_key="x") as client:
            return await asyncio.gather(*(talk(client, i) for i in range(64)))

    for i, (session, ids) in enumerate(zip(sessions, asyncio.run(all_of_them()), strict=True)):
        calls = session.recorded()
        assert list(calls) == ids and [call.trajectory for call in calls.values()] == ["one", "two"]
        assert [call.output.content for call in calls.values()] == [f"{i} {agent}" * 5 for agent in ("one", "two")]


@pytest.mark.parametrize("template", ["qwen3", "smollm2"])
def test_ids_that_only_fill_up_the_models_vocabulary_can_be_sampled_told_and_gone_on_from(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    filler = len(tokenizer) + 3
    backend: Any = ScriptedBackend(tokenizer)
    word = tokenizer("ok", add_special_tokens=False)["input_ids"]
    backend.script = lambda _: [filler, *word, filler]
    with Gateway(backend) as gateway, httpx.Client(base_url=gateway.url) as http:
        session = gateway.open_session("s")
        for more in ({}, {"stream": True}):
            messages = [*HELLO]
            for _ in range(2):
                body = {"messages": messages, "logprobs": True, "return_token_ids": True} | more
                answer = http.post("/s/s/v1/chat/completions", json=body)
                assert answer.status_code == 200 and "error" not in answer.text
                messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}]
        whole = http.post("/v1/completions", json={"prompt": "a", "logprobs": 0}).json()["choices"][0]
    assert whole["text"] == "ok" and whole["logprobs"]["tokens"][0] == ""
    calls = list(session.recorded().values())
    assert [call.output.content for call in calls] == ["ok"] * 4
    assert all(calls[i].extends for i in (1, 3)) and filler in calls[1].output.prompt_ids
