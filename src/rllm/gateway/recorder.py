"""Sessions and the calls made in them: the exact tokens of every call, under its id.

Knows no HTTP and no model.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.algorithms.spec import DEFAULT_ADAPTER
from rllm.types import Message, ModelOutput


@dataclass
class Call:
    """One recorded call, in the order in which calls ended."""

    output: ModelOutput
    messages: list[Message]
    trajectory: str | None


@dataclass
class Session:
    """One episode's window to the model."""

    uid: str
    seed: int = 0
    is_validation: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = DEFAULT_ADAPTER
    calls: dict[str, Call] = field(default_factory=dict)
    _asked: Counter[bytes] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, call: Call) -> None:
        with self._lock:
            self.calls[call.output.id] = call

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
        with self._lock:
            for call in self.calls.values():
                n = len(call.messages)
                if call.trajectory != trajectory or n >= len(messages) or (best and n < len(best.messages)):
                    continue
                answer = messages[n]
                if (
                    messages[:n] == call.messages
                    and answer.get("role") == "assistant"
                    and answer.get("content") == call.output.content
                ):
                    best = call
        return best
