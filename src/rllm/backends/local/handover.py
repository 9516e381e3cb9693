"""Hands what the sampler's thread says to the event loop that wants to hear it: one wake-up for all the tokens of a decode step.

Knows callbacks and event loops; nothing of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any


class Outbox:
    """Calls made in any thread run in `loop`, in their order. A loop that has ended drops them: nobody is left to hear."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def put(self, callback: Callable[..., None], *args: Any) -> None:
        self._waiting.append((callback, args))
        loop = self._loop()
        if not self._woken and loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before the queue is emptied, so that what is put meanwhile wakes the loop again
        while self._waiting:
            callback, args = self._waiting.popleft()
            callback(*args)


_outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Outbox] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def outbox_of_running_loop() -> Outbox:
    """The one outbox of the caller's event loop."""
    loop = asyncio.get_running_loop()
    with _lock:
        outbox = _outboxes.get(loop)
        if outbox is None:
            outbox = _outboxes[loop] = Outbox(loop)
    return outbox
