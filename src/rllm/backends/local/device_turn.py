"""Who gives the device work, where the sampler and a trainer of one process both do.

A pass that is captured as a graph must not see another capture begin, and weights that move must not be those of a pass half queued. So
whoever queues a step or a pass holds the device for that long, which is the host's time and not the device's: what is queued runs on.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext

from rllm.backends.local.language_model import LanguageModel


class FairLock:
    """A re-entrant lock that goes to who has waited longest. The sampler takes it again at once after each step, and with a plain lock a
    thread woken up for it would come too late every time."""

    def __init__(self) -> None:
        self._state = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Event]] = deque()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._state:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return
            mine = (me, threading.Event())
            self._waiting.append(mine)
        try:
            mine[1].wait()
        except BaseException:  # Ctrl-C in the main thread
            with self._state:
                given = mine not in self._waiting
                if not given:
                    self._waiting.remove(mine)
            if given:
                self._pass_on()
            raise

    def __exit__(self, *error: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._state:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, given = self._waiting.popleft()
                self._depth = 1
                given.set()


_DEVICE = FairLock()


def device_turn(model: LanguageModel) -> AbstractContextManager[None]:
    """Hold the device in a ``with`` of this, as long as work over `model` is queued. Waiting for the device is better done outside.
    There is nothing to hold for a model whose passes are not captured."""
    return _DEVICE if model.fused else nullcontext()
