"""The OpenAI endpoint as clients see it: unmodified openai clients, raw HTTP, and every kind of bad request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from rllm.gateway.server import Gateway

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def connection(running_gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running_gateway.url) as client:
        yield client


@pytest.fixture
def http(connection: httpx.Client, backend: Any) -> httpx.Client:
    return connection


def ask(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return http.post(path, json={"messages": HELLO} | body if "chat" in path else body)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def prompt_of(backend: Any, messages: list[dict[str, str]]) -> list[int]:
    return backend.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_an_unmodified_openai_client_chats_and_its_call_is_recorded_under_the_response_id(
    gateway: Gateway, backend: Any
) -> None:
    session = gateway.open_session("s")
    config = gateway.agent_config(session)
    client = openai.OpenAI(base_url=config.base_url, api_key=config.api_key)
    response = client.chat.completions.create(model=config.model, messages=HELLO)
    output = session.recorded()[response.id].output
    assert output.prompt_ids == prompt_of(backend, HELLO)
    assert output.completion_ids[-1] == backend.tokenizer.eos_token_id
    assert (
        output.content
        == response.choices[0].message.content
        == backend.answer(backend.tokenizer.decode(output.prompt_ids))
    )
    assert (output.logprobs, output.versions) == ([-0.5] * 13, [3] * 13)
    assert response.choices[0].finish_reason == "stop"
    assert response.usage and response.usage.completion_tokens == len(output.completion_ids)
    assert response.usage.prompt_tokens == len(output.prompt_ids)


def test_an_async_client_streams_the_same_answer(gateway: Gateway) -> None:
    session = gateway.open_session("s")

    async def stream() -> tuple[set[str], str, str | None, int]:
        async with openai.AsyncOpenAI(base_url=gateway.agent_config(session).base_url, api_key="x") as client:
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="echo", messages=HELLO, stream=True, stream_options={"include_usage": True}
                )
            ]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        assert chunks[-1].usage
        return {chunk.id for chunk in chunks}, text, choices[-1].finish_reason, chunks[-1].usage.completion_tokens

    ids, text, reason, tokens = asyncio.run(stream())
    [(call_id, call)] = session.recorded().items()
    assert ids == {call_id} and text == call.output.content
    assert (reason, tokens) == ("stop", len(call.output.completion_ids))


def test_completions_continue_a_text_or_token_ids(gateway: Gateway, backend: Any) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x")
    ids = backend.tokenizer("1 + 1 =", add_special_tokens=False)["input_ids"]
    by_text = client.completions.create(model="echo", prompt="1 + 1 =", logprobs=0)
    by_ids = client.completions.create(model="echo", prompt=ids)
    assert [asked[0] for asked in backend.asked] == [ids, ids]
    assert by_text.choices[0].text == by_ids.choices[0].text == backend.answer("1 + 1 =")
    assert by_text.choices[0].logprobs and by_text.choices[0].logprobs.token_logprobs == [-0.5] * 13


def test_n_answers_are_n_recorded_calls_named_by_their_index(gateway: Gateway, http: httpx.Client) -> None:
    session = gateway.open_session("s")
    response = ask(http, "/s/s/v1/chat/completions", n=3).json()
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2]
    assert list(session.recorded()) == [f"{response['id']}-{i}" for i in range(3)]
    assert response["usage"]["completion_tokens"] == 3 * 13


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_answers_of_one_seeded_request_differ_and_are_the_same_again(
    http: httpx.Client, backend: Any, path: str
) -> None:
    body: dict[str, Any] = {"seed": 5} | ({} if "chat" in path else {"prompt": "a"})
    for more in ({"n": 3}, {"n": 3, "stream": True}, {"n": 1}):
        assert ask(http, path, **body, **more).status_code == 200
    seeds = [params.seed for _, params, _ in backend.asked]
    assert seeds[:3] == seeds[3:6] and len(set(seeds[:3])) == 3
    assert seeds[0] == seeds[6] == 5


def test_token_ids_and_logprobs_are_told_on_request(http: httpx.Client, backend: Any) -> None:
    choice = ask(http, return_token_ids=True, logprobs=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == prompt_of(backend, HELLO)
    assert len(choice["token_ids"]) == 13
    tokens = choice["logprobs"]["content"]
    assert [token["logprob"] for token in tokens] == [-0.5] * 13
    assert "".join(token["token"] for token in tokens[:-1]) == choice["message"]["content"]


def test_models_lists_what_is_served_and_each_name_picks_its_weights(backend: Any) -> None:
    with (
        Gateway(backend, models={"mine": "default", "echo": "base"}) as gateway,
        httpx.Client(base_url=gateway.url) as http,
    ):
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["mine", "echo"]
        assert openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x").models.retrieve("echo").id == "echo"
        assert http.get("/v1/models/gpt-9").json()["error"]["code"] == "model_not_found"
        for name in ("mine", "echo"):
            assert ask(http, model=name).json()["model"] == name
        wrong = ask(http, model="gpt-9")
    assert [asked[2] for asked in backend.asked] == ["default", "base"]
    assert wrong.status_code == 404 and error_of(wrong)["code"] == "model_not_found"
    assert "mine, echo" in error_of(wrong)["message"]


def test_a_session_decides_the_weights_whatever_name_the_call_gives(
    gateway: Gateway, http: httpx.Client, backend: Any
) -> None:
    gateway.open_session("s", adapter="judge")
    assert ask(http, "/s/s/v1/chat/completions", model="gpt-9").status_code == 200
    assert backend.asked[0][2] == "judge"


def test_a_call_is_tagged_by_the_trajectory_in_its_url_or_header(gateway: Gateway, http: httpx.Client) -> None:
    session = gateway.open_session("s")
    config = gateway.agent_config(session)
    http.post(config.url_for("one") + "/chat/completions", json={"messages": HELLO})
    http.post(config.base_url + "/chat/completions", json={"messages": HELLO}, headers={"x-rllm-trajectory": "two"})
    http.post(config.base_url + "/chat/completions", json={"messages": HELLO})
    assert [call.trajectory for call in session.recorded().values()] == ["one", "two", None]


def test_the_url_of_a_closed_session_answers_404(gateway: Gateway, http: httpx.Client) -> None:
    gateway.close_session(gateway.open_session("s"))
    response = ask(http, "/s/s/v1/chat/completions")
    assert response.status_code == 404 and error_of(response)["code"] == "session_not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "g"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"model": {}}, "model"),
        ({"temperature": 1e-9}, "temperature"),
        ({"prompt": "a"}, "prompt"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": "x"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": "x"}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"content": "hello"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, backend: Any, body: Any, param: str) -> None:
    response = http.post("/v1/chat/completions", content=json.dumps({"messages": HELLO} | body))
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param and error["type"] == "invalid_request_error" and not backend.asked


@pytest.mark.parametrize("prompt", [None, "", [], [1.5], [-1], [10**6], ["a"], {"a": 1}])
def test_a_prompt_that_is_neither_text_nor_token_ids_is_refused(http: httpx.Client, prompt: Any) -> None:
    response = ask(http, "/v1/completions", prompt=prompt)
    assert response.status_code == 400 and error_of(response)["param"] == "prompt"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'"x"', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(http: httpx.Client, content: bytes) -> None:
    response = http.post("/v1/chat/completions", content=content)
    assert response.status_code == 400 and error_of(response)


def test_harmless_fields_are_accepted(http: httpx.Client) -> None:
    harmless: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "tools": None,
        "tool_choice": "none",
        "frequency_penalty": 0,
        "top_logprobs": 0,
        "response_format": {"type": "text"},
        "stop": None,
    }
    assert ask(http, **harmless).status_code == 200


def test_an_unknown_route_and_a_wrong_method_are_told_in_openais_shape(http: httpx.Client) -> None:
    for response, status in ((http.post("/v1/embeddings", json={}), 404), (http.get("/v1/chat/completions"), 405)):
        assert response.status_code == status and "/v1/" in error_of(response)["message"]


def test_an_error_of_the_engine_is_a_500_with_its_message(http: httpx.Client, backend: Any, caplog: Any) -> None:
    def broken(text: str) -> str:
        raise RuntimeError("out of memory")

    backend.answer = broken
    response = ask(http)
    assert response.status_code == 500
    assert error_of(response) == {
        "message": "RuntimeError: out of memory",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert "out of memory" in caplog.text


def test_too_long_a_prompt_is_refused_with_its_size_and_max_tokens_is_cut_to_what_fits(
    http: httpx.Client, backend: Any
) -> None:
    response = ask(http, messages=[{"role": "user", "content": "x" * 3000}])
    assert response.status_code == 400 and error_of(response)["code"] == "context_length_exceeded"
    assert "at most 2048" in error_of(response)["message"]
    assert ask(http, max_tokens=100_000).status_code == 200
    prompt, params, _ = backend.asked[-1]
    assert params.max_tokens == backend.max_model_len - len(prompt)


def test_sampling_ends_when_the_caller_hangs_up(http: httpx.Client, backend: Any) -> None:
    backend.delay = lambda _: 30.0
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json={"messages": HELLO, "n": 3}, timeout=0.2)
    deadline = time.monotonic() + 5
    while backend.cancelled < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backend.cancelled == 3


def test_64_sessions_at_once_never_mix(gateway: Gateway, backend: Any) -> None:
    backend.delay = lambda text: (sum(text.encode()) % 17) / 200
    sessions = [gateway.open_session(f"s{i}") for i in range(64)]

    async def talk(client: openai.AsyncOpenAI, i: int) -> list[tuple[str, list[dict[str, str]]]]:
        mine = client.with_options(base_url=gateway.agent_config(sessions[i]).base_url)
        history: Any = []
        seen = []
        for turn in range(3):
            history.append({"role": "user", "content": f"session {i} turn {turn}"})
            response = await mine.chat.completions.create(model="echo", messages=list(history))
            seen.append((response.id, list(history)))
            history.append({"role": "assistant", "content": response.choices[0].message.content or ""})
        return seen

    async def all_of_them() -> list[list[tuple[str, list[dict[str, str]]]]]:
        async with openai.AsyncOpenAI(base_url="http://unused", api_key="x") as client:
            return await asyncio.gather(*(talk(client, i) for i in range(64)))

    for session, seen in zip(sessions, asyncio.run(all_of_them()), strict=True):
        calls = session.recorded()
        assert list(calls) == [call_id for call_id, _ in seen]
        for call_id, history in seen:
            assert calls[call_id].output.prompt_ids == prompt_of(backend, history)


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {LONG: 1}),
        ("/v1/chat/completions", {"model": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": ""}]}),
        ("/v1/chat/completions", {"parallel_tool_calls": [LONG]}),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": f"f{i // 2}"}} for i in range(9999)]},
        ),
        ("/v1/chat/completions", {"chat_template_kwargs": {LONG: []}}),
        ("/v1/chat/completions", {"temperature": [LONG]}),
        ("/v1/chat/completions", {"temperature": LONG}),
        ("/v1/completions", {"prompt": "a", LONG: 1}),
        ("/v1/responses", {"input": [{"type": LONG}]}),
        ("/v1/responses", {"input": "a", LONG: 1}),
        ("/v1/responses", {"input": [{"role": LONG, "content": ""}]}),
        (f"/s/{LONG[:50_000]}/v1/chat/completions", {}),
        (f"/{LONG[:50_000]}", {}),
        (f"/v1/models/{LONG[:50_000]}", None),
    ],
)
def test_no_error_repeats_all_of_what_was_sent(http: httpx.Client, path: str, body: Any) -> None:
    sent = {"messages": HELLO} | body if body is not None and "chat" in path else body
    answer = http.get(path) if body is None else http.post(path, json=sent)
    assert 400 <= answer.status_code < 500 and error_of(answer) and len(answer.content) < 3000


def test_a_cut_message_keeps_what_is_allowed(http: httpx.Client) -> None:
    message = error_of(ask(http, messages=[{"role": LONG, "content": ""}]))["message"]
    assert message.startswith("messages[0].role is 'xxx") and message.endswith("assistant, tool")
