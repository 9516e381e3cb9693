"""How rows are laid out for a training pass: row after row, or every shared prompt once and after it what follows it in each row.

Knows rows and attention over them; nothing of layers or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rllm.backends.base import Datum
from rllm.backends.local.language_model import Attend
from rllm.backends.local.model import Above, PackedCausal, attention
from rllm.backends.local.transfer import to_device

# Sharing pays where it leaves out this share of the tokens, since its attention costs more; on CUDA (the second number for rows of
# one length, which have a faster attention to lose) that was measured, see bench/RESULTS.md.
LEAST_SAVED, LEAST_SAVED_FUSED = 0.1, (0.15, 0.3)
# Elements of the mask of the shared attention (float32: 64 MiB). Longer rows are laid out one by one.
MASK_ELEMENTS = 16 * 2**20


@dataclass(frozen=True)
class Packed:
    """`ids` [N] in the order they go through the model; `predicting` [T]: for each trained token, row after row, where the token
    stands from whose hidden state it is predicted."""

    ids: Tensor
    predicting: Tensor
    positions: Tensor
    attend: Attend


def prompt_of(row: Datum) -> tuple[int, ...]:
    """What comes before the first trained token: at least one token; the whole row where none is trained."""
    return tuple(row.ids[: row.mask.index(1)] if 1 in row.mask else row.ids)


def micro_batches(
    data: Sequence[Datum], rows: Sequence[int], most: int, share: bool, padded: bool = False
) -> Iterator[list[int]]:
    """The indices `rows` in batches of at most `most` tokens each, never a row in parts; rows of like length together and, with `share`,
    those of one prompt, which counts once. `padded`: every row, or what follows its prompt, counts as long as the longest.
    """
    prompts = {i: prompt_of(data[i]) if share else () for i in rows}
    longest: dict[tuple[int, ...], int] = {}
    for i, prompt in prompts.items():
        longest[prompt] = max(longest.get(prompt, 0), len(data[i].ids))
    batch: list[int] = []
    before, tail, tails = 0, 0, 0
    for i in sorted(rows, key=lambda i: (longest[prompts[i]], prompts[i], len(data[i].ids))):
        prompt, length = prompts[i], len(data[i].ids)
        own = length - len(prompt)
        known = bool(batch) and prompts[batch[-1]] == prompt
        after = (len(batch) + 1) * max(tail, own) if padded else tails + own
        if batch and before + len(prompt) * (not known) + after > most:
            yield batch
            batch, before, tail, tails, known = [], 0, 0, 0, False
        batch.append(i)
        before, tail, tails = before + len(prompt) * (not known), max(tail, own), tails + own
    if batch:
        yield batch


def worth_sharing(rows: Sequence[Datum], fused: bool) -> bool:
    """Whether passing their common prompts once saves enough."""
    prompts = [prompt_of(row) for row in rows]
    total = sum(len(row.ids) for row in rows)
    left_out = sum(map(len, prompts)) - sum(map(len, set(prompts)))
    equal = len({len(row.ids) for row in rows}) <= 1
    return left_out >= total * (LEAST_SAVED_FUSED[equal] if fused else LEAST_SAVED)


def pack(rows: Sequence[Datum], device: torch.device, share: bool, most: int, fused: bool = False) -> Packed:
    """The layout of `rows`, each of which trains a token. With `share`, a prompt that rows one after the other have in common is passed
    once, where that saves enough or there would else be more than `most` tokens: what a token sees is the same, so is its gradient.
    `fused`: for the CUDA kernels."""
    if share and (worth_sharing(rows, fused) or sum(len(row.ids) for row in rows) > most):
        prompts: list[tuple[int, ...]] = []
        owners: list[int] = []
        tails: list[list[int]] = []
        for row in rows:
            prompt = prompt_of(row)
            if not prompts or prompts[-1] != prompt:
                prompts.append(prompt)
            owners.append(len(prompts) - 1)
            # What comes after the last token that predicts a trained one is seen by none.
            tails.append(row.ids[len(prompt) : len(row.mask) - row.mask[::-1].index(1) - 1])
        longest, deepest = max(map(len, tails)), max(map(len, prompts))
        if fused or len(rows) * longest * (longest + deepest) <= MASK_ELEMENTS:
            layout = PackedShared if fused else SharedPrompts
            return _pack_shared(rows, prompts, owners, tails, layout, device)
    attend = PackedCausal([len(row.ids) for row in rows], device)
    mask = torch.tensor([m for row in rows for m in row.mask], dtype=torch.bool)
    # The token at position t is predicted from the hidden state at t - 1; entry 0 of a row is never trained.
    predicting = to_device(mask.nonzero().squeeze(1) - 1, device)
    return Packed(to_device([t for row in rows for t in row.ids], device), predicting, attend.positions, attend)


def _pack_shared(
    rows: Sequence[Datum],
    prompts: Sequence[tuple[int, ...]],
    owners: Sequence[int],
    tails: Sequence[list[int]],
    layout: type[PackedShared] | type[SharedPrompts],
    device: torch.device,
) -> Packed:
    ends = list(accumulate(map(len, prompts)))
    starts = list(accumulate(map(len, tails), initial=ends[-1]))
    predicting: list[int] = []
    for row, owner, start in zip(rows, owners, starts, strict=False):
        first = len(prompts[owner])
        trained = [t for t, m in enumerate(row.mask) if m]
        predicting += [ends[owner] - 1 if t == first else start + t - first - 1 for t in trained]
    ids = [token for part in (*prompts, *tails) for token in part]
    attend = layout([len(p) for p in prompts], owners, [len(tail) for tail in tails], device)
    return Packed(to_device(ids, device), to_device(predicting, device), attend.positions, attend)


class PackedShared(PackedCausal):
    """As `SharedPrompts`, for kernels that take packed sequences: prompts and tails are sequences of their own, and a tail's tokens see
    the prompt `above` them too. Tails of one prompt stand together, in the order of the prompts."""

    def __init__(
        self, prompts: Sequence[int], owners: Sequence[int], tails: Sequence[int], device: torch.device | str = "cpu"
    ):
        before = [prompts[owner] for owner in owners]
        super().__init__([*prompts, *tails], device, first=[*([0] * len(prompts)), *before])
        self.ragged = True
        below = [0] * len(prompts)
        for owner, tail in zip(owners, tails, strict=True):
            below[owner] += tail
        queries = to_device(list(accumulate(below, initial=sum(prompts))), device, torch.int32)
        keys = to_device(list(accumulate(prompts, initial=0)), device, torch.int32)
        if any(below):  # kernels take no empty grids
            self.above = Above(queries, keys, max(below), max(prompts))


class SharedPrompts:
    """Causal attention of rows over prompts that several of them have in common.

    Packed tokens are all prompts, then what follows them: `tails` tokens of each row, whose prompt is number `owners[row]`. The prompts
    attend as any sequences do; a row's tokens see the whole of its prompt and themselves causally.
    """

    def __init__(
        self, prompts: Sequence[int], owners: Sequence[int], tails: Sequence[int], device: torch.device | str = "cpu"
    ):
        self.prompts, self.tails = PackedCausal(list(prompts), device), PackedCausal(list(tails), device)
        self.counts = (sum(prompts), sum(tails))
        lengths = torch.tensor(list(prompts))[torch.tensor(list(owners))]
        self.owners = to_device(list(owners), device)
        before = to_device(lengths.repeat_interleave(torch.tensor(list(tails))), device)
        self.positions = torch.cat((self.prompts.positions, self.tails.positions + before))
        deepest, longest = self.prompts.longest, self.tails.longest
        of_prompt = (torch.arange(deepest) < lengths.unsqueeze(1)).unsqueeze(1).expand(-1, longest, -1)
        of_own = torch.ones(longest, longest, dtype=torch.bool).tril().expand(len(tails), -1, -1)
        rows = len(tails) if self.prompts.ragged else 1  # otherwise all see alike
        self.seen = to_device(torch.cat((of_prompt[:rows], of_own[:rows]), dim=2).unsqueeze(1), device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q_prompts, q), (k_prompts, k), (v_prompts, v) = (t.split(self.counts) for t in (q, k, v))
        of_prompts = self.prompts(layer, q_prompts, k_prompts, v_prompts)
        if not self.tails.longest:
            return of_prompts
        keys, values = (
            torch.cat((self.prompts.pad(shared).index_select(0, self.owners), self.tails.pad(own)), dim=1)
            for shared, own in ((k_prompts, k), (v_prompts, v))
        )
        out = attention(self.tails.pad(q).transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), self.seen)
        return torch.cat((of_prompts, self.tails.flat(out)))
