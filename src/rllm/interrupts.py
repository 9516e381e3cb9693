"""Ctrl-C at a moment that can be saved.

Knows signals only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

WAITING = b"\nCtrl-C: finishing this update, then saving; Ctrl-C again ends at once, with nothing saved\n"


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """A Ctrl-C inside takes effect at the end; a second one ends the process at once. Outside of the main thread, or where Ctrl-C is
    ignored, this does nothing."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came = False

    def note(number: int, frame: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, WAITING)  # print() may be in the middle of something

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(signal.SIGINT, None)


@contextlib.contextmanager
def interrupts_kill() -> Iterator[None]:
    """A Ctrl-C inside ends the process at once: the first is being answered by saving."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
