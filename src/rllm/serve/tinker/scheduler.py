"""One thread that does the model's training work, fairly: the tenant that has had the least time goes first.

Knows jobs and tenants; nothing of what jobs do.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from rllm.serve.tinker.errors import ApiError

MAX_WAITING = 4096
"""Jobs that may wait at once, over all tenants."""
CREDIT_S = 5.0
"""How far a tenant that had nothing to do may be behind the others when it comes back, and so goes before them."""


class Scheduler:
    """`submit` from any thread. The jobs of one tenant run in the order given; between tenants the one that was served the shortest time
    so far is next (one that comes anew starts level with the one served last). Use `close` at the end."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[tuple[Callable[[], Any], Future[Any]]]] = {}
        self._served_s: dict[Hashable, float] = {}
        # What the tenant served last had been served before: where those at work are, also while nobody waits.
        self._level_s = 0.0
        self._waiting = 0
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="rllm-tinker-train", daemon=True)
        self._thread.start()

    def submit(self, tenant: Hashable, job: Callable[[], Any]) -> Future[Any]:
        """The future of ``job()``."""
        future: Future[Any] = Future()
        with self._wake:
            if self._closed:
                raise ApiError("the server is stopping", 503)
            queue = self._queues.setdefault(tenant, deque())
            if not queue:
                self._served_s[tenant] = max(self._served_s.get(tenant, self._level_s), self._level_s - CREDIT_S)
            queue.append((job, future))
            self._waiting += 1
            self._wake.notify()
        return future

    def check_room(self) -> None:
        """Raises `ApiError` (429) when too many jobs wait for one more to be taken in."""
        if self._waiting >= MAX_WAITING:
            raise ApiError(f"{self._waiting} training requests are waiting; try again in a moment", 429)

    def forget(self, tenant: Hashable) -> None:
        """A tenant that will not come back; its waiting jobs are cancelled."""
        with self._wake:
            for _, future in self._queues.pop(tenant, ()):
                self._waiting -= 1
                future.cancel()
            self._served_s.pop(tenant, None)

    def served_s(self) -> dict[Hashable, float]:
        """Seconds of work done for each tenant."""
        with self._wake:
            return dict(self._served_s)

    def close(self) -> None:
        """End the thread after the job under way; those that wait are cancelled."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        for queue in self._queues.values():
            for _, future in queue:
                future.cancel()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                ready = [tenant for tenant, queue in self._queues.items() if queue]
                tenant = min(ready, key=lambda name: self._served_s[name])
                self._level_s = max(self._level_s, self._served_s[tenant])
                job, future = self._queues[tenant].popleft()
                self._waiting -= 1
            if not future.set_running_or_notify_cancel():
                continue
            started = time.perf_counter()
            try:
                future.set_result(job())
            except Exception as error:  # a job's failure is its caller's to tell
                future.set_exception(error)
            with self._wake:
                if tenant in self._served_s:
                    self._served_s[tenant] += time.perf_counter() - started


class Lane:
    """Puts what arrives out of order in order: requests numbered 1, 2, 3, ... are released one after the other. Used in one thread."""

    def __init__(self, first: int = 1, most_held: int = 1024):
        self.next, self.most_held = first, most_held
        self._held: dict[int, Callable[[], None]] = {}

    def enter(self, number: int | None, release: Callable[[], None]) -> None:
        """Call `release` when its turn has come; without a number that is now. Raises `ApiError` for a number that had its turn."""
        if number is None:
            release()
            return
        if number < self.next or number in self._held:
            raise ApiError(f"seq_id {number} was used before; the next is {self.next}")
        if number > self.next and len(self._held) >= self.most_held:
            raise ApiError(f"{len(self._held)} requests wait for seq_id {self.next}; send that one first", 429)
        self._held[number] = release
        while self.next in self._held:
            go = self._held.pop(self.next)
            self.next += 1
            go()

    def skip(self, number: int | None) -> None:
        """A request that was refused had its turn: those after it must not wait for it."""
        if number is not None and number >= self.next and number not in self._held:
            self.enter(number, lambda: None)

    @property
    def held(self) -> int:
        return len(self._held)


class FairSlots:
    """A number of places to work at once. Who waits gets the next free one when its tenant holds the fewest. Lives in one event loop."""

    def __init__(self, slots: int, most_waiting: int):
        self.free, self.most_waiting = slots, most_waiting
        self._held: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, deque[Any]] = {}

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def check_room(self, wanted: int) -> None:
        """Raises `ApiError` (429) when so many more would be too many waiting."""
        if self.waiting + wanted > self.most_waiting + self.free:
            raise ApiError(f"{self.waiting} completions are waiting to be sampled; try again in a moment", 429)

    async def take(self, tenant: Hashable) -> None:
        if self.free and not self._waiting:
            self._give(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(tenant)
            raise

    def give_back(self, tenant: Hashable) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self.free += 1
        while self.free and self._waiting:
            name = min(self._waiting, key=lambda tenant: self._held.get(tenant, 0))
            turn = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            if not turn.done():
                self._give(name)
                turn.set_result(None)

    def _give(self, tenant: Hashable) -> None:
        self.free -= 1
        self._held[tenant] = self._held.get(tenant, 0) + 1
