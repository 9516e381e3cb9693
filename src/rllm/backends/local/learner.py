"""The training side: teacher-forced log-probabilities, gradients of a loss over rows, AdamW.

Knows rows of tokens and a decoder; nothing of sampling, flows or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rllm.algorithms.losses import shared_denominator, token_weights
from rllm.algorithms.spec import Losses, LossSpec, loss_of
from rllm.backends.base import (
    BASE,
    DEFAULT_ADAPTER,
    INITIAL_ADAPTER,
    TEACHER,
    AdamParams,
    Datum,
    Scored,
    initial_of,
)
from rllm.backends.local.device_turn import device_turn
from rllm.backends.local.language_model import LanguageModel, LowRank
from rllm.backends.local.model import HEAD, Decoder, PackedCausal
from rllm.backends.local.ops import rms_norm
from rllm.backends.local.packing import Packed, micro_batches, pack, worth_sharing
from rllm.backends.local.transfer import to_device
from rllm.backends.token_losses import Sums, TrainedTokens, losses_of
from rllm.lora.adapter import LoraAdapter

if TYPE_CHECKING:
    from rllm.backends.local.cuda.graphs import LayerGraphs
    from rllm.backends.local.cuda.space import TrainingRoom

# Tokens x vocabulary held at once when logits are turned into log-probabilities (float32: 64 MiB).
LOGIT_ELEMENTS = 16 * 2**20
# Measured: on CPU more tokens are no faster and take memory, a GPU wants many.
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 6144}
# Memory that the activations of a micro-batch may take on CPU, and the share of it on a GPU.
CPU_ACTIVATION_BYTES = 2 * 2**30
GPU_ACTIVATION_SHARE = 0.25

K = TypeVar("K", bound=Hashable)
Policy = tuple[LanguageModel, LowRank | None]
"""(weights, low-rank updates of them)"""


class Learner:
    """Accumulates gradients of losses over rows and steps the optimizer. `adapters` empty: all weights of `model` are trained.

    `micro_batch_tokens` is a limit; a model whose activations would not fit gets smaller micro-batches.
    """

    shares_prompts = True
    """Whether rows pass a prompt that they have in common once."""

    def __init__(
        self,
        model: LanguageModel,
        adapters: Mapping[str, LoraAdapter],
        micro_batch_tokens: int | None = None,
        frozen: Mapping[str, LowRank | None] | None = None,
        start: LanguageModel | None = None,
        teacher: Policy | None = None,
    ):
        """`frozen` adapters and the `teacher` can be asked for log-probabilities only. `start`: with full fine-tuning, a copy of the
        weights as they were, which then is what `BASE` means."""
        self.model, self.adapters, self.frozen, self.start = model, dict(adapters), dict(frozen or {}), start
        self.teacher = teacher
        wanted = micro_batch_tokens or MICRO_BATCH_TOKENS[model.device.type]
        self.micro_batch_tokens = min(wanted, _tokens_in_memory(model))
        if not self.adapters:
            model.full_finetuning()
        self.masters = _float32_masters(model) if not self.adapters else {}
        self.optimizer: torch.optim.AdamW | None = None
        # The adapters as the passes of one `forward_backward` see them, where they differ from `adapters`.
        self._accumulating: dict[str, LowRank] = {}
        # On the CUDA path: how the layers run, and with full fine-tuning where their gradients are added up.
        self._layers: LayerGraphs | None = None
        self._room: TrainingRoom | None = None
        self._gradients: dict[torch.nn.Parameter, Tensor] = {}
        # What `train_ahead` has counted.
        self._ahead = Sums()
        if isinstance(model, Decoder) and model.fused:
            from rllm.backends.local.cuda.graphs import LayerGraphs
            from rllm.backends.local.cuda.space import room_of

            self._layers, self._room = LayerGraphs(model), room_of(model)

    def trainable(self) -> list[torch.nn.Parameter]:
        """What the optimizer steps: the adapters' matrices, or every weight (its float32 master where the base is narrower)."""
        if self.adapters:
            return [p for adapter in self.adapters.values() for p in adapter.parameters()]
        return [self.masters.get(p, p) for p in self.model.parameters()]

    def make_room(self) -> None:
        """Move the base's weights to where training wants them, if anywhere; else the first pass does, when a sampler over the same
        weights has already captured its steps."""
        if self._room is not None:
            for adapter in self._summing.values():
                self._room.reserve(adapter.part_ranks())

    def forward_backward(self, data: Sequence[Datum], loss: Losses, ahead: Sequence[Datum] = ()) -> dict[str, float]:
        """Add the gradient of ``sum of weight * token loss`` over all rows; see `Backend.forward_backward` and `algorithms.losses`.

        Rows of different losses are weighed by all rows, so a mapping of equal losses is that one loss. `ahead` are the rows of the same
        step that `train_ahead` was called with: their gradients and metrics are there and only weighed anew.
        """
        counts = [datum.n_trained for datum in (*data, *ahead)]
        over = {id(spec): shared_denominator(spec, counts) for spec in _specs((*data, *ahead), loss)}
        sums, self._ahead = self._ahead, Sums()
        if ahead:
            (denominator,) = set(over.values())  # of all roles the same: they differ in the name of the loss only
            for parameter in (*self.trainable(), *self.masters):
                if parameter.grad is not None:
                    parameter.grad.div_(denominator)
            sums.scale("loss", 1.0 / denominator)
        self._add_gradients(data, loss, over, sums)
        return sums.metrics()

    def train_ahead(self, data: Sequence[Datum], loss: Losses) -> None:
        """Add the gradients of some rows of an optimizer step whose other rows are not there yet; by what all are divided is then left
        open. `forward_backward` with all of them as `ahead` must follow, or `discard_gradients`."""
        self._add_gradients(data, loss, {id(spec): 1.0 for spec in _specs(data, loss)}, self._ahead)

    def _add_gradients(self, data: Sequence[Datum], loss: Losses, over: Mapping[int, float], sums: Sums) -> None:
        """`over`: for each loss, by its id, what its weights are divided by alike."""
        specs = {id(spec): spec for spec in _specs(data, loss)}
        counts = [datum.n_trained for datum in data]
        weights = {key: token_weights(spec, counts, over[key]) for key, spec in specs.items()}
        finish = self._accumulate({datum.adapter for datum in data})
        for (adapter, key), rows in self._micro_batches(data, lambda d: (d.adapter, id(loss_of(loss, d.role)))):
            chosen = [data[i] for i in rows if counts[i]]
            if not chosen:
                continue
            spec = specs[key]
            with device_turn(self.model):
                batch = self._token_logprobs(chosen, adapter, entropy_gradient=spec.entropy_coeff > 0)
                lengths = to_device([d.n_trained for d in chosen], self.model.device)
                weight = to_device([weights[key][i] for i in rows if counts[i]], self.model.device)
                per_token = weight.repeat_interleave(lengths, output_size=len(batch.logprobs))
                total = (per_token * losses_of(spec, batch, lengths, sums)).sum()
                total.backward()
                sums.add("loss", total.detach())
        finish()

    def _accumulate(self, names: set[str]) -> Callable[[], None]:
        """Where the fused layers add up gradients themselves, make these adapters, or the weights, ready for that; what returns ends it."""
        if not self.model.fused:
            return lambda: None
        if not self.adapters:
            self._prepare_gradients()
        ready = {name: a.accumulating(self.model.dtype) for name, a in self._summing.items() if name in names}
        self._accumulating = {name: pairs for name, (pairs, _) in ready.items()}

        def finish() -> None:
            self._accumulating = {}
            for _, add in ready.values():
                add()

        return finish

    @property
    def _summing(self) -> dict[str, LoraAdapter]:
        """The adapters whose gradients the fused layers can add up."""
        return {name: a for name, a in self.adapters.items() if not a.dropout and HEAD not in a.layout}

    def _prepare_gradients(self) -> None:
        """Give the weights of the layers float32 gradients to add to: those of their masters."""
        assert isinstance(self.model, Decoder)
        for layer in self.model.layers:
            for weight in layer.parameters():
                master = self.masters.get(weight, weight)
                if master.grad is None:
                    if weight not in self._gradients:
                        self._gradients[weight] = torch.empty_like(weight, dtype=torch.float32)
                    master.grad = self._gradients[weight].zero_()

    @torch.no_grad()
    def logprobs(
        self, data: Sequence[Datum], adapter: str | None = None, trained_only: bool = False
    ) -> list[list[float]]:
        """Log-probability of every token of every row at the row's temperature; see `Backend.logprobs`."""
        result = [[0.0] * len(d.ids) for d in data]
        rows_of = data if trained_only else [replace(d, mask=[0] + [1] * (len(d.ids) - 1)) for d in data]
        for own, rows in self._micro_batches(rows_of, lambda d: d.adapter):
            rows = [i for i in rows if rows_of[i].n_trained]
            if not rows:
                continue
            chosen = [rows_of[i] for i in rows]
            with device_turn(self.model):
                batch = self._token_logprobs(chosen, self._reference(own, adapter))
            for i, values in zip(rows, batch.logprobs.split([d.n_trained for d in chosen]), strict=True):
                places = (t for t, m in enumerate(rows_of[i].mask) if m)
                for t, value in zip(places, values.tolist(), strict=True):
                    result[i][t] = value
        return result

    @torch.no_grad()
    def score(self, ids: Sequence[int], adapter: str) -> Scored:
        """See `Backend.score`."""
        device = self.model.device
        with device_turn(self.model):
            model, lora = self._policy(adapter)
            tokens = to_device(list(ids), device)
            attend = PackedCausal([len(ids)], device)
            hidden = model(tokens, attend.positions, attend, lora)[:-1]
        result = Scored([], [], [], [])
        for h, y in zip(hidden.split(self._chunk), tokens[1:].split(self._chunk), strict=True):
            logprobs = F.log_softmax(model.logits(h, lora), dim=-1)
            own = logprobs.gather(1, y.unsqueeze(1))
            best, best_ids = logprobs.max(-1)
            result.logprobs += own.squeeze(1).tolist()
            result.ranks += ((logprobs > own).sum(-1) + 1).tolist()
            result.best_ids += best_ids.tolist()
            result.best_logprobs += best.tolist()
        return result

    @property
    def _chunk(self) -> int:
        """Tokens whose logits are held at once."""
        return max(1, LOGIT_ELEMENTS // self.model.config.vocab_size)

    def _reference(self, own: str, asked: str | None) -> str:
        """The adapter to use for rows that are trained with `own`."""
        if asked is None:
            return own
        return initial_of(own) if asked == INITIAL_ADAPTER else asked

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Clip, AdamW step (Loshchilov and Hutter 2019, decoupled decay), zero gradients. Parameters without a gradient stay as
        they are, decay included. A norm that is not finite changes nothing."""
        parameters = self.trainable()
        self._gradients_to_masters()
        with_gradient = [p for p in parameters if p.grad is not None]
        if not with_gradient:
            return {"grad_norm": 0.0}
        norm = torch.nn.utils.get_total_norm([p.grad for p in with_gradient if p.grad is not None])
        if math.isfinite(norm.item()):
            if params.grad_clip:
                torch.nn.utils.clip_grads_with_norm_(with_gradient, params.grad_clip, norm)
            optimizer = self._optimizer(params)
            optimizer.step()
            for weight, master in self.masters.items():
                weight.data.copy_(master)
        self.discard_gradients()
        return {"grad_norm": norm.item(), "lr": params.lr}

    def discard_gradients(self) -> None:
        """Forget what `forward_backward` and `train_ahead` accumulated."""
        self._ahead = Sums()
        for parameter in (*self.trainable(), *self.masters):
            parameter.grad = None

    def close(self) -> None:
        """Let go of what was made for the device; nothing is trained any more."""
        self.discard_gradients()
        self._layers = self._room = None

    def optimizer_state(self) -> list[dict[str, Any]]:
        """AdamW's state per trained tensor, in the order of `trainable()`; empty where a tensor was never stepped."""
        state = self.optimizer.state if self.optimizer else {}
        return [dict(state.get(p, {})) for p in self.trainable()]

    def load_optimizer_state(self, states: Sequence[Mapping[str, Tensor]], params: AdamParams) -> None:
        optimizer = self._optimizer(params)
        for parameter, state in zip(self.trainable(), states, strict=True):
            if state:
                optimizer.state[parameter] = {name: value.to(parameter.device) for name, value in state.items()}

    def _optimizer(self, params: AdamParams) -> torch.optim.AdamW:
        settings: dict[str, Any] = {
            "lr": params.lr,
            "betas": (params.beta1, params.beta2),
            "eps": params.eps,
            "weight_decay": params.weight_decay,
        }
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.trainable(), **settings, fused=True)
        for group in self.optimizer.param_groups:
            group.update(settings)
        return self.optimizer

    def _gradients_to_masters(self) -> None:
        for weight, master in self.masters.items():
            if weight not in self._gradients:
                master.grad = None if weight.grad is None else weight.grad.float()

    def _micro_batches(self, data: Sequence[Any], key: Callable[[Any], K]) -> Iterator[tuple[K, list[int]]]:
        """Of rows that have `ids`: (key, row indices), each one pass through the model; see `packing.micro_batches`."""
        by_key: dict[K, list[int]] = {}
        for i, datum in enumerate(data):
            by_key.setdefault(key(datum), []).append(i)
        model = self.model
        for shared, rows in by_key.items():
            share = self.shares_prompts and model.shares_prompts
            if share and model.fused:
                share = worth_sharing([data[i] for i in rows], fused=True)
            padded = model.pads or (share and not model.fused)
            for batch in micro_batches(data, rows, self.micro_batch_tokens, share=share, padded=padded):
                yield shared, batch

    def _token_logprobs(self, rows: Sequence[Datum], adapter: str, entropy_gradient: bool = False) -> TrainedTokens:
        """The trained tokens of `rows` under the policy `adapter`, row after row."""
        device = self.model.device
        mask = torch.tensor([m for row in rows for m in row.mask], dtype=torch.bool)
        model, lora = self._policy(adapter)
        fused = model.fused and (lora is None or lora.dropout is None)
        share = self.shares_prompts and model.shares_prompts
        packed = pack(rows, device, share, self.micro_batch_tokens, fused)
        predicting = self._hidden(model, lora, packed)
        temperatures = to_device([row.temperature for row in rows for _ in range(row.n_trained)], device)
        targets = to_device([t for row in rows for t, m in zip(row.ids, row.mask, strict=True) if m], device)
        if (
            isinstance(model, Decoder)
            and model.fused
            and not entropy_gradient
            and (lora is None or lora.pair(*HEAD) is None)
        ):
            from rllm.backends.local.cuda.head import token_logprobs

            logprobs, entropy = token_logprobs(model, predicting, targets, temperatures)
        else:
            logits = partial(model.logits, lora=lora)
            logprobs, entropy = self._chunked_logprobs(predicting, targets, temperatures, logits, entropy_gradient)
        return TrainedTokens(rows, mask, logprobs, entropy)

    def _hidden(self, model: LanguageModel, lora: LowRank | None, packed: Packed) -> Tensor:
        """Final hidden states [T, hidden] from which the trained tokens are predicted."""
        ids, attend, rows = packed.ids, packed.attend, packed.predicting
        gradients = torch.is_grad_enabled()
        adds_up = lora.anchor is not None if lora is not None else bool(self._gradients)
        if self._layers is None or self._room is None or model is not self.model or (gradients and not adds_up):
            return model(ids, packed.positions, attend, lora).index_select(0, rows)
        assert isinstance(model, Decoder) and isinstance(attend, PackedCausal)
        if lora is not None and not self._room.holds(lora):
            self._room.hold(lora)
        x = self._layers(ids, attend, lora, self._gradients or None, rows)
        return rms_norm(x, model.final_norm, model.config.rms_eps)

    def _chunked_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        logits: Callable[[Tensor], Tensor],
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        chunk = self._chunk

        def part(h: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            logprobs = F.log_softmax(logits(h) / t.unsqueeze(1), dim=-1)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                entropy = -(logprobs.exp() * logprobs).sum(-1)
            return logprobs.gather(1, y.unsqueeze(1)).squeeze(1), entropy

        if len(targets) <= chunk:
            return part(hidden, targets, temperatures)
        parts = [
            checkpoint(part, h, y, t, use_reentrant=False)
            for h, y, t in zip(hidden.split(chunk), targets.split(chunk), temperatures.split(chunk), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _policy(self, adapter: str) -> Policy:
        """A policy by the name of its adapter."""
        if adapter == TEACHER and self.teacher is not None:
            return self.teacher
        if adapter in self._accumulating:
            return self.model, self._accumulating[adapter]
        if adapter in self.adapters:
            own, training = self.adapters[adapter], torch.is_grad_enabled()
            if self.model.fused and not training:
                return self.model, own.current(self.model.dtype)
            return self.model, own.pairs(self.model.dtype, training=training)
        if adapter in self.frozen:
            return self.model, self.frozen[adapter]
        if self.adapters and adapter == BASE:
            return self.model, None
        if not self.adapters and adapter == DEFAULT_ADAPTER:
            return self.model, None
        if adapter in (BASE, INITIAL_ADAPTER) and self.start is not None:
            return self.start, None
        known = [*self.adapters, *self.frozen, BASE] if self.adapters else [DEFAULT_ADAPTER]
        raise KeyError(f"no adapter {adapter!r}; there are {', '.join(known)}")


def _specs(data: Sequence[Datum], loss: Losses) -> list[LossSpec]:
    """The loss of each row."""
    return [loss_of(loss, datum.role) for datum in data]


def _tokens_in_memory(model: LanguageModel) -> int:
    """Tokens whose activations fit the memory set aside for them."""
    budget: float = CPU_ACTIVATION_BYTES
    if model.device.type == "cuda":
        budget = GPU_ACTIVATION_SHARE * torch.cuda.get_device_properties(model.device).total_memory
    return max(1, int(budget / model.activation_bytes_per_token))


def _float32_masters(model: LanguageModel) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    if model.dtype == torch.float32:
        return {}
    return {p: torch.nn.Parameter(p.detach().float()) for p in model.parameters()}
