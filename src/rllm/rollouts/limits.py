"""A backend whose calls are limited: how many tokens are in flight at once, and how long one call may take.

Knows the backend's `sample`; everything else is passed through.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rllm.backends.base import DEFAULT_ADAPTER, Backend, Completion, SamplingParams
from rllm.gateway.errors import CALL_TIMEOUT, RequestError


class TokenBudget:
    """At most `limit` tokens are taken at once. First come, first served, so a large call is not starved by small ones.

    Safe to use from several threads and event loops. A call that alone is larger than the limit runs when nothing else does.
    """

    def __init__(self, limit: int):
        self.limit, self.taken = limit, 0
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._lock = threading.Lock()

    async def take(self, tokens: int) -> int:
        """Wait until `tokens` are free; returns what to give back."""
        need = min(tokens, self.limit)
        turn: Future[None] = Future()
        with self._lock:
            self._waiting.append((need, turn))
        self._admit()
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # its turn came at the same moment
                self.give(need)
            else:
                self._admit()
            raise
        return need

    def give(self, tokens: int) -> None:
        with self._lock:
            self.taken -= tokens
        self._admit()

    def _admit(self) -> None:
        ready: list[Future[None]] = []
        with self._lock:
            while self._waiting:
                need, turn = self._waiting[0]
                if turn.cancelled():
                    self._waiting.popleft()
                elif self.taken + need <= self.limit:
                    self._waiting.popleft()
                    if turn.set_running_or_notify_cancel():
                        self.taken += need
                        ready.append(turn)
                else:
                    break
        for turn in ready:
            turn.set_result(None)


class LimitedBackend:
    """`backend` with limits on `sample`. All other names are the backend's own."""

    def __init__(self, backend: Backend, budget: TokenBudget | None, call_timeout_s: float | None):
        self._backend, self.budget, self.call_timeout_s = backend, budget, call_timeout_s

    @classmethod
    def over(cls, backend: Backend, max_tokens: int | None, call_timeout_s: float | None) -> Any:
        """`backend` itself where there is nothing to limit."""
        if max_tokens is None and call_timeout_s is None:
            return backend
        return cls(backend, TokenBudget(max_tokens) if max_tokens else None, call_timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str = DEFAULT_ADAPTER, **more: Any
    ) -> Completion:
        """The backend's answer. Past the deadline the call is cancelled, its slot is free, and the caller is told so with a 504."""
        deadline = asyncio.timeout(self.call_timeout_s)
        try:
            async with deadline:
                return await self._within_budget(prompt_ids, params, adapter, more)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RequestError(
                f"no answer within {self.call_timeout_s:g} s (rollout.call_timeout_s)", code=CALL_TIMEOUT, status=504
            ) from error

    async def _within_budget(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str, more: dict[str, Any]
    ) -> Completion:
        if self.budget is None:
            return await self._backend.sample(prompt_ids, params, adapter, **more)
        taken = await self.budget.take(len(prompt_ids) + params.max_tokens)
        try:
            return await self._backend.sample(prompt_ids, params, adapter, **more)
        finally:
            self.budget.give(taken)
