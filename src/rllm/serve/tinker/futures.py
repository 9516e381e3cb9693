"""Results that are asked for later: every accepted request has an id, under which its result waits until it is fetched.

Lives in the server's event loop; knows nothing of what is computed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rllm.serve.tinker.errors import ApiError, Category

# How long a request for a result is held before the client is told to ask again; clients give up on one after 45 s.
HOLD_S = 25.0
# A result that was fetched stays a little, for a client whose connection broke; one that never was, longer.
FETCHED_KEEP_S, UNFETCHED_KEEP_S = 60.0, 3600.0
MAX_KEPT = 100_000


class Encodable(Protocol):
    def as_proto(self) -> bytes: ...

    def as_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Failure:
    """What went wrong and whose fault it is."""

    error: str
    category: Category

    def as_json(self) -> dict[str, Any]:
        return {"error": self.error, "category": self.category}


Result = Encodable | Failure | dict[str, Any]


@dataclass(eq=False)
class PendingResult:
    """One accepted request. `told` goes into the reply to it beside its id."""

    id: str
    told: dict[str, Any] = field(default_factory=dict)
    result: Result | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    forget_at: float = float("inf")
    cancel: Callable[[], object] | None = None

    def reply(self) -> dict[str, Any]:
        return {"request_id": self.id, **self.told}


class Futures:
    """All of them. A request with a key is accepted once: the same again gets the same future."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, PendingResult] = OrderedDict()
        self._by_key: dict[Hashable, tuple[str, PendingResult]] = {}
        self._keys: dict[str, Hashable] = {}

    def known(self, key: Hashable, digest: str) -> PendingResult | None:
        """The future that an earlier request with this key got; `ApiError` if that request was another."""
        if key not in self._by_key:
            return None
        earlier, future = self._by_key[key]
        if earlier != digest:
            raise ApiError(
                f"{key}: this sequence number was used before for another request; numbers may not be used twice"
            )
        return future

    def create(self, key: Hashable | None = None, digest: str = "", **told: Any) -> PendingResult:
        self._sweep()
        future = PendingResult(uuid.uuid4().hex, told)
        self._all[future.id] = future
        if key is not None:
            self._by_key[key], self._keys[future.id] = (digest, future), key
        return future

    def finish(self, future: PendingResult, result: Result) -> None:
        if future.result is None:
            future.result = result
            future.forget_at = time.monotonic() + UNFETCHED_KEEP_S
            future.cancel = None
            future.done.set()

    async def fetch(self, request_id: str) -> Result | None:
        """The result, awaited for up to `HOLD_S`; None: not yet. Raises `ApiError` (410) for an id that is not known."""
        future = self._all.get(request_id)
        if future is None:
            raise ApiError(
                f"no request {request_id!r}: its result was fetched long ago, or the server was started anew since", 410
            )
        if future.result is None:
            try:
                await asyncio.wait_for(future.done.wait(), HOLD_S)
            except TimeoutError:
                return None
        future.forget_at = min(future.forget_at, time.monotonic() + FETCHED_KEEP_S)
        return future.result

    def drop(self, future: PendingResult) -> None:
        """One whose request was refused after all."""
        self._all.pop(future.id, None)
        if (key := self._keys.pop(future.id, None)) is not None:
            self._by_key.pop(key, None)

    def cancel(self, request_id: str) -> None:
        """Stop the work for a request, if it can be stopped; unknown ones are left as they are."""
        future = self._all.get(request_id)
        if future is not None and future.cancel is not None:
            future.cancel()

    def __len__(self) -> int:
        return len(self._all)

    def _sweep(self) -> None:
        """Forget, from the oldest on, what has been kept long enough."""
        now = time.monotonic()
        for _ in range(8):  # a few at every new one: as many go as come
            if not self._all:
                return
            oldest = next(iter(self._all.values()))
            full = len(self._all) >= MAX_KEPT and oldest.result is not None
            if oldest.forget_at > now and not full:
                self._all.move_to_end(oldest.id)
                continue
            self.drop(oldest)
