"""Training on finished groups while other episodes of the step still run (``trainer.overlap``).

Knows when a group is complete; what its rows are and how they are trained is said where it is for all others. What was trained ahead is
checked against the step's rows once these are known, so that a row that turned out otherwise costs time and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rllm.backends.base import Datum, OverlappingBackend
from rllm.collect import Collected
from rllm.config.schema import Config
from rllm.types import Episode, Task
from rllm.update import PolicyUpdate, datums_of


class TrainAhead:
    """Of one step: `watch` before its episodes start, then `finish` or, if the step comes to nothing, `stop`."""

    def __init__(self, update: PolicyUpdate, backend: OverlappingBackend, config: Config, version: int):
        """`version` is that of the policy which will be trained."""
        self.update, self.backend, self.config, self.version = update, backend, config, version
        self.seconds = 0.0
        self._episodes: dict[str, list[Episode]] = {}
        self._lock = threading.Lock()
        self._waiting: deque[list[Datum]] = deque()
        self._trained: list[Datum] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="train-ahead")
        self._job: Future[None] | None = None
        self._ending = False

    def watch(self, tasks: Sequence[Task]) -> Callable[[Episode], None]:
        """Hear which tasks are coming, each ``rollout.n`` times; returns what wants to hear of each episode that ends."""
        self._episodes = {task.id: [] for task in tasks}
        return self._see

    def _see(self, episode: Episode) -> None:
        """Take an episode; the last one of a task makes its groups ready to be trained. Returns at once."""
        of_task = self._episodes.get(episode.task_id, [])
        of_task.append(episode)
        if len(of_task) != self.config.rollout.n:
            return
        found = Collected()
        # In the order in which they stand in the step, so that sums over a group give the same to the bit.
        found.add(sorted(of_task, key=lambda e: e.rollout_idx), self.config, self.version)
        rows = datums_of(found.groups, found.account, self.config)
        with self._lock:
            if rows:
                self._waiting.append(rows)
            if self._job is None and self._enough():
                self._job = self._worker.submit(self._work)

    def finish(self) -> list[Datum]:
        """The rows whose gradients are there, after the piece under way; those still waiting are left for the update of the others, which
        takes fewer passes."""
        with self._lock:
            self._ending, job = True, self._job
        try:
            if job is not None:
                job.result()
        finally:
            self._worker.shutdown()
        return self._trained

    def stop(self) -> None:
        """The step comes to nothing: no gradient stays."""
        with self._lock:
            self._ending = True
        self._worker.shutdown()
        self.update.backend.discard_gradients()

    def _enough(self) -> bool:
        return sum(len(row.ids) for rows in self._waiting for row in rows) >= self.backend.tokens_at_once

    def _work(self) -> None:
        while piece := self._next():
            started = time.monotonic()
            self.update.fill_ahead(piece)
            self.backend.train_ahead(piece, self.update.loss)
            self._trained += piece
            self.seconds += time.monotonic() - started

    def _next(self) -> list[Datum]:
        """Groups of as many tokens as are worth a pass; none where there are fewer, or none are wanted any more."""
        with self._lock:
            if self._ending or not self._enough():
                self._job = None if not self._ending else self._job
                return []
            piece: list[Datum] = []
            while self._waiting and sum(len(row.ids) for row in piece) < self.backend.tokens_at_once:
                piece += self._waiting.popleft()
            return piece
