"""Thoughts told beside the content: the same tokens, whatever the caller is told and whatever it sends back."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from chat_tokenizers import BOTH, ScriptedBackend, chat_tokenizer

import rllm
from rllm.errors import ConfigError
from rllm.gateway.server import Gateway
from rllm.gateway.thinking import ThoughtStream, split_thought

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("text", "opened", "thought", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("\n <think>a\n\nb </think>c </think> d", False, "a\n\nb", "c </think> d"),
        ("<think></think>yes", False, "", "yes"),
        ("<think>\n\n</think>\n\n", False, "", ""),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("<thin", False, "", "<thin"),
        (" \n<thinking> yes ", False, "", " \n<thinking> yes "),
        ("no <think>thought</think>", False, "", "no <think>thought</think>"),
        ("hm</think> yes", False, "", "hm</think> yes"),
        ("hm\n</think>\n yes", True, "hm", "yes"),
        ("still at it", True, "still at it", ""),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_a_thought_is_split_off_however_the_text_is_cut(text: str, opened: bool, thought: str, content: str) -> None:
    assert split_thought(text, opened) == (thought, content)
    rng = random.Random(text)
    for _ in range(50):
        stream, told, at = ThoughtStream(opened), ["", ""], 0
        while at < len(text):
            n = rng.randrange(1, 8)
            for i, piece in enumerate(stream.push(text[at : at + n])):
                told[i] += piece
            at += n
            assert thought.startswith(told[0]) and content.startswith(told[1])
        assert tuple(a + b for a, b in zip(told, stream.finish(), strict=True)) == (thought, content)


@pytest.fixture(params=BOTH)
def served(request: Any) -> Iterator[tuple[Any, Any, openai.OpenAI]]:
    backend: Any = ScriptedBackend(chat_tokenizer(request.param))
    backend.script = lambda ids: (
        f"<think>\nhm {len(ids)}\n</think>\n\n"
        + ("done" if "<tool_response>" in backend.tokenizer.decode(ids) else f"I look.\n{CALL}")
    )
    with Gateway(backend, reasoning="split") as gateway:
        session = gateway.open_session("s")
        yield backend, session, openai.OpenAI(base_url=gateway.agent_config(session).base_url, api_key="x")


def asked(client: openai.OpenAI, messages: Any, streamed: bool, model: str = "m") -> tuple[str, str, list[Any]]:
    """(thought, content, calls) of an answer."""
    made: Any = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, stream=streamed)
    if not streamed:
        message = made.choices[0].message
        return message.reasoning_content, message.content, message.tool_calls or []
    thought = content = ""
    calls: list[Any] = []
    for chunk in made:
        delta = chunk.choices[0].delta
        assert not (content and getattr(delta, "reasoning_content", None)), "the thought comes first"
        thought += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        calls += delta.tool_calls or []
    return thought, content, calls


@pytest.mark.parametrize("sent_back", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_turn_goes_on_from_the_tokens_whether_the_thought_is_sent_back_or_not(
    served: Any, streamed: bool, sent_back: bool
) -> None:
    backend, session, client = served
    messages: Any = [{"role": "user", "content": "go"}]
    thought, content, [call] = asked(client, messages, streamed)
    assert (thought, content) == (f"hm {len(backend.said[0][0])}", "I look.")
    assert call.function.arguments == '{"a": "</think>"}'
    function = {"name": "f", "arguments": call.function.arguments}
    answer = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }
    messages += [
        answer | ({"reasoning_content": thought} if sent_back else {}),
        {"role": "tool", "tool_call_id": call.id, "content": "told"},
    ]
    thought, content, calls = asked(client, messages, streamed)
    assert (thought, content, calls) == (f"hm {len(backend.said[1][0])}", "done", [])
    first, second = session.recorded().values()
    if backend.tokenizer.chat_template == chat_tokenizer("smollm2").chat_template:
        assert second.extends == first.output.id
        assert session.counts() == {"calls": 2, "segments": 1, "rewritten": 0}
    assert [c.output.completion_ids for c in (first, second)] == [ids for _, ids, _ in backend.said]
    assert first.output.reasoning == first.answer["reasoning_content"] and "<think>" in first.output.text


@pytest.mark.parametrize("streamed", [False, True])
def test_over_responses_a_thought_is_an_item_of_its_own_that_may_come_back(served: Any, streamed: bool) -> None:
    backend, session, client = served
    backend.script = lambda ids: "<think>\nhm\n</think>\n\nwell"

    def ask(items: Any) -> Any:
        made: Any = client.responses.create(model="m", input=items, stream=streamed)
        if not streamed:
            return made
        events = list(made)
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm"
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "well"
        ended = [event.item for event in events if event.type == "response.output_item.done"]
        assert ended == events[-1].response.output
        assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1]
        return events[-1].response

    items: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(2):
        response = ask(items)
        thought, message = response.output
        assert (thought.type, thought.content[0].text, message.content[0].text) == ("reasoning", "hm", "well")
        items += [item.to_dict() for item in response.output]
        items.append({"role": "user", "content": "and?"})
    first, second = session.recorded().values()
    if backend.tokenizer.chat_template == chat_tokenizer("smollm2").chat_template:
        assert second.extends == first.output.id
    else:  # this template takes the thought out before a new question
        assert second.rewrote is not None and second.rewrote.by == "template"


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_openai_agents_sdk_gets_and_returns_thoughts(served: Any, api: str, streamed: bool) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    backend, session, client = served

    @agents.function_tool
    def f(a: str) -> str:
        """Looks."""
        return "told"

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key="x") as own:
            agent = agents.Agent(name="a", model=getattr(agents, api)("m", own), tools=[f])
            if not streamed:
                return await agents.Runner.run(agent, "go")
            result = agents.Runner.run_streamed(agent, "go")
            async for _ in result.stream_events():
                pass
            return result

    result = asyncio.run(run())
    assert result.final_output == "done"
    assert any(item.type == "reasoning_item" for item in result.new_items)
    assert session.counts()["calls"] == 2
    assert [c.output.completion_ids for c in session.recorded().values()] == [ids for _, ids, _ in backend.said]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_thought_that_the_template_opens_is_told_apart_and_holds_no_calls(streamed: bool) -> None:
    tokenizer = copy.copy(chat_tokenizer("smollm2"))
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    backend: Any = ScriptedBackend(tokenizer)
    call = CALL.replace("</think>", "x")
    with Gateway(backend, reasoning="split") as gateway:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x")
        for said, expected in (
            (f"hm {call}\n</think>\n\nyes", (f"hm {call}", "yes", 0)),
            (f"hm\n</think>\n{call}", ("hm", None, 1)),
            (f"hm {call}", (f"hm {call}", "", 0)),
        ):
            backend.script = lambda _, said=said: said
            thought, content, calls = asked(client, [{"role": "user", "content": "go"}], streamed, model="scripted")
            assert (thought, content or None, len(calls)) == (expected[0], expected[1] or None, expected[2])
        assert tokenizer.decode(backend.said[0][0]).endswith("<think>\n")


def test_a_call_may_ask_for_the_other_way(served: Any) -> None:
    _, _, client = served
    messages: Any = [{"role": "user", "content": "go"}]
    made: Any = client.chat.completions.create(
        model="m", messages=messages, extra_body={"separate_reasoning": False, "chat_template_kwargs": {}}
    )
    assert made.choices[0].message.content.startswith("<think>") and not hasattr(
        made.choices[0].message, "reasoning_content"
    )
    with pytest.raises(openai.BadRequestError, match="separate_reasoning must be true or false"):
        client.chat.completions.create(model="m", messages=messages, extra_body={"separate_reasoning": 1})


def test_an_endpoint_of_somebody_else_cannot_be_told_to_split() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.reasoning=split"):
        rllm.evaluate(
            agent_flow=print, base_url="http://127.0.0.1:9/v1", config={"rollout": {"reasoning": "split"}}, dataset=[]
        )
