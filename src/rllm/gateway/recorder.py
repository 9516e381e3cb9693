"""Sessions and the calls made in them: the exact tokens of every call, under its id.

Knows no HTTP and no model.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.algorithms.spec import DEFAULT_ADAPTER, INITIAL_ADAPTER, initial_of
from rllm.gateway.history import History, Rewrite
from rllm.types import Message, ModelOutput


@dataclass
class Call:
    """One recorded call. `order` counts the calls of a session as they began; `trajectory` is the uid it was tagged with.

    `extends` is the id of the call whose tokens its prompt goes on from; None: it starts a segment, a run of tokens of its own.
    `rewrote` says where a chat that continues an earlier one left its tokens. `apart`: the caller was told the thought beside the content.
    """

    output: ModelOutput
    messages: list[Message]
    trajectory: str | None
    order: int
    extends: str | None = None
    rewrote: Rewrite | None = None
    apart: bool = False
    as_sampled: list[Message] = field(default_factory=list, repr=False)
    """`messages` with each answer as it was sampled."""
    prompt_text: str = field(default="", repr=False)
    """What the template wrote for `as_sampled`."""
    frame: bytes = field(default=b"", repr=False)
    """A digest of what the template was given beside the messages: tools and settings."""

    @property
    def answer(self) -> Message:
        """The answer as a message, as the caller was given it."""
        output = self.output
        thought = {"reasoning_content": output.reasoning} if self.apart and output.reasoning else {}
        calls = {"tool_calls": output.tool_calls} if output.tool_calls else {}
        return {"role": "assistant", "content": output.content} | thought | calls


@dataclass
class Session:
    """One episode's window to the model. Safe to use from several threads.

    `roles` have an adapter each; empty: all share one. `adapter` then says which stage of them: as trained, or initial;
    any other name means that one adapter (or the base) for every call.
    """

    uid: str
    seed: int = 0
    is_validation: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = DEFAULT_ADAPTER
    roles: frozenset[str] = frozenset()
    _calls: dict[str, Call] = field(default_factory=dict)
    _history: History = field(default_factory=History)
    _asked: Counter[bytes] = field(default_factory=Counter)
    _orders: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def adapter_of(self, role: str | None) -> str:
        """Name of the adapter that calls of `role` are sampled with. `LookupError` where none is meant for it."""
        if self.adapter not in (DEFAULT_ADAPTER, INITIAL_ADAPTER):
            return self.adapter
        name = role if role in self.roles else DEFAULT_ADAPTER
        if self.roles and name not in self.roles:
            what = f"the role {role!r}" if role else "a call that names no role"
            raise LookupError(
                f"there is no adapter for {what}: lora.per_role has {', '.join(sorted(self.roles))}; call with "
                "model=config.model_for(role), or add an adapter for all other roles: lora.per_role.default={}"
            )
        return initial_of(name) if self.adapter == INITIAL_ADAPTER else name

    def next_order(self) -> int:
        """The place of a call that begins now."""
        return next(self._orders)

    def record(self, call: Call) -> None:
        """Keep `call`; later chats may go on from it if it has tokens."""
        output = call.output
        with self._lock:
            self._calls[output.id] = call
            if not output.prompt_ids:
                return
            if call.messages:
                self._history.add(output.id, call.trajectory, call.messages, call.answer)
            self._history.add_tokens(output.id, call.trajectory, [*output.prompt_ids, *output.completion_ids])

    def recorded(self) -> dict[str, Call]:
        """The calls that ended so far, by id, in the order in which they began."""
        with self._lock:
            calls = sorted(self._calls.values(), key=lambda call: call.order)
        return {call.output.id: call for call in calls}

    def next_seed(self, prompt_ids: tuple[int, ...], trajectory: str | None) -> int:
        """A seed for the next call with this prompt: the same seeds in every run. Parallel calls with one prompt, of one trajectory or of
        none, get theirs in the order in which they arrive: they are the same samples, but which call has which may differ."""
        key = hashlib.blake2b(repr((self.seed, trajectory, prompt_ids)).encode(), digest_size=16).digest()
        with self._lock:
            count = self._asked[key]
            self._asked[key] += 1
        digest = hashlib.blake2b(key + count.to_bytes(8, "big"), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def earlier(self, messages: list[Message], trajectory: str | None) -> tuple[Call | None, int, bool]:
        """(the call of this trajectory that `messages` go on from, how many messages it and its answer are, whether what follows
        holds anything of an earlier call)."""
        with self._lock:
            call_id, n, known = self._history.find(trajectory, messages)
            return self._calls.get(call_id) if call_id else None, n, known

    def continued(self, prompt_ids: list[int], trajectory: str | None) -> tuple[str | None, bool]:
        """(the call with whose tokens a prompt of token ids begins, whether it is the latest of this trajectory)."""
        with self._lock:
            return self._history.continued(trajectory, prompt_ids)

    def rewrite(self, prompt_ids: list[int], trajectory: str | None, by_template: bool) -> Rewrite:
        """Where a prompt leaves the tokens that were recorded."""
        with self._lock:
            at, recorded, found = self._history.first_difference(trajectory, prompt_ids)
        return Rewrite(at, recorded, found, "template" if by_template else "client")

    def counts(self) -> Counter[str]:
        """``calls``; ``segments``: calls that go on from no other, or from one that another went on from before; ``rewritten``: calls
        whose chat holds something of an earlier one and does not have its tokens."""
        calls = self.recorded().values()
        continued: set[str] = set()
        segments = 0
        for call in calls:
            segments += call.extends is None or call.extends in continued
            if call.extends is not None:
                continued.add(call.extends)
        return Counter(calls=len(calls), segments=segments, rewritten=sum(call.rewrote is not None for call in calls))
