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
from rllm.types import Message, ModelOutput


@dataclass
class Call:
    """One recorded call. `order` counts the calls of a session as they began; `trajectory` is the uid it was tagged with."""

    output: ModelOutput
    messages: list[Message]
    trajectory: str | None
    order: int


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
        with self._lock:
            self._calls[call.output.id] = call

    def recorded(self) -> dict[str, Call]:
        """The calls that ended so far, by id, in the order in which they began."""
        with self._lock:
            calls = sorted(self._calls.values(), key=lambda call: call.order)
        return {call.output.id: call for call in calls}

    def next_seed(self, prompt_ids: tuple[int, ...], trajectory: str | None) -> int:
        """A seed for the next call with this prompt: the same in every run, whatever order parallel calls arrive in."""
        key = hashlib.blake2b(repr((self.seed, trajectory, prompt_ids)).encode(), digest_size=16).digest()
        with self._lock:
            count = self._asked[key]
            self._asked[key] += 1
        digest = hashlib.blake2b(key + count.to_bytes(8, "big"), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def longest_extended(self, messages: list[Message], trajectory: str | None) -> Call | None:
        """The latest call of this trajectory whose messages and answer are the beginning of `messages`."""
        best: Call | None = None
        for call in self.recorded().values():
            n = len(call.messages)
            if call.trajectory != trajectory or not 0 < n < len(messages) or (best and n < len(best.messages)):
                continue
            answer = {"role": "assistant", "content": call.output.content}
            if messages[n] == answer and messages[:n] == call.messages:
                best = call
        return best
