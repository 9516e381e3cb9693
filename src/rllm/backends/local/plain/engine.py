"""The sampler on the plain path: the same requests and rules as everywhere, over transformers' caches.

Rows of one adapter are decoded together and join and leave at every token; where an architecture's cache does not allow that, each row
goes alone, and where it has no usable cache, rows are read anew for every token.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from rllm.backends.local.engine import PREFILL_TOKENS, Engine, by_budget
from rllm.backends.local.language_model import LowRank
from rllm.backends.local.model import PackedCausal
from rllm.backends.local.plain.model import PlainModel
from rllm.backends.local.plain.rows import Rows
from rllm.backends.local.requests import Request, fail
from rllm.backends.local.sampling import BatchParams

_Prompt = tuple[int, ...]


class PlainEngine(Engine):
    """See `Engine`. A prompt is read once for all requests that come with it at the same time; none is kept for later ones."""

    model: PlainModel
    prefix_cache_bytes = 0

    def _prepare(self) -> None:
        self._batches: list[Rows] = []

    def kv_bytes_of(self, sequences: int, tokens: int) -> int:
        return sequences * tokens * self.model.traits.cache_bytes

    def _adopt(self, adapters: Mapping[str, LowRank | None]) -> None:
        pass  # looked up at every pass

    def _forget_prefixes(self, adapters: Collection[str] | None = None) -> None:
        pass  # none are kept

    # Rows

    def _set_running(self, requests: list[Request]) -> None:
        kept = set(requests)
        for batch in self._batches:
            rows = [i for i, request in enumerate(batch.requests) if request in kept]
            if len(rows) < len(batch.requests):
                batch.select(rows, [batch.requests[i] for i in rows])
        self._batches = [batch for batch in self._batches if batch.requests]
        self._running = [request for batch in self._batches for request in batch.requests]

    def _remove(self, slots: Sequence[int]) -> None:
        gone = set(slots)
        self._set_running([request for slot, request in enumerate(self._running) if slot not in gone])

    def _draw(self, batch: Rows, logits: Tensor, first: int = 0) -> None:
        """Give the rows of `batch` from number `first` on a token each, from their row of `logits`."""
        vocab, device = self.model.config.vocab_size, self.model.device
        if first:
            settings = BatchParams.of([r.params for r in batch.requests[first:]], vocab, device)
        else:
            settings = batch.settings or BatchParams.of([r.params for r in batch.requests], vocab, device)
            batch.settings = settings
        before = self._batches[: self._batches.index(batch)]
        start = sum(len(other.requests) for other in before)
        self._take_tokens(logits, settings, range(start + first, start + len(batch.requests)))

    # Joining

    def _admit(self) -> None:
        alike: dict[str, dict[_Prompt, list[Request]]] = {}
        for request in self._next_requests():
            alike.setdefault(request.adapter, {}).setdefault(request.prompt, []).append(request)
        budget = PREFILL_TOKENS[self.model.device.type] if self.model.traits.decoding == "batched" else 0
        for adapter, prompts in alike.items():
            for batch in by_budget(list(prompts), budget):
                fresh = [request for prompt in batch for request in prompts[prompt]]
                try:
                    self._join(adapter, batch, [prompts[prompt] for prompt in batch])
                except Exception as error:
                    for request in fresh:
                        fail(request, error)
                    gone = set(fresh)
                    self._set_running([request for request in self._running if request not in gone])

    def _join(self, adapter: str, prompts: Sequence[_Prompt], groups: Sequence[list[Request]]) -> None:
        """Read `prompts`, and let the requests of each join the rows of the adapter with their first token."""
        rows, logits = self._read(adapter, prompts)
        owners = [i for i, group in enumerate(groups) for _ in group]
        requests = [request for group in groups for request in group]
        self._stats["prefix_hits"] += len(requests) - len(prompts)
        running = next((batch for batch in self._batches if batch.adapter == adapter), None)
        if self.model.traits.decoding == "single":
            with torch.inference_mode(False), torch.no_grad():  # these caches are written to in place
                caches = [rows.cache, *(copy.deepcopy(rows.cache) for _ in requests[1:])]
            added = [Rows(adapter, [r], cache, rows.mask) for r, cache in zip(requests, caches, strict=True)]
            self._batches += added
            self._running = self._running + requests
            for batch in added:
                self._draw(batch, logits)
            return
        rows.select(owners, requests)
        first = 0
        if running is None:
            self._batches.append(rows)
            running = rows
        elif rows.cache is None:
            first = len(running.requests)
            running.requests, running.settings = running.requests + requests, None
        else:
            first = len(running.requests)
            running.join(rows)
        self._running = [request for batch in self._batches for request in batch.requests]
        self._draw(running, logits[owners], first)

    def _read(self, adapter: str, prompts: Sequence[_Prompt]) -> tuple[Rows, Tensor]:
        """(rows without requests, logits [prompts, vocab] after each prompt)"""
        device, longest = self.model.device, max(map(len, prompts))
        self._stats["prefill_tokens"] += sum(map(len, prompts))
        filled = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        told = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        mask = torch.tensor(told, device=device)
        if self.model.traits.decoding == "recompute":
            return Rows(adapter, [], None, mask[:, :0]), self._read_anew(adapter, prompts)
        cache = self.model.new_cache()
        return Rows(adapter, [], cache, mask), self._pass(adapter, torch.tensor(filled, device=device), mask, cache)

    # Stepping

    def _decode_step(self) -> None:
        """One token for every running request: a pass, and a step in the statistics, for each batch."""
        for batch in list(self._batches):
            if batch.cache is None:
                logits = self._read_anew(batch.adapter, [(*r.prompt, *r.ids) for r in batch.requests])
            else:
                ids = torch.tensor([[request.ids[-1]] for request in batch.requests], device=self.model.device)
                batch.mask = torch.cat((batch.mask, torch.ones_like(ids)), dim=1)
                logits = self._pass(batch.adapter, ids, batch.mask, batch.cache)
            self._stats["decode_steps"] += 1
            self._draw(batch, logits)

    def _pass(self, adapter: str, ids: Tensor, mask: Tensor, cache: object) -> Tensor:
        """Logits [rows, vocab] after `ids` [rows, T], which `cache` takes up."""
        lora = self.adapters[adapter]
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        whole = bool(mask.all())
        # Modules may keep what they compute here; in inference mode the trainer could then not use it.
        with torch.inference_mode(False), torch.no_grad():
            hidden = self.model.run(
                ids, lora, mask=None if whole else mask, positions=positions, cache=cache, last_only=True
            )
            return self.model.logits(hidden[:, -1], lora)

    def _read_anew(self, adapter: str, rows: Sequence[_Prompt]) -> Tensor:
        """Logits [rows, vocab] after each of `rows`, without a cache."""
        lora, result = self.adapters[adapter], []
        for row in rows:
            attend = PackedCausal([len(row)], self.model.device)
            ids = torch.tensor(row, device=self.model.device)
            with torch.inference_mode(False), torch.no_grad():
                hidden = self.model(ids, attend.positions, attend, lora)
                result.append(self.model.logits(hidden[-1:], lora))
        return torch.cat(result)
