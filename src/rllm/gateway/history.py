"""Which recorded call a chat goes on from, and what became of the histories that were rewritten.

Compares messages and tokens; knows no tokenizer. The caller holds the lock.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rllm.gateway.messages import canonical_json, same_calls
from rllm.types import Message

# A rewritten prompt is compared with this many of the latest calls of its trajectory.
COMPARED_CALLS = 8
Key = tuple[str | None, bytes]
"""(trajectory uid, digest of messages)"""


@dataclass(frozen=True)
class Rewrite:
    """A chat that holds an earlier answer, or an earlier prompt, and still does not go on from its tokens. From token `at` on the
    prompt differs from what was recorded: `recorded` there, `found` now (None: one of them ends). `by`: the ``template`` writes
    earlier turns otherwise, or the ``client`` changed the messages, the tools or the template's settings."""

    at: int
    recorded: int | None
    found: int | None
    by: Literal["template", "client"]


@dataclass
class History:
    """The chats of one session, to look up by what was said."""

    _by_chat: dict[Key, list[str]] = field(default_factory=lambda: defaultdict(list))
    _by_tool_call: dict[str, str] = field(default_factory=dict)
    _prompts: set[Key] = field(default_factory=set)
    _answers: set[Key] = field(default_factory=set)
    _sequences: dict[str | None, list[tuple[str, list[int]]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, call_id: str, trajectory: str | None, messages: Sequence[Message], answer: Message) -> None:
        """A chat and its answer."""
        chain = hashlib.blake2b(digest_size=16)
        for message in messages:
            chain.update(_said(message))
        self._prompts.add((trajectory, chain.digest()))
        forms = [answer]
        if answer.get("tool_calls"):
            forms.append({**answer, "content": ""})  # some agents keep the calls alone
        # Most clients do not send back what was told as a thought.
        forms += [{k: v for k, v in form.items() if k != "reasoning_content"} for form in forms]
        for form in {_said(form) for form in forms}:
            with_answer = chain.copy()
            with_answer.update(form)
            self._by_chat[trajectory, with_answer.digest()].append(call_id)
            self._answers.add((trajectory, _at(len(messages), form)))
        for tool_call in answer.get("tool_calls", ()):
            self._by_tool_call[tool_call["id"]] = call_id

    def add_tokens(self, call_id: str, trajectory: str | None, ids: list[int]) -> None:
        """Prompt and completion of a call, for comparison."""
        latest = self._sequences[trajectory]
        latest.append((call_id, ids))
        del latest[:-COMPARED_CALLS]

    def find(self, trajectory: str | None, messages: Sequence[Message]) -> tuple[str | None, int, bool]:
        """(the call whose messages and answer are the longest beginning of `messages`, how many messages these are, whether what
        follows holds anything of an earlier call). The call is None where there is no such beginning."""
        chain = hashlib.blake2b(digest_size=16)
        found: list[str] = []
        n, known = 0, False
        for i, message in enumerate(messages[:-1]):
            said = _said(message)
            before = chain.digest()
            chain.update(said)
            if message["role"] != "assistant":
                continue
            calls = self._by_chat.get((trajectory, chain.digest()))
            if calls:
                found, n, known = calls, i + 1, False
            elif not known:
                known = (trajectory, before) in self._prompts or (trajectory, _at(i, said)) in self._answers
        if not found:
            return None, 0, known
        named = (self._by_tool_call.get(call["id"]) for call in messages[n - 1].get("tool_calls", ()))
        return next((call for call in named if call in found), found[-1]), n, known

    def continued(self, trajectory: str | None, ids: list[int]) -> tuple[str | None, bool]:
        """(the latest call with whose tokens a prompt of token ids begins, whether none came after it)."""
        latest = self._sequences.get(trajectory, [])
        for call_id, known in reversed(latest):
            if ids[: len(known)] == known:
                return call_id, call_id == latest[-1][0]
        return None, False

    def first_difference(self, trajectory: str | None, ids: list[int]) -> tuple[int, int | None, int | None]:
        """(place, recorded token, token of `ids`) where `ids` leave the recorded sequence that they follow longest."""
        best: tuple[int, int | None, int | None] = (0, None, ids[0] if ids else None)
        for _, known in self._sequences.get(trajectory, ()):
            at = common_length(known, ids)
            if at >= best[0]:
                best = (at, known[at] if at < len(known) else None, ids[at] if at < len(ids) else None)
        return best


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices compare at the speed of C
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _said(message: Message) -> bytes:
    """What makes two messages the same: role, texts, calls by name and arguments; not ids, nor how arguments are written."""
    calls = message.get("tool_calls")
    said = [message["role"], message["content"], message.get("reasoning_content"), same_calls(calls) if calls else None]
    return canonical_json(said).encode() + b"\n"


def _at(position: int, said: bytes) -> bytes:
    return hashlib.blake2b(said, digest_size=16, salt=position.to_bytes(8, "big")).digest()
