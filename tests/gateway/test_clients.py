"""Clients as agents use them, unmodified: openai with tools and responses, the OpenAI Agents SDK, curl; nested agents and threads."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from chat_tokenizers import BOTH, ScriptedBackend, chat_tokenizer

from rllm.gateway.server import Gateway
from rllm.types import AgentConfig, new_id

CALL = 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}]


@pytest.fixture(scope="module", params=BOTH)
def weather(request: Any) -> Iterator[Gateway]:
    """A model that asks a tool first, and answers when it was told."""
    backend = ScriptedBackend(chat_tokenizer(request.param))

    def script(ids: list[int]) -> str:
        told = backend.tokenizer.decode(ids).rpartition("sunny in ")
        return f"It is sunny in {told[2].split()[0]}." if told[1] else CALL

    backend.script = script
    with Gateway(backend) as gateway:  # pyright: ignore[reportArgumentType]
        yield gateway


def open_config(gateway: Gateway) -> tuple[Any, AgentConfig]:
    session = gateway.open_session(new_id())
    return session, gateway.agent_config(session)


def check_record(session: Any, ids: list[str]) -> None:
    """Two calls, by the ids the client saw, the second on the tokens of the first."""
    calls = session.recorded()
    assert list(calls) == ids
    assert session.counts() == {"calls": 2, "segments": 1, "rewritten": 0}
    assert [call.output.finish_reason for call in calls.values()] == ["tool_calls", "stop"]


def test_openai_chat_with_tools(weather: Gateway) -> None:
    session, config = open_config(weather)
    client = openai.OpenAI(base_url=config.base_url, api_key="x")
    messages: Any = [{"role": "user", "content": "weather?"}]
    first = client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
    [call] = first.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("Let me look.", "tool_calls")
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny in Paris"}]
    second = client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
    assert second.choices[0].message.content == "It is sunny in Paris."
    check_record(session, [first.id, second.id])


def test_openai_chat_with_tools_streamed_and_put_together_by_the_client(weather: Gateway) -> None:
    session, config = open_config(weather)
    client = openai.OpenAI(base_url=config.base_url, api_key="x")
    messages: Any = [{"role": "user", "content": "weather?"}]
    with client.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as stream:
        first = stream.get_final_completion()
    message = first.choices[0].message
    [call] = message.tool_calls or []
    assert message.content == "Let me look." and json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sunny in Paris"}]
    messages[1].pop("parsed", None)
    second = client.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)
    check_record(session, [first.id, second.id])


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_responses_with_tools(weather: Gateway, streamed: bool) -> None:
    session, config = open_config(weather)
    client = openai.OpenAI(base_url=config.base_url, api_key="x")

    def ask(items: Any) -> Any:
        settings: Any = {"model": "m", "input": items, "tools": TOOLS, "instructions": "be brief"}
        if not streamed:
            return client.responses.create(**settings)
        with client.responses.stream(**settings) as stream:
            told = list(stream)
        assert [event.sequence_number for event in told] == list(range(len(told)))
        return told[-1].response  # pyright: ignore[reportAttributeAccessIssue]

    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}]
    first = ask(items)
    message, call = first.output
    assert (message.type, first.output_text, call.type) == ("message", "Let me look.", "function_call")
    assert (call.name, json.loads(call.arguments), first.status) == ("get_weather", {"city": "Paris"}, "completed")
    items += [item.to_dict() for item in first.output]
    for item in items:
        item.pop("parsed_arguments", None)
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny in Paris"})
    second = ask(items)
    assert second.output_text == "It is sunny in Paris."
    call = session.recorded()[second.id]
    assert (second.usage.input_tokens, second.usage.output_tokens) == (
        call.output.prompt_length,
        call.output.completion_length,
    )
    check_record(session, [first.id, second.id])


def test_a_response_that_was_cut_is_incomplete(weather: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{weather.url}/v1", api_key="x")
    response = client.responses.create(model="scripted", input="weather?", max_output_tokens=3)
    assert response.status == "incomplete" and response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    last = list(client.responses.create(model="scripted", input="weather?", max_output_tokens=3, stream=True))[-1]
    assert last.type == "response.incomplete"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "reasoning", "summary": [{"text": 5}]}]}, "input"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": None}]}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"messages": []}, "messages"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_what_a_response_cannot_honour_is_refused_by_name(weather: Gateway, body: Any, param: str) -> None:
    response = httpx.post(f"{weather.url}/v1/responses", json={"input": "a"} | body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_the_openai_agents_sdk_runs_an_agent_with_a_tool(weather: Gateway, api: str, streamed: bool) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    session, config = open_config(weather)

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"sunny in {city}"

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=config.base_url, api_key="x") as client:
            model = getattr(agents, api)(config.model, client)
            agent = agents.Agent(name="weather", instructions="be brief", model=model, tools=[get_weather])
            if not streamed:
                return (await agents.Runner.run(agent, "weather in Paris?")).final_output
            result = agents.Runner.run_streamed(agent, "weather in Paris?")
            async for _ in result.stream_events():
                pass
            return result.final_output

    assert asyncio.run(run()) == "It is sunny in Paris."
    check_record(session, list(session.recorded()))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("template", BOTH)
def test_agents_of_two_roles_that_hand_over_are_each_recorded_with_their_own_adapter(
    template: str, api: str, streamed: bool
) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    backend = ScriptedBackend(chat_tokenizer(template))

    def script(ids: list[int]) -> str:
        text = backend.tokenizer.decode(ids)
        if "transfer_to_forecaster" in text and "You forecast" not in text:
            return '<tool_call>\n{"name": "transfer_to_forecaster", "arguments": {}}\n</tool_call>'
        return "It is sunny." if "sunny in " in text else CALL

    backend.script = script

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"sunny in {city}"

    async def run(config: AgentConfig) -> Any:
        async with openai.AsyncOpenAI(base_url=config.url_for("desk"), api_key="x") as client:
            there = client.with_options(base_url=config.url_for("forecaster"))
            forecaster = agents.Agent(
                name="forecaster",
                instructions="You forecast.",
                model=getattr(agents, api)(config.model_for("forecaster"), there),
                tools=[get_weather],
            )
            desk = agents.Agent(
                name="desk",
                instructions="You send people on.",
                model=getattr(agents, api)(config.model_for("desk"), client),
                handoffs=[forecaster],
            )
            if not streamed:
                return await agents.Runner.run(desk, "weather in Paris?")
            result = agents.Runner.run_streamed(desk, "weather in Paris?")
            async for _ in result.stream_events():
                pass
            return result

    with Gateway(backend, roles=("desk", "forecaster")) as gateway:  # pyright: ignore[reportArgumentType]
        session, config = open_config(gateway)
        result = asyncio.run(run(config))
    assert (result.final_output, result.last_agent.name) == ("It is sunny.", "forecaster")
    desk, look, tell = session.recorded().values()
    assert [(c.trajectory, c.output.adapter) for c in (desk, look, tell)] == [
        ("desk", "desk"),
        ("forecaster", "forecaster"),
        ("forecaster", "forecaster"),
    ]
    assert [c.output.finish_reason for c in (desk, look, tell)] == ["tool_calls", "tool_calls", "stop"]
    assert (desk.extends, look.extends, tell.extends) == (None, None, look.output.id)
    assert [
        (c.output.prompt_ids, c.output.completion_ids, c.output.logprobs) for c in (desk, look, tell)
    ] == backend.said


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_reads_an_answer_and_a_stream(gateway: Gateway, backend: Any) -> None:
    def curl(body: Any) -> str:
        url, head = f"{gateway.url}/v1/chat/completions", "Content-Type: application/json"
        command = ["curl", "-sN", url, "-H", head, "-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout

    body = {"messages": [{"role": "user", "content": "hello"}]}
    content = json.loads(curl(body))["choices"][0]["message"]["content"]
    streamed = [line for line in curl(body | {"stream": True}).split("\n\n") if line]
    assert streamed[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in streamed[:-1]]
    assert "".join(part.get("content") or "" for part in parts) == content


def test_nested_agents_and_threads_are_recorded_under_their_own_trajectories(weather: Gateway) -> None:
    session, config = open_config(weather)
    seen: dict[str, list[str]] = {}

    def agent(name: str, depth: int) -> None:
        client = openai.OpenAI(base_url=config.url_for(name), api_key="x")
        seen[name] = []
        for turn in range(3):
            messages: Any = [{"role": "user", "content": f"{name} {turn}"}]
            seen[name].append(client.chat.completions.create(model="m", messages=messages).id)
            if turn == 1 and depth:  # this agent asks two others, at once, in the middle of its work
                inner = [threading.Thread(target=agent, args=(f"{name}.{i}", depth - 1)) for i in range(2)]
                for thread in inner:
                    thread.start()
                for thread in inner:
                    thread.join()

    agent("root", 2)
    assert len(seen) == 7
    recorded: dict[str | None, list[str]] = {}
    for call_id, call in session.recorded().items():
        recorded.setdefault(call.trajectory, []).append(call_id)
        assert call.messages[0]["content"].split()[0] == call.trajectory
    assert recorded == seen
