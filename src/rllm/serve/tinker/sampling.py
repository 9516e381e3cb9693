"""Sampling for many at once: which adapters the engine holds, whose turn it is, and what of the prompt is wanted besides.

Knows engine and scheduler; nothing of HTTP. Lives in the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil
import torch

from rllm.backends.base import BASE, Completion, OnToken, SamplingParams
from rllm.backends.local.engine import Engine
from rllm.backends.local.scoring import ScoreQuery, Scores, score
from rllm.lora.adapter import LowRankPairs
from rllm.serve.tinker.scheduler import FairSlots, Scheduler
from rllm.serve.tinker.wire import EMPTY_LOGPROB, Sampled, SampleOutput, SparseTensor

# Completions that may wait for a place, over all tenants; beyond, clients are told to come back.
MOST_WAITING = 16384
# What adapters that are sampled may take: this share of the memory they are in, and no more than 4 GiB.
ADAPTER_SHARE, MOST_ADAPTER_BYTES = 1 / 32, 4 * 2**30


def adapter_bytes(device: torch.device) -> int:
    """Memory for the adapters that samplers use."""
    cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if cuda else psutil.virtual_memory().total
    return min(int(total * ADAPTER_SHARE), MOST_ADAPTER_BYTES)


class AdapterPool:
    """Adapters by the path of their checkpoint, read when first used; those used least lately go when they take more than `most_bytes`.
    `fixed` are names that the engine has anyway."""

    def __init__(self, engine: Engine, read: Callable[[str], LowRankPairs], most_bytes: int):
        self.engine, self.read, self.most_bytes = engine, read, most_bytes
        self.fixed = frozenset(engine.adapters)
        self._held: OrderedDict[str, LowRankPairs] = OrderedDict()
        self._used: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def use(self, path: str | None) -> AsyncIterator[tuple[str, LowRankPairs | None]]:
        """(the engine's name of an adapter, its matrices) as long as the block runs; path None: the base."""
        if path is None or path in self.fixed:
            yield path or BASE, None
            return
        if path not in self._held:
            async with self._lock:
                if path not in self._held:
                    await self._hold(path, await asyncio.to_thread(self.read, path))
        self._held.move_to_end(path)
        self._used[path] += 1
        pairs = self._held[path]
        try:
            yield path, pairs
        finally:
            self._used[path] -= 1
            if not self._used[path]:
                del self._used[path]

    async def put(self, path: str, pairs: LowRankPairs) -> None:
        """Hold these from now on, in place of what was held under that path."""
        async with self._lock:
            await self._hold(path, pairs)

    def in_use(self, path: str) -> bool:
        """Whether anything is being sampled with it."""
        return self._used[path] > 0

    async def drop(self, path: str) -> None:
        """A checkpoint that is no more. What is being sampled from it fails."""
        async with self._lock:
            if self._held.pop(path, None) is not None:
                await asyncio.to_thread(self.engine.update, {}, [path])

    def clear(self) -> None:
        """After the event loop has ended: the engine is as it was."""
        self.engine.update({}, list(self._held))
        self._held.clear()

    def paths(self) -> list[str]:
        return list(self._held)

    async def _hold(self, path: str, pairs: LowRankPairs) -> None:
        over = pairs.nbytes + sum(held.nbytes for name, held in self._held.items() if name != path) - self.most_bytes
        gone: list[str] = []
        for name, held in self._held.items():
            if over <= 0:
                break
            if name != path and not self._used[name]:
                gone.append(name)
                over -= held.nbytes
        for name in gone:
            del self._held[name]
        await asyncio.to_thread(self.engine.update, {path: pairs}, gone)
        self._held[path] = pairs  # not before the engine has it, since who finds it here asks the engine for it


@dataclass(frozen=True)
class PromptQuery:
    """What is wanted of the prompt and of the sampled tokens besides the completions. Numbers are 0 and flags off where nothing is."""

    logprobs: bool = False
    top_k: int = 0
    last: int | None = None
    targets: np.ndarray | SparseTensor | None = None
    draws: int = 0
    sample_top_k: int = 0

    @property
    def of_prompt(self) -> bool:
        return bool(self.logprobs or self.top_k or self.targets is not None or self.draws)


class Sampler:
    """Completions for tenants, a fair share each."""

    def __init__(self, engine: Engine, pool: AdapterPool, scheduler: Scheduler):
        self.engine, self.pool, self.scheduler = engine, pool, scheduler
        # Somewhat more than run at once, so that the engine never waits for this loop.
        self.slots = FairSlots(2 * engine.max_batch, MOST_WAITING)

    async def complete(
        self,
        tenant: Hashable,
        path: str | None,
        prompt: tuple[int, ...],
        params: SamplingParams,
        on_token: OnToken | None = None,
    ) -> Completion:
        """One completion."""
        async with self.pool.use(path) as (name, _):
            await self.slots.take(tenant)
            try:
                return await self.engine.sample(prompt, params, name, on_token)
            finally:
                self.slots.give_back(tenant)

    async def sample(
        self,
        tenant: Hashable,
        path: str | None,
        prompt: tuple[int, ...],
        params: SamplingParams,
        n: int,
        query: PromptQuery,
    ) -> SampleOutput:
        """`n` completions of one prompt. With a seed, the first is that of n = 1."""
        async with self.pool.use(path) as (_, pairs):
            asked = [self.complete(tenant, path, prompt, params.of_choice(i)) for i in range(n)]
            of_prompt = self._score(tenant, pairs, _prompt_query(prompt, params, query)) if query.of_prompt else None
            wanted = [asyncio.ensure_future(work) for work in (*asked, *([of_prompt] if of_prompt else []))]
            try:
                results = await asyncio.gather(*wanted)
            finally:
                for task in wanted:
                    task.cancel()
            completions = [result for result in results if isinstance(result, Completion)]
            scores = next((result for result in results if isinstance(result, Scores)), None)
            tops: list[tuple[np.ndarray, np.ndarray] | None] = [None] * n
            if query.sample_top_k:
                for i, completion in enumerate(completions):
                    own = ScoreQuery(
                        (*prompt, *completion.ids),
                        len(prompt),
                        query.sample_top_k,
                        temperature=params.temperature,
                        tempered=True,
                    )
                    tops[i] = _top(await self._score(tenant, pairs, own), query.sample_top_k)
        sequences = [
            Sampled("stop" if c.finish_reason == "stop" else "length", c.ids, c.logprobs, top)
            for c, top in zip(completions, tops, strict=True)
        ]
        return _output(sequences, len(prompt), query, scores)

    async def _score(self, tenant: Hashable, pairs: LowRankPairs | None, query: ScoreQuery) -> Scores:
        work = partial(score, self.engine.model, pairs, query)
        return await asyncio.wrap_future(self.scheduler.submit(tenant, work))


def _prompt_query(prompt: tuple[int, ...], params: SamplingParams, query: PromptQuery) -> ScoreQuery:
    everything = query.targets is not None or query.draws
    first = 1 if everything or query.last is None else len(prompt) - query.last
    targets = query.targets.dense(-1) if isinstance(query.targets, SparseTensor) else query.targets
    return ScoreQuery(
        prompt, first, query.top_k, targets, query.draws, params.temperature, seed=(params.seed or 0) % 2**63
    )


def _output(sequences: list[Sampled], length: int, query: PromptQuery, scores: Scores | None) -> SampleOutput:
    if scores is None:
        return SampleOutput(sequences)
    unscored = length - (query.last or length - 1)  # the first place at least, and what comes before the last N
    logprobs = top = targets = draws = None
    if query.logprobs:
        logprobs = np.concatenate([np.full(length - len(scores.logprobs), np.nan, np.float32), scores.logprobs])
        logprobs[:unscored] = np.nan
    if query.top_k and scores.top_ids is not None:
        ids, values = _top(scores, query.top_k)
        missing = length - len(ids)
        ids = np.concatenate([np.zeros((missing, ids.shape[1]), ids.dtype), ids])
        values = np.concatenate([np.full((missing, ids.shape[1]), EMPTY_LOGPROB, values.dtype), values])
        ids[:unscored], values[:unscored] = 0, EMPTY_LOGPROB
        top = (ids, values)
    elif query.top_k:
        top = (np.zeros((length, query.top_k), np.int64), np.full((length, query.top_k), EMPTY_LOGPROB, np.float32))
    if scores.targets is not None:
        targets = query.targets.like(scores.targets) if isinstance(query.targets, SparseTensor) else scores.targets
    if scores.drawn is not None and scores.drawn_logprobs is not None:
        draws = (scores.drawn, scores.drawn_logprobs)
    return SampleOutput(sequences, logprobs, top, targets, draws)


def _top(scores: Scores, k: int) -> tuple[np.ndarray, np.ndarray]:
    if scores.top_ids is None or scores.top_logprobs is None:  # of no tokens
        return np.zeros((0, k), np.int64), np.zeros((0, k), np.float32)
    return scores.top_ids, scores.top_logprobs
