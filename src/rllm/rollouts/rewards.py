"""Runs a sync evaluator in a small pool of warm processes, so that one that never returns can be ended.

Knows evaluators and processes; nothing of sessions or training. Neither signals nor threads of this process are relied on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rllm.flow import Evaluator
from rllm.rollouts.reward_worker import Reference, read, write
from rllm.types import Episode, EvalOutput, Task

# A worker ends itself at its limit; this much later it is killed from here.
GRACE_S = 2.0
START_S = 60.0
# This process's own search path comes first, so that the child has the same rllm.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from rllm.rollouts.reward_worker import main; main()"
)


class RewardTimeout(Exception):
    """The evaluator did not return within ``rollout.reward_timeout_s``."""


class RewardError(Exception):
    """The evaluator failed in its process; the text is its traceback there."""


class _Worker:
    """One child process. Its calls block; `kill` from any other thread ends them."""

    def __init__(self, reference: Reference):
        command = [sys.executable, "-c", _START, json.dumps(reference.path)]
        # A socket, unlike a pipe, can be shut while another process holds its other end too: whatever the evaluator forked.
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True
            )
        self._to, self._from = self._socket.makefile("wb"), self._socket.makefile("rb")
        self._ready = self._ended = False
        self._ending = threading.Lock()
        with contextlib.suppress(OSError):
            write(self._to, reference)

    def call(self, body: bytes, limit_s: float) -> tuple[str, bytes | str]:
        """("done", pickle) or ("failed", traceback). `RewardTimeout` and `RewardError` mean that the worker is gone."""
        if not self._ready:
            try:
                self._exchange(START_S, None)
            except RewardTimeout:
                raise RewardError(f"the evaluator's process did not import its module within {START_S:g} s") from None
            self._ready = True
        return self._exchange(limit_s, body)

    def _exchange(self, limit_s: float, body: bytes | None) -> tuple[str, bytes | str]:
        started = time.monotonic()
        killer = threading.Timer(limit_s + GRACE_S, self.kill)
        killer.daemon = True
        killer.start()
        try:
            if body is not None:
                write(self._to, (limit_s, body))
            kind, value = read(self._from)
        except TimeoutError as error:
            self.kill()
            raise RewardTimeout(_stalled(str(error))) from None
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            self.kill()
            status = self._process.wait()
            if status == -signal.SIGKILL and time.monotonic() - started >= limit_s:
                raise RewardTimeout("") from None
            raise RewardError(f"the evaluator's process ended with status {status} before it gave a reward") from error
        finally:
            killer.cancel()
        if kind == "broken":
            self.kill()
            raise RewardError(f"the evaluator's module cannot be imported in its own process:\n{value}")
        return kind, value

    def kill(self) -> None:
        """End the process and those it started, now. May be called again, and from any thread."""
        with self._ending:
            if not self._ended:  # its id is its own until it was waited for
                self._ended = True
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self._to, self._from, self._socket):
            with contextlib.suppress(OSError):
                stream.close()


class RewardPool:
    """`workers` processes that each imported the evaluator's module; they start when first needed, or by `warm`."""

    def __init__(self, reference: Reference, workers: int):
        self.reference = reference
        self._free: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rllm-reward")
        self._size = workers

    def warm(self) -> None:
        """Start every process that is missing, without waiting for it."""
        with self._lock:
            for _ in range(self._size - len(self._all)):
                self._free.append(self._start())

    async def evaluate(self, task: Task, episode: Episode, limit_s: float) -> tuple[EvalOutput, Episode]:
        """What the evaluator gave, and the episode as it left it. The limit counts from when a process takes the call."""
        body = pickle.dumps((task, episode))
        taken: list[_Worker] = []
        future = self._threads.submit(self._call, body, limit_s, taken)
        try:
            kind, value = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            for worker in taken:
                worker.kill()
            raise
        if kind == "failed":
            raise RewardError(value)
        return pickle.loads(value)  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        """End every process and thread; calls under way fail."""
        with self._lock:
            self._closed = True
            workers, self._all, self._free = list(self._all), set(), []
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.close()

    def _call(self, body: bytes, limit_s: float, taken: list[_Worker]) -> tuple[str, bytes | str]:
        with self._lock:
            if self._closed:
                raise RewardError("the run is ending")
            worker = self._free.pop() if self._free else self._start()
        taken.append(worker)
        alive = False
        try:
            answer = worker.call(body, limit_s)
            alive = True
            return answer
        finally:
            taken.clear()
            with self._lock:
                if alive and not self._closed:
                    self._free.append(worker)
                else:
                    self._all.discard(worker)
            if not alive:
                worker.close()

    def _start(self) -> _Worker:
        worker = _Worker(self.reference)
        self._all.add(worker)
        return worker


def reference_to(evaluator: Evaluator) -> Reference | str:
    """Where a process can find `evaluator`, or why none can."""
    fn = evaluator.fn
    if inspect.iscoroutinefunction(fn):
        return "it is async: it waits in the event loop of the run, and its deadline counts at each await"
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    names = [name for name, value in vars(module).items() if value is evaluator or value is fn] if module else []
    if not isinstance(module, types.ModuleType) or not names:
        return "it is not a name at the top of a module (a lambda, a method, or made inside of a function)"
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" and (file is None or not _guards_its_start(Path(file))):
        return 'its script has no `if __name__ == "__main__":`, so importing it again would run all of it'
    path = None if file is None else str(Path(file).resolve())
    return Reference(module.__name__, path, names[0], tuple(sys.path))


def _guards_its_start(file: Path) -> bool:
    try:
        return "__name__" in file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _stalled(dump: str) -> str:
    """Where the evaluator was, from what `faulthandler` wrote: its frames, the outermost last."""
    lines = [line.strip() for line in dump.splitlines() if line.strip().startswith("File ")]
    own = [line for line in lines if f"{Path('rllm', 'flow.py')}" not in line and "reward_worker.py" not in line]
    return "\n".join(own[:8])
