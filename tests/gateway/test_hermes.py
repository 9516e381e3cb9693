"""Tool calls out of sampled text, and into messages for templates without words for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rllm.gateway.hermes import forced_start, parse_calls, write_out
from rllm.gateway.messages import ToolUse, plain_messages

GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def told(text: str) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = parse_calls(text)
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return content, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (GOOD, "", [("f", {"a": 1})]),
        (f"Let me see.\n{GOOD}", "Let me see.", [("f", {"a": 1})]),
        (f"{GOOD}\n{GOOD}", "", [("f", {"a": 1})] * 2),
        (f"a\n{GOOD}\nb", "a\nb", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("f", {"a": 2})]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("f", {"a": "</tool_call>"})],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"ä": "→"}}</tool_call>', "", [("f", {"ä": "→"})]),
        (f"<think>I could {GOOD}</think>no", f"<think>I could {GOOD}</think>no", []),
        (f"<think>so {GOOD}", f"<think>so {GOOD}", []),
        (f"<think>hm</think>\n{GOOD}", "<think>hm</think>", [("f", {"a": 1})]),
        (f"opened by the template {GOOD}</think>{GOOD}", f"opened by the template {GOOD}</think>", [("f", {"a": 1})]),
        *(
            (f'<tool_call>{{"name": "f", "arguments": {{"a": "{tag}"}}}}</tool_call>', "", [("f", {"a": tag})])
            for tag in ("<think>", "</think>", "<think>so</think>", "<tool_call>")
        ),
    ],
)
def test_calls_are_read_and_the_rest_is_content(text: str, content: str, calls: list[Any]) -> None:
    assert told(text) == (content, calls)


def test_in_a_thought_that_the_prompt_opened_nothing_is_a_call_before_its_end() -> None:
    assert parse_calls(f"hm {GOOD}", thinking=True) == (f"hm {GOOD}", [])
    content, calls = parse_calls(f"hm {GOOD}</think>\n{GOOD}", thinking=True)
    assert content == f"hm {GOOD}</think>" and len(calls) == 1


@pytest.mark.parametrize(
    "json_text",
    [
        '{"a": 1,',
        '{"name": "f"}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{"}',
        '{"name": "f", "arguments": "1"}',
        '{"name": "", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": {"a": 1}} and more',
        '["f", {}]',
        "f(a=1)",
        "",
        '{"name": "f", "arguments": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}",
    ],
)
def test_what_is_no_complete_call_stays_text_and_never_becomes_an_empty_one(json_text: str) -> None:
    text = f"so <tool_call>{json_text}</tool_call>"
    assert told(text) == (text, [])
    content, calls = told(f"{text}\n{GOOD}")
    assert calls == [("f", {"a": 1})] and content == text


def test_a_forced_call_begins_the_way_a_sampled_one_would() -> None:
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    assert forced_start(None) == forced_start(ToolUse(tools)) == ""
    assert told(forced_start(ToolUse(tools, "required")) + ' "f", "arguments": {"a": 1}}')[1] == [("f", {"a": 1})]
    assert told(forced_start(ToolUse(tools, "required", "f")) + ' {"a": 1}}')[1] == [("f", {"a": 1})]


def test_a_chat_with_tools_is_written_out_in_plain_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    chat = plain_messages(
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": "two"},
        ]
    )
    system, user, assistant, results = write_out(chat, [{"type": "function", "function": {"name": "f"}}])
    assert system["role"] == "system" and '{"type": "function", "function": {"name": "f"}}' in system["content"]
    assert user == {"role": "user", "content": "go"}
    assert told(assistant["content"]) == ("", [("f", {"a": 1})] * 2) and set(assistant) == {"role", "content"}
    assert results == {
        "role": "user",
        "content": "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>",
    }
