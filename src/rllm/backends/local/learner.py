"""The training side: teacher-forced log-probabilities, gradients of a loss over rows, AdamW.

Knows rows of tokens and a decoder; nothing of sampling, flows or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rllm.algorithms.losses import token_loss, token_weights
from rllm.backends.base import BASE, DEFAULT_ADAPTER, INITIAL_ADAPTER, AdamParams, Datum, LossSpec, initial_of
from rllm.backends.local.model import Decoder, LowRank, PackedCausal
from rllm.lora.adapter import LoraAdapter

# Tokens x vocabulary held at once when logits are turned into log-probabilities (float32: 64 MiB).
LOGIT_ELEMENTS = 16 * 2**20
# Measured: on CPU smaller micro-batches stay in cache, a GPU wants larger ones.
MICRO_BATCH_TOKENS = {"cpu": 8192, "cuda": 32768}
# Memory that the activations of a micro-batch may take on CPU, and the share of it on a GPU.
CPU_ACTIVATION_BYTES = 2 * 2**30
GPU_ACTIVATION_SHARE = 0.25


class Learner:
    """Accumulates gradients of losses over rows and steps the optimizer. `adapters` empty: all weights of `model` are trained.

    `micro_batch_tokens` is a limit; a model whose activations would not fit gets smaller micro-batches.
    """

    def __init__(
        self,
        model: Decoder,
        adapters: Mapping[str, LoraAdapter],
        micro_batch_tokens: int | None = None,
        frozen: Mapping[str, LowRank | None] | None = None,
        start: Decoder | None = None,
    ):
        """`frozen` adapters can be asked for log-probabilities only. `start`: with full fine-tuning, a copy of the weights as they
        were, which then is what `BASE` means."""
        self.model, self.adapters, self.frozen, self.start = model, dict(adapters), dict(frozen or {}), start
        wanted = micro_batch_tokens or MICRO_BATCH_TOKENS[model.device.type]
        self.micro_batch_tokens = min(wanted, _tokens_in_memory(model))
        if not self.adapters:
            model.full_finetuning()
        self.masters = _float32_masters(model) if not self.adapters else {}
        self.optimizer: torch.optim.AdamW | None = None

    def trainable(self) -> list[torch.nn.Parameter]:
        """What the optimizer steps: the adapters' matrices, or every weight (its float32 master where the base is narrower)."""
        if self.adapters:
            return [p for adapter in self.adapters.values() for p in adapter.parameters()]
        return [self.masters.get(p, p) for p in self.model.parameters()]

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> dict[str, float]:
        """Add the gradient of ``sum of weight * token loss`` over all rows; see `algorithms.losses`.

        Returns ``loss``, ``entropy`` (mean over trained tokens, nats), ``tokens`` trained, the means of the loss's own statistics,
        and the divergence of the sampler from the trainer on the sampled tokens, ``sampler_kl`` (k3, Schulman 2020) and
        ``sampler_gap_max`` (largest absolute difference of log-probabilities).
        """
        weights = token_weights(loss, [datum.n_trained for datum in data])
        sums: dict[str, Tensor] = {}
        gap_max = torch.zeros((), device=self.model.device)
        for adapter, rows in self._micro_batches(data):
            chosen = [data[i] for i in rows]
            if not any(datum.n_trained for datum in chosen):
                continue
            logprobs, entropy, take = self._token_logprobs(chosen, adapter)
            per_token = torch.repeat_interleave(
                torch.tensor([weights[i] for i in rows], device=logprobs.device),
                torch.tensor([datum.n_trained for datum in chosen], device=logprobs.device),
            )
            old, advantages = take("logprobs"), take("advantages")
            losses, stats = token_loss(loss, logprobs, old, advantages)
            total = (per_token * losses).sum()
            total.backward()
            with torch.no_grad():
                difference = logprobs.detach() - old
                stats = stats | {"entropy": entropy, "sampler_kl": torch.expm1(difference) - difference}
                gap_max = torch.maximum(gap_max, difference.abs().max())
                _add(sums, "loss", total.detach())
                _add(sums, "tokens", torch.tensor(float(len(logprobs)), device=logprobs.device))
                for name, values in stats.items():
                    _add(sums, f"mean:{name}", values.detach().sum())
        if not sums:
            return {"loss": 0.0, "tokens": 0.0}
        tokens = sums["tokens"].item()
        metrics = {"loss": sums["loss"].item(), "tokens": tokens}
        metrics |= {
            name.removeprefix("mean:"): value.item() / tokens
            for name, value in sums.items()
            if name.startswith("mean:")
        }
        if loss.name != "cross_entropy":
            metrics["sampler_gap_max"] = gap_max.item()
        else:
            metrics.pop("sampler_kl", None)
        return metrics

    @torch.no_grad()
    def logprobs(
        self, data: Sequence[Datum], adapter: str | None = None, trained_only: bool = False
    ) -> list[list[float]]:
        """Log-probability of every token of every row at the row's temperature; see `Backend.logprobs`."""
        result = [[0.0] * len(d.ids) for d in data]
        rows_of = data if trained_only else [replace(d, mask=[0] + [1] * (len(d.ids) - 1)) for d in data]
        for own, rows in self._micro_batches(rows_of):
            chosen = [rows_of[i] for i in rows]
            if not any(datum.n_trained for datum in chosen):
                continue
            logprobs, _, _ = self._token_logprobs(chosen, self._reference(own, adapter))
            for i, values in zip(rows, logprobs.split([d.n_trained for d in chosen]), strict=True):
                places = (t for t, m in enumerate(rows_of[i].mask) if m)
                for t, value in zip(places, values.tolist(), strict=True):
                    result[i][t] = value
        return result

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
        """Forget what `forward_backward` accumulated."""
        for parameter in (*self.trainable(), *self.masters):
            parameter.grad = None

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
            master.grad = None if weight.grad is None else weight.grad.float()

    def _micro_batches(self, data: Sequence[Datum]) -> Iterator[tuple[str, list[int]]]:
        """(adapter, row indices) with at most `micro_batch_tokens` padded tokens each; rows of like length together."""
        by_adapter: dict[str, list[int]] = {}
        for i, datum in enumerate(data):
            by_adapter.setdefault(datum.adapter, []).append(i)
        for adapter, rows in by_adapter.items():
            rows.sort(key=lambda i: len(data[i].ids))
            batch: list[int] = []
            for i in rows:
                if batch and (len(batch) + 1) * len(data[i].ids) > self.micro_batch_tokens:
                    yield adapter, batch
                    batch = []
                batch.append(i)
            yield adapter, batch

    def _token_logprobs(self, rows: Sequence[Datum], adapter: str) -> tuple[Tensor, Tensor, Any]:
        """(log-probability [N], entropy [N], take) of the trained tokens of `rows`, row after row.

        ``take(field)`` gives another per-token field of the rows at the same N tokens.
        """
        device = self.model.device
        ids = torch.tensor([token for row in rows for token in row.ids], device=device)
        mask = torch.tensor([m for row in rows for m in row.mask], dtype=torch.bool)
        trained = mask.nonzero().squeeze(1).to(device)
        attend = PackedCausal([len(row.ids) for row in rows], device)
        model, lora = self._policy(adapter)
        hidden = model(ids, attend.positions, attend, lora)
        # The token at position t is predicted from the hidden state at t - 1; entry 0 of a row is never trained.
        predicting = hidden.index_select(0, trained - 1)
        temperatures = torch.tensor([row.temperature for row in rows for _ in range(row.n_trained)], device=device)
        logprobs, entropy = self._chunked_logprobs(
            predicting, ids.index_select(0, trained), temperatures, partial(model.logits, lora=lora)
        )

        def take(field: str) -> Tensor:
            values = torch.tensor([v for row in rows for v in getattr(row, field)], dtype=torch.float32)
            return values[mask].to(device)

        return logprobs, entropy, take

    def _chunked_logprobs(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, logits: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, LOGIT_ELEMENTS // self.model.config.vocab_size)

        def part(h: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            logprobs = F.log_softmax(logits(h) / t.unsqueeze(1), dim=-1)
            with torch.no_grad():
                entropy = -(logprobs.exp() * logprobs).sum(-1)
            return logprobs.gather(1, y.unsqueeze(1)).squeeze(1), entropy

        if len(targets) <= chunk:
            return part(hidden, targets, temperatures)
        parts = [
            checkpoint(part, h, y, t, use_reentrant=False)
            for h, y, t in zip(hidden.split(chunk), targets.split(chunk), temperatures.split(chunk), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _policy(self, adapter: str) -> tuple[Decoder, LowRank | None]:
        """(weights, low-rank updates) of a policy by the name of its adapter."""
        if adapter in self.adapters:
            return self.model, self.adapters[adapter].pairs(self.model.dtype, training=torch.is_grad_enabled())
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


def activation_bytes_per_token(model: Decoder) -> int:
    """Bytes kept per token for the backward pass, counted with autograd's saved-tensor hooks on three shapes (within 20 %)."""
    c = model.config
    kept = 8 * (c.hidden_size + (c.n_heads + c.n_kv_heads) * c.head_dim) + 5 * c.intermediate_size
    return kept * c.n_layers * model.dtype.itemsize


def _tokens_in_memory(model: Decoder) -> int:
    """Tokens whose activations fit the memory set aside for them."""
    budget: float = CPU_ACTIVATION_BYTES
    if model.device.type == "cuda":
        budget = GPU_ACTIVATION_SHARE * torch.cuda.get_device_properties(model.device).total_memory
    return max(1, int(budget / activation_bytes_per_token(model)))


def _float32_masters(model: Decoder) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    if model.dtype == torch.float32:
        return {}
    return {p: torch.nn.Parameter(p.detach().float()) for p in model.parameters()}


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value
