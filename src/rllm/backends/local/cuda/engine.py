"""The sampler on CUDA: the same requests and rules as everywhere, over pages, graphs and steps queued ahead of the host.

The host reads a step's tokens while the device works on the next ones, so scheduling and stop checks cost the device nothing; a sequence
that ends is noticed a step or two later, and what was drawn for it in between is thrown away.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rllm.backends.local.cuda.bank import AdapterBank
from rllm.backends.local.cuda.decode import Cut, DecodeStep, RowState
from rllm.backends.local.cuda.pages import PAGE, PagePool, pages_for
from rllm.backends.local.cuda.prefill import Prefill
from rllm.backends.local.device_turn import device_turn
from rllm.backends.local.engine import PREFILL_TOKENS, Engine
from rllm.backends.local.language_model import LowRank
from rllm.backends.local.model import Decoder
from rllm.backends.local.requests import Request, fail
from rllm.backends.local.transfer import to_device
from rllm.lora.adapter import LowRankPairs

STEPS_AHEAD = 2
"""Steps queued on the device before the host waits for the first of them."""
CACHED_SHARE = 0.25
"""Share of the pages that prompts nobody uses at the moment may keep."""


@dataclass
class _Prompt:
    """A prompt that was read: its pages, the last of which may be partly filled, and the logits [vocab] after its last token."""

    pages: list[int]
    length: int
    logits: Tensor


@dataclass
class _Queued:
    """A step under way: whose rows it draws for, and where its result will be."""

    requests: Sequence[Request | None]
    version: int
    result: Tensor
    ready: Any


@dataclass(eq=False)
class _Row:
    """What the host knows of a row of the running batch."""

    request: Request
    pages: list[int]
    shared: int
    """Of the pages, the first that others may share: those that its prompt fills."""
    queued: int = 1


class CudaEngine(Engine):
    """See `Engine`. Takes a decoder that is `fused`."""

    model: Decoder

    def _prepare(self) -> None:
        config, device = self.model.config, self.model.device
        per_page = PagePool.bytes_per_page(config, self.model.embed.element_size())
        longest = pages_for(self.max_model_len)
        wanted = (self.max_batch + 2) * (longest + 1)
        pages = max(2 * longest + 2, min(wanted, self.kv_bytes // per_page))
        self._pool = PagePool(config, self.model.dtype, device, pages)
        self._state = RowState.empty(self.max_batch, longest + 1, device)
        self._bank = AdapterBank(self.model)
        self._step = DecodeStep(self.model, self._bank, self._pool, self._state, self.max_model_len)
        self._prefill = Prefill(self.model, self._bank, self._pool)
        self._rows: list[_Row | None] = []
        self._live: set[Request] = set()
        self._steps: deque[_Queued] = deque()
        self._prompts: OrderedDict[tuple[str, tuple[int, ...]], _Prompt] = OrderedDict()
        self._cached_pages = 0
        self._most_cached = int(pages * CACHED_SHARE)

    def close(self) -> None:
        super().close()
        # Graphs first: they hold addresses of the others.
        del self._step, self._prefill, self._state, self._bank, self._pool
        self._prompts.clear()
        self._steps.clear()

    def holds(self, name: str, pairs: LowRankPairs) -> bool:
        return super().holds(name, pairs) and self._bank.equals(name, pairs)

    def kv_bytes_of(self, sequences: int, tokens: int) -> int:
        return (
            sequences * pages_for(tokens) * PagePool.bytes_per_page(self.model.config, self.model.embed.element_size())
        )

    # Adapters

    def _adopt(self, adapters: Mapping[str, LowRank | None]) -> None:
        if self._bank.publish(adapters):
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._step.forget_graphs()
        self._prefill.forget_graphs()

    def _forget_prefixes(self, adapters: Collection[str] | None = None) -> None:
        for key in [key for key in self._prompts if adapters is None or key[0] in adapters]:
            prompt = self._prompts.pop(key)
            self._pool.release(prompt.pages)
            self._cached_pages -= len(prompt.pages)

    # Rows

    def _set_running(self, requests: list[Request]) -> None:
        """Keep only these; the base asks for it where a step failed."""
        kept = set(requests)
        self._release([i for i, row in enumerate(self._rows) if row is not None and row.request not in kept])
        self._steps.clear()

    def _remove(self, slots: Sequence[int]) -> None:
        gone = {self._running[slot] for slot in slots}
        self._release([i for i, row in enumerate(self._rows) if row is not None and row.request in gone])

    def _release(self, rows: Sequence[int]) -> None:
        """These rows belong to no one: their pages are free for whoever is admitted next, and they write to the spare page."""
        for i in rows:
            row = self._rows[i]
            assert row is not None
            self._pool.release(row.pages)
            self._live.discard(row.request)
            self._rows[i] = None
        if not self._live:
            self._rows = []
            self._state.clear(0)
        elif rows:
            self._state.table.index_fill_(0, to_device(list(rows), self.model.device), 0)
        self._running = [row.request for row in self._rows if row is not None]

    def _compact(self) -> None:
        """Close the holes."""
        order = [i for i, row in enumerate(self._rows) if row is not None]
        if len(order) != len(self._rows):
            self._state.reorder(order)
            self._rows = [self._rows[i] for i in order]
            self._group()

    def _group(self) -> None:
        """Tell the device which rows share pages."""
        rows = [row.pages[: row.shared] if row is not None else [] for row in self._rows]
        self._state.groups.set(rows)

    # Joining

    def _next_requests(self) -> list[Request]:
        fresh: list[Request] = []
        need = 0
        while self._waiting and len(self._live) + len(fresh) < self.max_batch:
            request = self._waiting[0]
            if not request.future.cancelled():
                need += pages_for(request.final_length) + pages_for(len(request.prompt)) + 1
                if need > self._pool.free + self._cached_pages and (fresh or self._live):
                    break
                fresh.append(request)
            self._waiting.popleft()
        if need > self._pool.free:
            self._forget_prefixes()
        return fresh

    def _admit(self) -> None:
        fresh = self._next_requests()
        if not fresh:
            return
        try:
            self._join(fresh)
        except Exception as error:
            for request in fresh:
                fail(request, error)
            self._release([i for i, row in enumerate(self._rows) if row is not None and row.request in set(fresh)])

    def _join(self, fresh: list[Request]) -> None:
        self._compact()
        running = {row.request.adapter for row in self._rows if row is not None}
        if self._bank.ensure(self.adapters, {request.adapter for request in fresh}, running):
            self._forget_graphs()
        fresh = sorted(fresh, key=lambda request: (request.adapter, request.prompt))  # a group's rows stand together
        prompts = self._read(dict.fromkeys((request.adapter, request.prompt) for request in fresh))
        first = len(self._rows)
        copies: list[tuple[int, int]] = []
        for request in fresh:
            prompt = prompts[request.adapter, request.prompt]
            shared = prompt.pages[: prompt.length // PAGE]
            self._pool.share(shared)
            own = self._pool.take(pages_for(request.final_length) - len(shared))
            if prompt.length % PAGE:
                copies.append((prompt.pages[-1], own[0]))
            self._rows.append(_Row(request, shared + own, len(shared)))
            self._live.add(request)
        if copies:
            self._pool.copy(*zip(*copies, strict=True))
        self._running = [row.request for row in self._rows if row is not None]
        self._fill_state(first, fresh)
        self._group()
        logits = torch.stack([prompts[request.adapter, request.prompt].logits for request in fresh])
        result = self._step.draw(logits, first, len(fresh), self._cut(fresh, [0] * len(fresh)))
        self._queue(list(fresh), result)
        self._trim_cache()

    def _fill_state(self, first: int, fresh: Sequence[Request]) -> None:
        s, device = self._state, self.model.device
        rows = slice(first, first + len(fresh))

        def put(target: Tensor, values: list[Any]) -> None:
            target[rows] = to_device(values, device, target.dtype)

        put(s.positions, [len(request.prompt) - 1 for request in fresh])
        put(s.counts, [0] * len(fresh))
        put(s.adapters, [self._bank.number(request.adapter) for request in fresh])
        put(s.temperatures, [request.params.temperature or 1.0 for request in fresh])
        put(s.greedy, [int(request.params.temperature == 0) for request in fresh])
        put(s.seeds, [request.seed for request in fresh])
        table = torch.zeros(len(fresh), s.table.shape[1], dtype=torch.int32)
        for i, row in enumerate(self._rows[first:]):
            assert row is not None
            table[i, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
        s.table[rows] = to_device(table, device)

    def _read(self, keys: Mapping[tuple[str, tuple[int, ...]], None]) -> dict[tuple[str, tuple[int, ...]], _Prompt]:
        """Every prompt read once: from the cache or computed, packed under a token budget, of all adapters together."""
        found: dict[tuple[str, tuple[int, ...]], _Prompt] = {}
        missing: list[tuple[str, tuple[int, ...]]] = []
        for key in keys:
            if key in self._prompts:
                self._stats["prefix_hits"] += 1
                self._prompts.move_to_end(key)
                found[key] = self._prompts[key]
            else:
                missing.append(key)
        for batch in _packed(missing, PREFILL_TOKENS[self.model.device.type]):
            for key, read in zip(batch, self._read_batch(batch), strict=True):
                found[key] = self._prompts[key] = read
                self._cached_pages += len(read.pages)
        return found

    def _read_batch(self, keys: Sequence[tuple[str, tuple[int, ...]]]) -> list[_Prompt]:
        prompts = [prompt for _, prompt in keys]
        pages = [self._pool.take(pages_for(len(prompt))) for prompt in prompts]
        logits = self._prefill.run(prompts, [self._bank.number(adapter) for adapter, _ in keys], pages)
        self._stats["prefill_tokens"] += sum(map(len, prompts))
        return [_Prompt(own, len(prompt), row.clone()) for own, prompt, row in zip(pages, prompts, logits, strict=True)]

    def _trim_cache(self) -> None:
        while self._cached_pages > self._most_cached:
            _, prompt = self._prompts.popitem(last=False)
            self._pool.release(prompt.pages)
            self._cached_pages -= len(prompt.pages)

    # Stepping

    def _decode_step(self) -> None:
        rows = [row for row in self._rows if row is not None]
        if any(row.queued < row.request.limit for row in rows):
            with device_turn(self.model):
                if self._steps_waste(len(rows)):
                    self._compact()
                self._queue_step()
            if len(self._steps) <= STEPS_AHEAD:
                return
        if self._steps:
            self._collect()

    def _steps_waste(self, live: int) -> bool:
        """Whether closing the holes would make the steps smaller by a quarter."""
        return live <= 0.75 * len(self._rows)

    def _queue_step(self) -> None:
        requests = [row.request if row is not None else None for row in self._rows]
        counts = [row.queued if row is not None else 0 for row in self._rows]
        result = self._step.run(len(self._rows), self._cut(requests, counts))
        for row in self._rows:
            if row is not None:
                row.queued += 1
        self._stats["decode_steps"] += 1
        self._queue(requests, result)

    def _cut(self, requests: Sequence[Request | None], counts: Sequence[int]) -> Cut | None:
        """What a draw outside the kernels needs, where some row asks for top-k or top-p."""
        if not any(r is not None and (r.params.top_p < 1 or r.params.top_k) for r in requests):
            return None
        some = next(r for r in requests if r is not None)
        numbers = [
            float(r.uniforms[min(count, r.limit - 1)]) if r is not None else 0.5
            for r, count in zip(requests, counts, strict=True)
        ]
        return [(r or some).params for r in requests], numbers

    def _queue(self, requests: Sequence[Request | None], result: Tensor) -> None:
        ready = None
        if result.is_cuda:
            host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            host.copy_(result, non_blocking=True)
            result, ready = host, torch.cuda.Event()
            ready.record()
        self._steps.append(_Queued(requests, self.version, result, ready))

    def _collect(self) -> None:
        """Hand the tokens of the oldest step to its requests."""
        step = self._steps.popleft()
        if step.ready is not None:
            step.ready.synchronize()
        ids, logprobs = step.result[0].tolist(), step.result[1].view(torch.float32).tolist()
        done: set[Request] = set()
        live = self._live
        for request, token, logprob in zip(step.requests, ids, logprobs, strict=True):
            if request is not None and request in live:
                self._stats["generated_tokens"] += 1
                if self._accept(request, token, logprob, step.version):
                    done.add(request)
        if done:
            with device_turn(self.model):
                self._release([i for i, row in enumerate(self._rows) if row is not None and row.request in done])
        if not self._live:
            self._steps.clear()


def _packed(keys: Sequence[tuple[str, tuple[int, ...]]], tokens: int) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Batches of prompts, each of at most `tokens` (or one prompt)."""
    batch: list[tuple[str, tuple[int, ...]]] = []
    count = 0
    for key in keys:
        if batch and count + len(key[1]) > tokens:
            yield batch
            batch, count = [], 0
        batch.append(key)
        count += len(key[1])
    if batch:
        yield batch
