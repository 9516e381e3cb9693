"""The tinker backend: weights, optimizer and sampler are a Tinker server's; here are the calls that make it train what the config says.

Knows rows and the SDK's clients; the formulas are in `losses.py`, the wire in `connection.py`, files in `files.py`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rllm.algorithms.losses import token_weights
from rllm.algorithms.spec import loss_of
from rllm.backends.base import (
    BASE,
    DEFAULT_ADAPTER,
    INITIAL_ADAPTER,
    MAX_SKIPPED_STEPS,
    PROBE_TEXTS,
    PROBE_TOKENS,
    AdamParams,
    Completion,
    Datum,
    Losses,
    LossSpec,
    OnToken,
    Probe,
    SamplingParams,
    Scored,
    initial_of,
    sampler_gaps,
)
from rllm.backends.tinker import files
from rllm.backends.tinker.connection import Connection
from rllm.backends.tinker.losses import HOSTED_LOSSES, aggregated, custom_loss, native, row_inputs
from rllm.backends.tinker.start import base_model, check_alpha, check_project, load_tokenizer_of, longest, lora_flags
from rllm.backends.token_losses import Sums
from rllm.config.schema import Config, LoraSettings
from rllm.errors import ConfigError, RunError

# What sampler and trainer may differ by where the server computes in float32; of others we do not know.
FLOAT32_TOLERANCE, UNKNOWN_TOLERANCE = 1e-3, 0.3
ROUNDS = 32
"""Rows of the base or the initial policy whose log-probabilities are under way at once."""


@dataclass
class _Asked:
    """A forward_backward under way: some rows of one adapter under one loss."""

    spec: LossSpec
    rows: list[Datum]
    weights: list[float]
    future: Any


class TinkerBackend:
    """See `rllm.backends.base.Backend`. One training run of the server for each adapter, made when first needed."""

    def __init__(self, config: Config, connection: Connection, base: str, base_sampler: Any, tokenizer: Any):
        self.config, self.connection, self.tokenizer = config, connection, tokenizer
        self.base, self.model_name = base, config.model.path
        self.max_model_len = longest(config, connection, base)
        self.policy_version = 0
        self.published_bytes = 0  # the server publishes inside itself
        self.settings: dict[str, LoraSettings] = config.lora.adapters()
        self.training: dict[str, Any] = {}
        self._base_sampler = base_sampler
        self._samplers: dict[str, tuple[Any, int]] = {}
        self._steps_since_publish = 0
        self._with_gradient: set[str] = set()
        self._skipped: dict[str, int] = {}
        self._saved_run: Path | None = None
        about = connection.server.about
        self.losses = HOSTED_LOSSES if about is None else frozenset(about["losses"])
        connection.advice = self._advice

    @classmethod
    def create(cls, config: Config) -> TinkerBackend:
        """Find the server and its model; loads nothing but the tokenizer."""
        connection = Connection.open(config.tinker)
        try:
            check_project(config, connection.server)
            name = base_model(config)
            sampler = connection.begin(
                lambda: connection.client.create_sampling_client(base_model=name), f"model.path={name}"
            )
            tokenizer = load_tokenizer_of(config, sampler)
            return cls(config, connection, name, sampler, tokenizer)
        except BaseException:
            connection.close()
            raise

    # Sampling

    async def sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        adapter: str = DEFAULT_ADAPTER,
        on_token: OnToken | None = None,
    ) -> Completion:
        """`on_token` hears of the tokens when all are there: the API does not stream."""
        client, version = self._sampler(adapter)
        tinker = self.connection.sdk
        prompt = tinker.ModelInput.from_ints(list(prompt_ids))
        future = client.sample(prompt, 1, self._sampling(params))
        told = (await self.connection.wait_async(future, "sampling")).sequences[0]
        ids, logprobs = list(told.tokens), [float(value) for value in told.logprobs or ()]
        if on_token is not None:
            for token, logprob in zip(ids, logprobs, strict=True):
                on_token(token, logprob)
        return Completion(ids, logprobs, [version] * len(ids), "length" if told.stop_reason == "length" else "stop")

    def _sampler(self, adapter: str) -> tuple[Any, int]:
        """(client, policy version) of a policy."""
        fresh = {initial_of(name) for name in self.settings}
        if adapter == BASE or adapter in fresh:  # a fresh adapter changes nothing
            return self._base_sampler, 0
        self._open()
        return self._samplers[adapter]

    def _sampling(self, params: SamplingParams) -> Any:
        if params.stop and params.stop_token_ids:
            raise RunError("a call gives stop texts and stop_token_ids: Tinker's API takes one of them")
        if params.ignore_eos and (params.stop or params.stop_token_ids):
            raise RunError("a call gives ignore_eos and stops: Tinker's API takes one of them")
        stop: Any = [] if params.ignore_eos else list(params.stop) or list(params.stop_token_ids) or None
        return self.connection.sdk.SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=stop,
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )

    def score(self, ids: Sequence[int], adapter: str = DEFAULT_ADAPTER) -> Scored:
        """Not possible: the API tells no ranks."""
        raise RunError(
            "the tinker backend cannot score a prompt (echo, prompt_logprobs): the API tells no ranks of tokens"
        )

    # Training

    def forward_backward(self, data: Sequence[Datum], loss: Losses) -> dict[str, float]:
        return self._collect(self._ask(data, loss))

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        return self._stepped(self._ask_step(params), params)

    def train_step(self, data: Sequence[Datum], loss: Losses, params: AdamParams) -> dict[str, float]:
        """Both requests are under way at once: see `PipelinedBackend`."""
        asked = self._ask(data, loss)
        step = self._ask_step(params)
        metrics = self._collect(asked)
        return metrics | self._stepped(step, params)

    def discard_gradients(self) -> None:
        """The API has no way to drop gradients, and with `train_step` there is no need to."""
        if self._with_gradient:
            raise RunError("Tinker's API cannot discard gradients that were accumulated; make a step, or a new run")

    def _ask(self, data: Sequence[Datum], loss: Losses) -> list[_Asked]:
        """A request for each adapter and loss. The weights are those of all rows, whatever request they go into."""
        self._open()
        counts = [row.n_trained for row in data]
        groups: dict[tuple[str, int], tuple[LossSpec, list[int]]] = {}
        for i, row in enumerate(data):
            if counts[i]:
                _check_temperature(row)
                spec = loss_of(loss, row.role)
                groups.setdefault((row.adapter, id(spec)), (spec, []))[1].append(i)
        asked: list[_Asked] = []
        for (adapter, _), (spec, chosen) in groups.items():
            weights = token_weights(spec, counts)
            asked.append(self._ask_one(adapter, spec, [data[i] for i in chosen], [weights[i] for i in chosen]))
            self._with_gradient.add(adapter)
        return asked

    def _ask_one(self, adapter: str, spec: LossSpec, rows: list[Datum], weights: list[float]) -> _Asked:
        on_policy = self._steps_since_publish == 0 and self.config.algorithm.max_staleness == 0
        same = native(spec, self.losses, on_policy)
        data = [self._datum(row, row_inputs(row, same, weight)) for row, weight in zip(rows, weights, strict=True)]
        client = self.training[adapter]
        if same is not None:
            future = client.forward_backward(data, same.name, same.settings or None)
        else:
            future = client.forward_backward_custom(data, custom_loss(spec, rows, weights))
        return _Asked(spec, rows, weights, future)

    def _datum(self, row: Datum, inputs: Mapping[str, Any]) -> Any:
        tinker = self.connection.sdk
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(row.ids[:-1])), loss_fn_inputs=dict(inputs))

    def _collect(self, asked: Sequence[_Asked]) -> dict[str, float]:
        """Loss and statistics, from the log-probabilities that the server answers with."""
        sums = Sums()
        for one in asked:
            told = self.connection.wait(one.future, "forward_backward")
            logprobs = [torch.tensor(out["logprobs"].to_numpy()).float() for out in told.loss_fn_outputs]
            aggregated(one.spec, one.rows, logprobs, one.weights, sums)
        return sums.metrics()

    def _ask_step(self, params: AdamParams) -> dict[str, Any]:
        adam = self.connection.sdk.AdamParams(
            learning_rate=params.lr,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.grad_clip,
        )
        # What had no rows has no gradient, and stays as it is.
        stepping, self._with_gradient = sorted(self._with_gradient), set()
        self._steps_since_publish += bool(stepping)
        return {name: self.training[name].optim_step(adam) for name in stepping}

    def _stepped(self, futures: Mapping[str, Any], params: AdamParams) -> dict[str, float]:
        """An adapter whose gradient is not finite made no step, but the others did: then ``grad_norm`` is theirs, and
        ``nonfinite_adapters`` says how many made none."""
        norms = {name: self._norm(future) for name, future in futures.items()}
        finite = [norm for norm in norms.values() if math.isfinite(norm)]
        metrics = {"grad_norm": math.hypot(*(finite or norms.values())), "lr": params.lr}
        for name, norm in norms.items():
            self._skipped[name] = 0 if math.isfinite(norm) else self._skipped.get(name, 0) + 1
        if not finite or len(finite) == len(norms):
            return metrics
        if stuck := [name for name, times in self._skipped.items() if times >= MAX_SKIPPED_STEPS]:
            raise RunError(
                f"{MAX_SKIPPED_STEPS} steps in a row had a gradient of the adapter {stuck[0]} that is not finite; lower optim.lr (now "
                f"{params.lr:g})"
            )
        return metrics | {"nonfinite_adapters": float(len(norms) - len(finite))}

    def _norm(self, future: Any) -> float:
        """The norm of one adapter's gradient before clipping; 0 where the server does not tell it, nan where it made no step for it."""
        try:
            told = self.connection.wait(future, "optim_step").metrics or {}
        except RunError as error:
            if "norm is nan" in str(error) or "norm is inf" in str(error):
                return math.nan
            raise
        return next((float(value) for name, value in told.items() if name.startswith("unclipped_grad_l2")), 0.0)

    def logprobs(
        self, data: Sequence[Datum], adapter: str | None = None, trained_only: bool = False
    ) -> list[list[float]]:
        """At temperature 1. Those of the policy in training come from the server's forward pass, those of the base and of a fresh
        adapter, which is the base, from its sampler."""
        for row in data:
            _check_temperature(row)
        values = self._base_logprobs(data) if adapter in (BASE, INITIAL_ADAPTER) else self._own_logprobs(data, adapter)
        if not trained_only:
            return values
        return [
            [v if m else 0.0 for v, m in zip(own, row.mask, strict=True)] for own, row in zip(values, data, strict=True)
        ]

    def _own_logprobs(self, data: Sequence[Datum], adapter: str | None) -> list[list[float]]:
        self._open()
        groups: dict[str, list[int]] = {}
        for i, row in enumerate(data):
            groups.setdefault(adapter or row.adapter, []).append(i)
        result: list[list[float]] = [[] for _ in data]
        asked = []
        for name, chosen in groups.items():
            if name not in self.training:
                raise RunError(
                    f"the tinker backend has no policy {name!r}; there are {', '.join(self.training)} and {BASE}"
                )
            rows = [self._datum(data[i], row_inputs(data[i], None, 0.0)) for i in chosen]
            asked.append((chosen, self.training[name].forward(rows, "cross_entropy")))
        for chosen, future in asked:
            for i, out in zip(chosen, self.connection.wait(future, "forward").loss_fn_outputs, strict=True):
                result[i] = [0.0, *map(float, out["logprobs"].to_numpy())]
        return result

    def _base_logprobs(self, data: Sequence[Datum]) -> list[list[float]]:
        result: list[list[float]] = []
        tinker = self.connection.sdk
        for start in range(0, len(data), ROUNDS):
            prompts = [tinker.ModelInput.from_ints(list(row.ids)) for row in data[start : start + ROUNDS]]
            futures = [self._base_sampler.compute_logprobs(prompt) for prompt in prompts]
            told = [self.connection.wait(future, "log-probabilities of the base") for future in futures]
            result += [[value or 0.0 for value in values] for values in told]
        return result

    # Publishing

    def publish(self) -> int:
        self._open()
        self.policy_version += 1
        self._publish()
        return self.policy_version

    def _publish(self) -> None:
        futures = {name: client.save_weights_and_get_sampling_client() for name, client in self.training.items()}
        clients = {name: self.connection.wait(future, "publishing") for name, future in futures.items()}
        self._samplers = {name: (client, self.policy_version) for name, client in clients.items()}
        self._steps_since_publish = 0

    def probe(self) -> Probe:
        """`Probe.same_weights` is what the API promises: a sampler has the weights that its run had when it was made."""
        self._open()
        tinker = self.connection.sdk
        params = tinker.SamplingParams(max_tokens=PROBE_TOKENS, temperature=1.0, seed=0)
        asked = []
        for name in self.training:
            client, version = self._samplers[name]
            for text in PROBE_TEXTS:
                prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"] or [0]
                asked.append((name, version, prompt, client.sample(tinker.ModelInput.from_ints(prompt), 1, params)))
        rows: list[Datum] = []
        for name, _, prompt, future in asked:
            told = self.connection.wait(future, "sampling").sequences[0]
            row = Datum([*prompt, *told.tokens], [0] * len(prompt) + [1] * len(told.tokens), adapter=name)
            row.logprobs = [0.0] * len(prompt) + [float(value) for value in told.logprobs]
            rows.append(row)
        gaps = sampler_gaps(rows, self.logprobs(rows, trained_only=True))
        about = self.connection.server.about
        exact = about is not None and about["dtype"] == "float32"
        return Probe(
            sampler_version=min(version for _, version, _, _ in asked),
            trainer_version=self.policy_version,
            gap_max=max(gaps, default=0.0),
            gap_mean=sum(gaps) / max(len(gaps), 1),
            same_weights=self._steps_since_publish == 0,
            tolerance=self.config.trainer.publish_tolerance or (FLOAT32_TOLERANCE if exact else UNKNOWN_TOLERANCE),
        )

    # Runs of the server, and files

    def _open(self) -> None:
        """Make the training runs, fresh, and samplers of them."""
        if self.training:
            return
        check_alpha(self.config.lora, self.connection.server)
        futures = {}
        for name, settings in self.settings.items():
            seed = self.config.trainer.seed + (0 if name == DEFAULT_ADAPTER else zlib.crc32(name.encode()))
            about = self.connection.server.about
            metadata = {} if about is None else {about["alpha_metadata"]: f"{settings.alpha:g}"}
            futures[name] = self.connection.client.create_lora_training_client(
                self.base, rank=settings.rank, seed=seed, user_metadata=metadata, **lora_flags(settings)
            )
        try:
            made = {name: self.connection.wait(future, "making a training run") for name, future in futures.items()}
        except RunError as error:
            raise ConfigError(str(error)) from error
        self.training = made
        self._publish()

    def save_state(self, path: Path) -> None:
        """The server keeps weights and optimizer; `path` gets a file that says where."""
        self._open()
        self._saved_run = path.parent
        ttl = self.config.tinker.ttl_seconds
        name = f"state-{self.policy_version:06d}"
        asked = {n: client.save_state(name, ttl_seconds=ttl, overwrite=True) for n, client in self.training.items()}
        paths = {n: str(self.connection.wait(future, "saving the state").path) for n, future in asked.items()}
        files.write_pointer(path, self._trained(), self.connection.server.url, self.policy_version, paths)

    def load_state(self, path: Path) -> None:
        """Open runs from the states that the file of `save_state` names, optimizer included."""
        check_alpha(self.config.lora, self.connection.server)
        pointer = files.read_pointer(path, self._trained())
        client = self.connection.client
        asked = {n: client.create_training_client_from_state_with_optimizer(p) for n, p in pointer.paths.items()}
        self.training = {n: self.connection.wait(future, f"trainer.resume: {path}") for n, future in asked.items()}
        self.policy_version, self._saved_run = pointer.policy_version, path.parent
        self._publish()

    def export_adapter(self, path: Path, facts: Mapping[str, Any] | None = None) -> dict[str, Path]:
        """Download the adapters as PEFT folders, in a subfolder for each role, and read them back."""
        self._open()
        facts = {"policy version": self.policy_version, **(facts or {})}
        folders = {n: path if list(self.training) == [DEFAULT_ADAPTER] else path / n for n in self.training}
        for name, folder in folders.items():
            files.download(self.connection, self.training[name], folder, self.model_name, self.policy_version, facts)
            self.tokenizer.save_pretrained(folder)
        return folders

    def describe(self) -> dict[str, Any]:
        self._open()
        server = self.connection.server
        about = server.about or {}
        scales = {n: (s.rank, s.alpha if server.about else 32.0) for n, s in self.settings.items()}
        lines = [
            f"{'' if len(scales) == 1 else f'{n}: '}LoRA rank {rank}, alpha {alpha:g}, scale {alpha / rank:g} (alpha / rank)"
            for n, (rank, alpha) in scales.items()
        ]
        return {
            "model": self.model_name,
            "device": server.url,
            "dtype": about.get("dtype", "dtype of the service"),
            "parameters": about.get("parameters"),
            "trainable": None,
            "method": "; ".join(lines),
            "server": server.url,
        }

    def close(self) -> None:
        self.connection.close()

    def _trained(self) -> dict[str, Any]:
        """What must be the same for a saved state to fit."""
        settings = self.settings.items()
        return {
            "model.path": self.model_name,
            "lora.per_role": sorted(self.settings),
            "lora.rank": {name: own.rank for name, own in settings},
            "lora.alpha": {name: own.alpha for name, own in settings},
            "lora.target_modules": {
                name: sorted(k for k, on in lora_flags(own).items() if on) for name, own in settings
            },
        }

    def _advice(self) -> str:
        if self._saved_run is None:
            return "No state was saved to go on from; trainer.save_freq saves one every so many steps"
        return f"When it is back, trainer.resume={self._saved_run} goes on from the last state saved"


def _check_temperature(row: Datum) -> None:
    if row.temperature != 1.0 and row.n_trained:
        raise RunError(
            f"a call of role {row.role!r} was sampled at temperature {row.temperature:g}: the tinker backend trains at temperature 1 only; "
            "leave the temperature out of the flow's calls"
        )
