"""The sampler: continuous batching over the trained model itself. Requests join and leave the running batch at every token.

Knows token ids; nothing of text (but for stop strings), HTTP or training.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rllm.backends.base import BASE, Completion, FinishReason, OnToken, SamplingParams
from rllm.backends.local import cores
from rllm.backends.local.device_turn import device_turn
from rllm.backends.local.handover import outbox_of_running_loop
from rllm.backends.local.kv_cache import DecodeAttention, KVCache, default_kv_bytes
from rllm.backends.local.language_model import Attend, LanguageModel, LowRank
from rllm.backends.local.model import Decoder, PackedCausal
from rllm.backends.local.requests import Request, check_params, fail, finish
from rllm.backends.local.sampling import BatchParams, sample, uniforms
from rllm.lora.adapter import LowRankPairs

# Prompt tokens read at once: on CPU few enough for the activations to stay in its caches, on CUDA enough to fill the device.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}
PREFIX_CACHE_BYTES = 256 * 2**20
# Copies of the weights with an adapter added in, made after a publish for the adapters that are sampled: a step of a small model is then
# a tenth faster. Above this the low-rank products are made at every token instead, which a large model hardly notices.
MERGED_BYTES = 256 * 2**20
# How much text is decoded again to look for stop strings that span tokens.
STOP_TAIL_TOKENS = 16


@dataclass
class _Prefix:
    """What a prefill leaves: keys and values [layers, kv_heads, length, head_dim] and the logits [vocab] after the last token."""

    k: Tensor
    v: Tensor
    logits: Tensor

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + self.logits.nbytes


_PromptKey = tuple[str, tuple[int, ...]]
"""(adapter, prompt ids)"""


class Engine:
    """Samples completions in its own thread.

    `decode` turns ids into text and is needed for stop strings only. `kv_bytes` bounds the keys and values of the running batch:
    requests wait when the batch could outgrow it (one request always runs); default: a share of the device's memory.
    """

    prefix_cache_bytes = PREFIX_CACHE_BYTES
    """The most that prompts kept for later requests take."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        eos_ids: Sequence[int],
        max_batch: int,
        max_model_len: int,
        seed: int = 0,
        decode: Callable[[list[int]], str] | None = None,
        kv_bytes: int | None = None,
    ):
        self.model, self.max_batch, self.max_model_len = model, max_batch, max_model_len
        self.eos_ids, self.decode = frozenset(eos_ids), decode
        self.version = 0
        self.adapters: dict[str, LowRank | None] = {BASE: None}
        self._seeds = np.random.Generator(np.random.Philox(key=seed))
        self.kv_bytes = default_kv_bytes(model.device) if kv_bytes is None else kv_bytes
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._stats = {
            "generated_tokens": 0,
            "prefill_tokens": 0,
            "prefix_hits": 0,
            "decode_steps": 0,
            "prefill_s": 0.0,
            "decode_s": 0.0,
        }
        self._wake = threading.Condition()
        self._closed = False
        self._prepare()
        self._thread = threading.Thread(target=self._loop, name="rllm-engine", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        """Room for the running batch."""
        assert isinstance(self.model, Decoder)
        self._cache = KVCache(self.model.config, self.model.dtype, self.model.device, self.max_model_len, self.kv_bytes)
        self._prefixes: OrderedDict[_PromptKey, _Prefix] = OrderedDict()
        self._prefix_bytes = 0
        self._settings: BatchParams | None = None
        self._merged: dict[str, Decoder] = {}

    # Called from any thread

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str = BASE, on_token: OnToken | None = None
    ) -> Future[Completion]:
        """Queue one completion. Cancelling the future frees its place in the batch at the next token. `on_token` is called in the
        sampler's thread and holds up every request: it must return at once.

        Raises ValueError for what cannot be sampled (adapter, prompt or params), RuntimeError after `close`.
        """
        check_params(params)
        if params.stop and self.decode is None:
            raise ValueError("stop strings need an engine that can turn ids into text (decode=); use stop_token_ids")
        if not prompt_ids:
            raise ValueError("the prompt is empty; give at least one token")
        limit = min(params.max_tokens, self.max_model_len - len(prompt_ids))
        if limit < 1:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens and max_tokens is {params.max_tokens}: "
                f"nothing fits into the model length of {self.max_model_len}"
            )
        vocab = self.model.config.vocab_size
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocab:
            raise ValueError(f"a prompt id lies outside the vocabulary of {vocab}")
        with self._wake:
            if self._closed:
                raise RuntimeError("the engine is closed")
            if adapter not in self.adapters:  # under the lock, so that a publish meanwhile cannot miss this request
                raise _unknown_adapter(adapter, self.adapters)
            seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
            request = Request(
                tuple(prompt_ids), params, adapter, limit, seed, Future(), uniforms(seed, limit), on_token
            )
            self._waiting.append(request)
            self._wake.notify()
        return request.future

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str = BASE, on_token: OnToken | None = None
    ) -> Completion:
        """`submit`, awaited in the caller's event loop, where `on_token` is called too: for every token before this returns."""
        hear = partial(outbox_of_running_loop().put, on_token) if on_token is not None else None
        return await asyncio.wrap_future(self.submit(prompt_ids, params, adapter, hear))

    def publish(self, adapters: Mapping[str, LowRank | None], version: int) -> None:
        """From the next token on, sample with these adapters; returns once that is so.

        Prompts read under old weights are forgotten; requests whose adapter is not among the new ones fail.
        """

        def apply() -> None:
            self.adapters = {BASE: None, **adapters}
            self.version = version
            self._adopt(self.adapters)
            self._forget_prefixes()
            self._fail_orphans()

        self._command(apply)

    def update(self, adapters: Mapping[str, LowRank], drop: Collection[str] = ()) -> None:
        """Sample with these adapters too from the next token on, in place of any of the same name, and no longer with those to `drop`;
        all others stay as they are. Returns once that is so. Requests for a dropped one fail; those under way with a replaced one go on
        with the new weights."""

        def apply() -> None:
            kept = {name: held for name, held in self.adapters.items() if name not in drop}
            self.adapters = {**kept, **adapters}
            self._adopt(self.adapters)
            self._forget_prefixes({*adapters, *drop})
            self._fail_orphans()

        self._command(apply)

    def holds(self, name: str, pairs: LowRankPairs) -> bool:
        """Whether the adapter of that name is sampled with exactly these matrices."""
        held = self.adapters.get(name)
        return isinstance(held, LowRankPairs) and held.equals(pairs)

    def kv_bytes_of(self, sequences: int, tokens: int) -> int:
        """Bytes of the keys and values of so many sequences of that length."""
        return self._cache.nbytes_of(sequences, tokens)

    def _command(self, apply: Callable[[], None]) -> None:
        """Run `apply` in the engine's thread, between two tokens, and wait for it."""
        done: Future[None] = Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._commands.append((apply, done))
            self._wake.notify()
        done.result()

    def stats(self) -> dict[str, float]:
        """Counts since the start: tokens generated and prefilled, prefix hits, decode steps; seconds spent prefilling and decoding."""
        return dict(self._stats)

    def close(self) -> None:
        """End the thread; what was not finished fails."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    # In the engine's thread

    def _loop(self) -> None:
        with torch.inference_mode():
            while True:
                if not self._running and not self._waiting:
                    cores.release()
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._commands or self._waiting or self._running)
                    if self._closed:
                        break
                    commands, self._commands = list(self._commands), deque()
                for apply, done in commands:
                    try:
                        with device_turn(self.model):
                            apply()
                    except Exception as error:  # of whoever asked, not the end of the thread
                        done.set_exception(error)
                    else:
                        done.set_result(None)
                try:
                    started = time.perf_counter()
                    with device_turn(self.model):
                        self._drop_cancelled()
                        self._admit()
                    admitted = time.perf_counter()
                    if self._running:
                        self._decode_step()
                    self._stats["prefill_s"] += admitted - started
                    self._stats["decode_s"] += time.perf_counter() - admitted
                except Exception as error:  # a failed step must fail its requests, not end the thread silently
                    for request in self._running:
                        fail(request, error)
                    with device_turn(self.model):
                        self._set_running([])
        for request in [*self._running, *self._waiting]:
            fail(request, RuntimeError("the engine was closed"))
        for _, done in self._commands:
            done.set_exception(RuntimeError("the engine was closed"))

    def _adopt(self, adapters: Mapping[str, LowRank | None]) -> None:
        """Take the newly published weights in, where more is needed than to look them up."""
        self._merged = {}

    def _hidden(self, adapter: str, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states of tokens under an adapter."""
        model, lora = self.model, self.adapters[adapter]
        assert isinstance(model, Decoder)
        if lora is None or model.device.type != "cpu" or model.dtype != torch.float32 or model.quantized:
            return model(ids, positions, attend, lora)
        if adapter not in self._merged:
            if (len(self._merged) + 1) * model.nbytes > MERGED_BYTES:
                return model(ids, positions, attend, lora)
            self._merged[adapter] = model.merged(lora)
        return self._merged[adapter](ids, positions, attend)

    def _forget_prefixes(self, adapters: Collection[str] | None = None) -> None:
        """Those read under these adapters; None: all."""
        for key in [key for key in self._prefixes if adapters is None or key[0] in adapters]:
            self._prefix_bytes -= self._prefixes.pop(key).nbytes

    def _set_running(self, requests: list[Request]) -> None:
        self._running = requests
        self._settings = None

    def _batch_params(self) -> BatchParams:
        if self._settings is None:
            vocab, device = self.model.config.vocab_size, self.model.device
            self._settings = BatchParams.of([r.params for r in self._running], vocab, device)
        return self._settings

    def _drop_cancelled(self) -> None:
        gone = [i for i, request in enumerate(self._running) if request.future.cancelled()]
        if gone:
            self._remove(gone)

    def _fail_orphans(self) -> None:
        """Requests that ask for an adapter no longer published cannot go on."""

        def orphaned(request: Request) -> bool:
            if request.adapter in self.adapters:
                return False
            fail(request, _unknown_adapter(request.adapter, self.adapters))
            return True

        gone = [slot for slot, request in enumerate(self._running) if orphaned(request)]
        if gone:
            self._remove(gone)
        with self._wake:
            self._waiting = deque(request for request in self._waiting if not orphaned(request))

    def _next_requests(self) -> list[Request]:
        """Take from the queue, in order, what fits beside the running ones even if every sequence grows to its limit."""
        fresh: list[Request] = []
        longest = max((request.final_length for request in self._running), default=0)
        while self._waiting and (rows := len(self._running) + len(fresh) + 1) <= self.max_batch:
            request = self._waiting[0]
            if not request.future.cancelled():
                longest = max(longest, request.final_length)
                if rows > 1 and self.kv_bytes_of(rows, longest) > self.kv_bytes:
                    break
                fresh.append(request)
            self._waiting.popleft()
        return fresh

    def _admit(self) -> None:
        """Let waiting requests join: prefill the prompts not yet known (each once), then sample their first tokens."""
        fresh = self._next_requests()
        if not fresh:
            return
        alike: dict[_PromptKey, list[Request]] = {}
        for request in fresh:
            alike.setdefault((request.adapter, request.prompt), []).append(request)
        first = len(self._running)
        try:
            prefixes = self._prefill(list(alike))
            self._cache.reserve(first + len(fresh), max(r.position + 2 for r in [*self._running, *fresh]))
            slot = first
            for key, requests in alike.items():
                self._cache.fill(slot, len(requests), prefixes[key].k, prefixes[key].v)
                slot += len(requests)
            logits = torch.stack([prefixes[key].logits for key, requests in alike.items() for _ in requests])
        except Exception as error:
            for request in fresh:
                fail(request, error)
            return
        self._stats["prefix_hits"] += len(fresh) - len(alike)
        joined = [request for requests in alike.values() for request in requests]
        self._set_running(self._running + joined)
        settings = BatchParams.of([r.params for r in joined], self.model.config.vocab_size, self.model.device)
        self._take_tokens(logits, settings, range(first, first + len(joined)))

    def _prefill(self, keys: Sequence[_PromptKey]) -> dict[_PromptKey, _Prefix]:
        """The prefix of every prompt, from the cache or computed: packed, under a token budget, per adapter."""
        found: dict[_PromptKey, _Prefix] = {}
        missing: dict[str, list[tuple[int, ...]]] = {}
        for key in keys:
            if key in self._prefixes:
                self._stats["prefix_hits"] += 1
                self._prefixes.move_to_end(key)
                found[key] = self._prefixes[key]
            else:
                missing.setdefault(key[0], []).append(key[1])
        for adapter, prompts in missing.items():
            for batch in by_budget(prompts, PREFILL_TOKENS[self.model.device.type]):
                for prompt, prefix in zip(batch, self._prefill_batch(batch, adapter), strict=True):
                    found[adapter, prompt] = self._prefixes[adapter, prompt] = prefix
                    self._prefix_bytes += prefix.nbytes
        while self._prefix_bytes > self.prefix_cache_bytes:
            self._prefix_bytes -= self._prefixes.popitem(last=False)[1].nbytes
        return found

    def _prefill_batch(self, prompts: Sequence[tuple[int, ...]], adapter: str) -> list[_Prefix]:
        device = self.model.device
        lengths = [len(prompt) for prompt in prompts]
        attend = PackedCausal(lengths, device, keep=True)
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        hidden = self._hidden(adapter, ids, attend.positions, attend)
        logits = self.model.logits(hidden.index_select(0, attend.last), self.adapters[adapter])
        assert attend.kept is not None
        k = torch.stack([keys for keys, _ in attend.kept]).transpose(1, 2).split(lengths, dim=2)
        v = torch.stack([values for _, values in attend.kept]).transpose(1, 2).split(lengths, dim=2)
        self._stats["prefill_tokens"] += sum(lengths)
        # Clones: a view would keep the whole batch alive as long as one prompt of it is cached.
        return [_Prefix(a.clone(), b.clone(), row.clone()) for a, b, row in zip(k, v, logits, strict=True)]

    def _decode_step(self) -> None:
        """One token for every running request. Takes the device's turn itself, where there is one."""
        running, device = self._running, self.model.device
        positions = [request.position for request in running]
        longest = max(positions) + 1
        self._cache.reserve(len(running), longest)
        ids = torch.tensor([request.ids[-1] for request in running], device=device)
        where = torch.tensor(positions, device=device)
        names = {request.adapter for request in running}
        if len(names) == 1:
            name = names.pop()
            hidden = self._hidden(name, ids, where, DecodeAttention(self._cache, where, longest))
            logits = self.model.logits(hidden, self.adapters[name])
        else:
            logits = torch.empty(len(running), self.model.config.vocab_size, device=device)
            for name in names:
                rows = torch.tensor([i for i, r in enumerate(running) if r.adapter == name], device=device)
                attend = DecodeAttention(self._cache, where[rows], longest, rows)
                hidden = self._hidden(name, ids[rows], where[rows], attend)
                logits[rows] = self.model.logits(hidden, self.adapters[name])
        self._stats["decode_steps"] += 1
        self._take_tokens(logits, self._batch_params(), range(len(running)))

    def _take_tokens(self, logits: Tensor, settings: BatchParams, slots: range) -> None:
        """Sample one token for each of `slots` from its row of `logits`; finish and remove what is done."""
        rows = self._running[slots.start : slots.stop]
        u = torch.tensor([r.uniforms[len(r.ids)] for r in rows], dtype=torch.float64, device=logits.device)
        sampled, logprobs = sample(logits, settings, u)
        finished: list[int] = []
        for slot, request, token, logprob in zip(slots, rows, sampled.tolist(), logprobs.tolist(), strict=True):
            if self._accept(request, token, logprob, self.version):
                finished.append(slot)
        self._stats["generated_tokens"] += len(rows)
        if finished:
            self._remove(finished)

    def _accept(self, request: Request, token: int, logprob: float, version: int) -> bool:
        """Add one token to a request; True if it is done, well or not."""
        request.ids.append(token)
        request.logprobs.append(logprob)
        request.versions.append(version)
        try:
            reason = self._finish_reason(request)
        except Exception as error:  # what is wrong with one row does not concern the others
            fail(request, error)
            return True
        if request.on_token is not None:
            request.on_token(token, logprob)
        if reason is not None:
            finish(request, reason)
        return reason is not None

    def _finish_reason(self, request: Request) -> FinishReason | None:
        token = request.ids[-1]
        if not math.isfinite(request.logprobs[-1]):
            raise FloatingPointError(
                f"the model gave logits that are not finite at position {request.position} (adapter {request.adapter!r}, "
                f"policy version {self.version}); the weights have probably diverged: try a lower learning rate"
            )
        if token in request.params.stop_token_ids or (token in self.eos_ids and not request.params.ignore_eos):
            return "stop"
        if request.params.stop:
            assert self.decode is not None
            tail = self.decode(request.ids[-STOP_TAIL_TOKENS - max(map(len, request.params.stop)) :])
            if any(stop in tail for stop in request.params.stop):
                return "stop"
        return "length" if len(request.ids) >= request.limit else None

    def _remove(self, slots: Sequence[int]) -> None:
        """Free slots; the last running row moves into each hole, so that the running ones stay together."""
        running = list(self._running)
        for slot in sorted(slots, reverse=True):
            last = running.pop()
            if slot < len(running):
                self._cache.move(len(running), slot, last.position)
                running[slot] = last
        self._set_running(running)


def _unknown_adapter(name: str, published: Mapping[str, object]) -> ValueError:
    return ValueError(f"unknown adapter {name!r}; published are {', '.join(sorted(published))}")


def by_budget(prompts: list[tuple[int, ...]], tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Batches of prompts of like length, each at most `tokens` when padded to its longest (or one prompt)."""
    batch: list[tuple[int, ...]] = []
    for prompt in sorted(prompts, key=len):
        if batch and (len(batch) + 1) * len(prompt) > tokens:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch
