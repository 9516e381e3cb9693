"""The child process in which an evaluator runs: ``python -c "from rllm.rollouts.reward_worker import main; main()"``.

Reads requests from standard input and writes answers to standard output, each a length and a pickle. It leads a session of its own, so
that Ctrl-C does not reach it and its parent can end it with all that it started. Knows flows, nothing of models.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from rllm.flow import Evaluator

HEADER = struct.Struct(">Q")
# `faulthandler` writes this where a header would be when the time limit of a request is over; its text follows to the end.
STALLED = b"Timeout "


@dataclass(frozen=True)
class Reference:
    """Where an evaluator is found: a name in a module, which is imported by its name or, failing that, from its file."""

    module: str
    file: str | None
    attribute: str
    path: tuple[str, ...]

    def load(self) -> Evaluator:
        """The evaluator, after its module was imported here."""
        sys.path[:] = self.path
        found = getattr(self._import(), self.attribute)
        return found if isinstance(found, Evaluator) else Evaluator(found, self.attribute)

    def _import(self) -> ModuleType:
        if self.module != "__main__":
            with contextlib.suppress(ModuleNotFoundError):
                module = importlib.import_module(self.module)
                if self.file is None or Path(getattr(module, "__file__", None) or "").resolve() == Path(self.file):
                    return module
        assert self.file is not None
        # A script comes under a name that is not "__main__", so that it does not start its training here.
        name = "__rllm_main__" if self.module == "__main__" else self.module
        spec = importlib.util.spec_from_file_location(name, self.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if self.module == "__main__":  # what the script defines is pickled under this name
            sys.modules["__main__"] = module
        spec.loader.exec_module(module)
        return module


def write(stream: BinaryIO, message: Any) -> None:
    body = pickle.dumps(message)
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def read(stream: BinaryIO) -> Any:
    """The next message; `EOFError` where the other side has gone, `TimeoutError` with a traceback where it ran out of time."""
    header = stream.read(HEADER.size)
    if header == STALLED:
        raise TimeoutError(stream.read().decode("utf-8", "replace"))
    body = stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""
    if not body:
        raise EOFError
    return pickle.loads(body)


def main() -> None:
    """Load the evaluator, then answer requests until the parent goes. Prints of the evaluator go to standard error."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)

    def leave() -> None:
        """A process that the evaluator forks does not answer for it, nor keep its caller waiting."""
        for stream in (requests, answers):
            os.dup2(nothing, stream.fileno())

    os.register_at_fork(after_in_child=leave)
    reference: Reference = read(requests)
    try:
        evaluator = reference.load()
    except BaseException:
        write(answers, ("broken", traceback.format_exc()))
        return
    write(answers, ("ready", None))
    while True:
        try:
            limit_s, body = read(requests)
        except EOFError:
            return
        # A thread in C, which needs no interpreter lock: it ends this process whatever the evaluator is in.
        faulthandler.dump_traceback_later(limit_s, exit=True, file=answers)
        answer = _answer(evaluator, body)
        faulthandler.cancel_dump_traceback_later()
        write(answers, answer)


def _answer(evaluator: Evaluator, body: bytes) -> tuple[str, Any]:
    try:
        task, episode = pickle.loads(body)
        output = evaluator.evaluate(task, episode)
        return "done", pickle.dumps((output, episode))
    except (KeyboardInterrupt, SystemExit) as error:
        return "failed", f"the evaluator raised {type(error).__name__}\n{traceback.format_exc()}"
    except BaseException:
        return "failed", traceback.format_exc()
