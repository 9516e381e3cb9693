"""Watches an event loop from a thread: says where a flow blocks it, and ends Python code that blocks it for too long.

An async flow that computes or waits without `await` stops every other episode; no deadline of the loop can then be kept.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Self

logger = logging.getLogger(__name__)
BEAT_S = 0.25
WARN_S = 5.0
# A machine with much to do may let a loop wait for this long although nobody blocks it.
LEAST_S = 2.0


class BlockedLoop(Exception):
    """Raised inside the code that blocked the event loop for longer than half of ``rollout.episode_timeout_s``."""


class Watchdog:
    """For the time of a ``with`` block inside of the loop that is watched.

    Blocked for `WARN_S` seconds: a warning with the place. Blocked for `limit_s`: `BlockedLoop` is raised there, which ends a loop
    written in Python at its next line; one long call (``time.sleep``, a socket) goes on until it returns by itself, as nothing in
    Python can end it from outside.
    """

    def __init__(self, limit_s: float):
        self.limit_s = max(limit_s, LEAST_S)
        self._beat = time.monotonic()
        self._over = threading.Event()
        self._warned, self._raised = 0.0, -math.inf

    def __enter__(self) -> Self:
        self._loop, self._watched = asyncio.get_running_loop(), threading.get_ident()
        self._pulse()
        threading.Thread(target=self._watch, name="rllm-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _pulse(self) -> None:
        self._beat = time.monotonic()
        if not self._over.is_set():
            self._loop.call_later(BEAT_S, self._pulse)

    def _watch(self) -> None:
        while not self._over.wait(BEAT_S):
            beat = self._beat
            blocked = time.monotonic() - beat
            if blocked < min(WARN_S, self.limit_s):
                continue
            frame = sys._current_frames().get(self._watched)
            if frame is None or not _runs_a_callback(frame):
                continue
            if self._warned != beat:
                self._warned = beat
                logger.warning(
                    "a flow has blocked the event loop for %.0f s, so no other episode goes on; await what it waits for, or make the "
                    "flow a plain `def` (it then runs in a thread). It is at\n%s",
                    blocked,
                    _place(frame),
                )
            # Not by the beat alone: another flow may block in the same turn of the loop, before it beats again.
            if blocked >= self.limit_s and time.monotonic() - self._raised >= self.limit_s and self._beat == beat:
                self._raised = time.monotonic()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._watched), ctypes.py_object(BlockedLoop))


def _runs_a_callback(frame: FrameType | None) -> bool:
    """Whether the loop is in somebody's code, and not at its own work of waiting for events."""
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_code.co_filename == asyncio.events.__file__:
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType) -> str:
    return "".join(traceback.format_stack(frame)[-3:]).rstrip()
