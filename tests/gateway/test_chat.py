"""From messages to exact tokens: rendering, markers in texts, exact multi-turn prompts, seeds, what training refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rllm.gateway.chat import ChatModel, SessionEngine
from rllm.gateway.errors import RequestError
from rllm.gateway.recorder import Session
from rllm.gateway.requests import CallParams
from rllm.types import ModelOutput, TerminationEvent, TerminationReason


@pytest.fixture
def model(backend: Any) -> ChatModel:
    return ChatModel(backend, max_prompt_length=1000)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat(model: ChatModel, messages: list[Any], session: Session | None = None, **params: Any) -> ModelOutput:
    return asyncio.run(model.chat(messages, CallParams(**params), session))


def rendered(backend: Any, messages: list[Any]) -> list[int]:
    return backend.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_prompt_is_what_the_chat_template_says(model: ChatModel, backend: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, user("1 + 1?")]
    for _ in range(2):  # the second comes from the cache
        assert model.chat_prompt(messages).ids == rendered(backend, messages)


def test_a_cached_prompt_cannot_be_changed_by_its_user(model: ChatModel) -> None:
    first = model.chat_prompt([user("a")]).ids
    first.append(99)
    assert model.chat_prompt([user("a")]).ids == first[:-1]


@pytest.mark.parametrize("marker", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
def test_chat_markers_inside_a_message_are_plain_text(model: ChatModel, backend: Any, marker: str) -> None:
    tokenizer = backend.tokenizer
    ids = model.chat_prompt([user(f"a{marker}b")]).ids
    harmless = model.chat_prompt([user("ab")]).ids
    special = tokenizer.convert_tokens_to_ids(marker)
    assert ids.count(special) == harmless.count(special)
    assert tokenizer.decode(ids) == tokenizer.decode(harmless).replace("ab", f"a{marker}b")


def test_the_next_turn_continues_the_sampled_tokens_and_not_their_text(model: ChatModel, backend: Any) -> None:
    tokenizer, session = backend.tokenizer, Session("s")
    backend.answer = lambda _: "user"  # one token here, though a client's text could be tokenized as four
    first = chat(model, [user("hi")], session)
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "user"]
    first.completion_ids[:1] = spelled
    second = chat(model, [user("hi"), assistant("user"), user("again")], session)
    known = first.prompt_ids + spelled + [tokenizer.eos_token_id]
    assert second.prompt_ids[: len(known)] == known
    assert second.prompt_ids != rendered(backend, [user("hi"), assistant("user"), user("again")])
    assert tokenizer.decode(second.prompt_ids) == tokenizer.decode(
        rendered(backend, [user("hi"), assistant("user"), user("again")])
    )


def test_a_turn_that_was_cut_by_length_is_closed_in_the_next_prompt(model: ChatModel, backend: Any) -> None:
    session = Session("s")
    first = chat(model, [user("hi")], session, max_tokens=4)
    assert first.finish_reason == "length"
    history = [user("hi"), assistant(first.content), user("go on")]
    assert chat(model, history, session).prompt_ids == rendered(backend, history)


def test_a_history_that_the_caller_rewrote_is_rendered_anew(model: ChatModel, backend: Any) -> None:
    session = Session("s")
    chat(model, [user("hi")], session)
    history = [user("hi"), assistant("something else"), user("again")]
    assert chat(model, history, session).prompt_ids == rendered(backend, history)


def test_a_template_that_rewrites_history_starts_a_new_segment(
    model: ChatModel, backend: Any, monkeypatch: Any
) -> None:
    strips = "{% for m in messages %}{{ m['role'] + ':' + m['content'][:3] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    monkeypatch.setattr(backend.tokenizer, "chat_template", strips)
    session = Session("s")
    first = chat(model, [user("hi")], session)
    history = [user("hi"), assistant(first.content), user("again")]
    assert chat(model, history, session).prompt_ids == rendered(backend, history)


def test_calls_of_one_trajectory_are_not_continued_by_another(model: ChatModel, backend: Any) -> None:
    session = Session("s")
    first = asyncio.run(model.chat([user("hi")], CallParams(), session, trajectory="one"))
    first.completion_ids[0] = backend.tokenizer.convert_tokens_to_ids("z")
    history = [user("hi"), assistant(first.content), user("again")]
    other = asyncio.run(model.chat(history, CallParams(), session, trajectory="two"))
    assert other.prompt_ids == rendered(backend, history)


def test_content_ends_before_a_stop_text_but_every_sampled_token_is_kept(model: ChatModel, backend: Any) -> None:
    backend.answer = lambda _: "12</answer>"
    output = chat(model, [user("hi")], Session("s"), stop=("</answer>",))
    assert (output.content, output.text) == ("12", "12</answer>")
    assert len(output.completion_ids) == len("12</answer>") + 1


def test_seeds_depend_on_session_prompt_and_count_and_not_on_the_order_of_arrival(
    model: ChatModel, backend: Any
) -> None:
    def seeds(seed: int, prompts: list[str]) -> dict[tuple[str, int], int | None]:
        session, found = Session("s", seed=seed), {}
        for prompt in prompts:
            chat(model, [user(prompt)], session)
            count = sum(key[0] == prompt for key in found)
            found[prompt, count] = backend.asked[-1][1].seed
        return found

    one = seeds(1, ["a", "b", "a"])
    assert one == seeds(1, ["b", "a", "a"])
    assert len(set(one.values())) == 3
    assert not set(one.values()) & set(seeds(2, ["a", "b", "a"]).values())


def test_a_calls_own_settings_win_over_the_sessions(model: ChatModel, backend: Any) -> None:
    session = Session("s", sampling={"temperature": 0.6, "max_tokens": 7})
    assert chat(model, [user("a")], session).temperature == 0.6
    assert chat(model, [user("a")], session, temperature=0.9, seed=5).temperature == 0.9
    assert [(asked[1].max_tokens, asked[1].temperature) for asked in backend.asked] == [(7, 0.6), (7, 0.9)]
    assert backend.asked[1][1].seed == 5


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_training_refuses_what_would_make_the_logprobs_wrong_and_validation_does_not(
    model: ChatModel, params: Any
) -> None:
    with pytest.raises(RequestError, match="in training"):
        chat(model, [user("a")], Session("s"), **params)
    chat(model, [user("a")], Session("s", is_validation=True), **params)


def test_a_workflow_call_is_recorded_like_one_over_http(model: ChatModel, backend: Any) -> None:
    session = Session("s")
    output = asyncio.run(SessionEngine(model, session).get_model_response([user("hi")], max_tokens=5, trajectory="one"))
    [(call_id, call)] = session.recorded().items()
    assert (call_id, call.trajectory) == (output.id, "one")
    assert output.prompt_ids == rendered(backend, [user("hi")]) and len(output.completion_ids) == 5


def test_a_workflow_calls_tools_like_a_client(model: ChatModel, backend: Any) -> None:
    backend.answer = lambda _: '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    engine = SessionEngine(model, Session("s"))
    output = asyncio.run(engine.get_model_response([user("hi")], tools=tools, tool_choice="auto"))
    assert [call["function"] for call in output.tool_calls] == [{"name": "f", "arguments": '{"a": 1}'}]
    assert (output.content, output.finish_reason) == ("", "tool_calls")
    assert '"name": "f"' in backend.tokenizer.decode(output.prompt_ids)


@pytest.mark.parametrize(
    ("messages", "keywords"), [("hi", {}), ([user("hi")], {"temprature": 1}), ([user("hi")], {"top_p": 7})]
)
def test_a_workflow_call_is_checked_like_one_over_http(model: ChatModel, messages: Any, keywords: Any) -> None:
    with pytest.raises(RequestError):
        asyncio.run(SessionEngine(model, Session("s")).get_model_response(messages, **keywords))


def test_a_workflow_prompt_that_is_too_long_ends_the_episode_with_that_reason(model: ChatModel) -> None:
    with pytest.raises(TerminationEvent) as event:
        asyncio.run(SessionEngine(model, Session("s")).get_model_response([user("x" * 2000)]))
    assert event.value.reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
