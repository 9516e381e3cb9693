"""One team of worker threads at a time.

GNU OpenMP, which torch computes with on Linux, keeps a team for every thread that ever computed. Once these have more threads than
there are cores it puts every waiting worker to sleep at once, and waking one takes longer than most operations of a small model: a
decode step takes twice the time. So the thread that trains and the one that samples let go of their team when their turn ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

OMP_PAUSE_SOFT = 1
MAPS = Path("/proc/self/maps")


def release() -> None:
    """End the worker threads of the calling thread, which get new ones when it next computes (about 0.1 ms). Does nothing where torch
    uses another OpenMP."""
    pause = _pause()
    if pause is not None:
        pause(OMP_PAUSE_SOFT)


@contextmanager
def turn() -> Iterator[None]:
    """Computing in a ``with`` of this leaves no team behind."""
    try:
        yield
    finally:
        release()


@cache
def _pause() -> Callable[[int], int] | None:
    try:
        loaded = {line.split()[-1] for line in MAPS.read_text().splitlines() if "libgomp" in line}
        libraries = [ctypes.CDLL(path) for path in loaded]
        # More than one: which of them torch computes with cannot be told, and both may have teams.
        calls = [library.omp_pause_resource_all for library in libraries]
    except (OSError, AttributeError):
        return None
    return (lambda kind: max(call(kind) for call in calls)) if calls else None
