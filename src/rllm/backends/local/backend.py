"""The local backend: one copy of a model, its adapter, the learner and the sampler over it, in this process.

Puts the parts together behind the `Backend` contract; the work is in model, engine and learner.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rllm.backends.base import (
    DEFAULT_ADAPTER,
    PROBE_TEXTS,
    PROBE_TOKENS,
    AdamParams,
    Completion,
    Datum,
    Losses,
    OnToken,
    Probe,
    SamplingParams,
    Scored,
    initial_of,
    sampler_gaps,
)
from rllm.backends.local import cores
from rllm.backends.local.adapters import SaveContext, create_adapters, save_adapter
from rllm.backends.local.engine import Engine
from rllm.backends.local.facts import describe
from rllm.backends.local.language_model import LanguageModel
from rllm.backends.local.learner import Learner, Policy
from rllm.backends.local.loading import (
    end_of_turn_ids,
    load_model,
    load_tokenizer,
    resolve_model,
    save_model,
    wanted_length,
)
from rllm.backends.local.model import Decoder
from rllm.backends.local.teacher import check_length, load_teacher
from rllm.config.check import engine_problem, quantization_problem
from rllm.config.schema import Config, ModelConfig
from rllm.errors import ConfigError, ModelError
from rllm.lora.adapter import LoraAdapter

# What is sampled after every publish, and by how much sampler and trainer may then differ. Measured differences: bench/RESULTS.md.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
SWITCH_INTERVAL_S = 0.0005
STATE = "state.safetensors"
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


class LocalBackend:
    """See `rllm.backends.base.Backend`."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        model: LanguageModel,
        tokenizer: Any,
        adapters: dict[str, LoraAdapter],
        teacher: Policy | None = None,
    ):
        self.config, self.folder, self.model, self.tokenizer = config, folder, model, tokenizer
        self.adapters = adapters
        self.model_name = config.model.path
        self.max_model_len = max_model_len(config, model)
        if teacher is not None:
            check_length(teacher, self.max_model_len)
        self._initial = {initial_of(name): adapter.snapshot(model.dtype) for name, adapter in adapters.items()}
        # Full fine-tuning overwrites the reference policy, so a copy is kept where one is asked for.
        has_reference = config.algorithm.kl_beta or config.algorithm.kl_in_reward
        start = copy.deepcopy(model) if has_reference and not adapters else None
        self.learner = Learner(model, adapters, frozen=self._initial, start=start, teacher=teacher)
        if not config.trainer.val_only:
            self.learner.make_room()
        # Adapters in training stand around the base's weights, one at a time.
        self._scoring = threading.Lock()
        self.policy_version = 0
        self.engine = self._create_engine(
            eos_ids=end_of_turn_ids(folder, tokenizer),
            max_batch=config.rollout.max_batch,
            max_model_len=self.max_model_len,
            seed=config.trainer.seed,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )
        self._publish_to_engine()
        # The sampler's thread lets go of the interpreter lock at every operation; with the usual 5 ms switch interval each gateway
        # request would hold it up for that long.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._optimizer_ready = False
        self._aside: torch.cuda.Stream | None = None

    @classmethod
    def create(cls, config: Config) -> LocalBackend:
        """Load the model that `config` names and put a fresh (or given) adapter on it."""
        device = pick_device(config.model.device)
        check_quantization(config.model, bool(config.lora.adapters()), device)
        if problem := engine_problem(config, device.type, training=not config.trainer.val_only):
            raise ConfigError(problem)
        dtype = pick_dtype(config.model.dtype, device)
        folder = resolve_model(config.model.path)
        tokenizer = load_tokenizer(folder)
        model = load_model(folder, dtype, device, config.model.quantization, wanted_length(config))
        if len(tokenizer) > model.config.vocab_size:
            raise ModelError(
                f"model.path: the tokenizer of {folder} has {len(tokenizer)} tokens, the model {model.config.vocab_size}"
            )
        teacher = None if config.trainer.val_only else load_teacher(config, folder, tokenizer, model)
        return cls(config, folder, model, tokenizer, create_adapters(model, config.lora, config.trainer.seed), teacher)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        adapter: str = DEFAULT_ADAPTER,
        on_token: OnToken | None = None,
    ) -> Completion:
        completion = await self.engine.sample(prompt_ids, params, adapter, on_token)
        if not self._optimizer_ready:
            # The first optimizer step imports this, which takes seconds: have it ready by then, but not before the first answer.
            self._optimizer_ready = True
            threading.Thread(target=importlib.import_module, args=("torch._dynamo",), daemon=True).start()
        return completion

    def forward_backward(self, data: Sequence[Datum], loss: Losses, ahead: Sequence[Datum] = ()) -> dict[str, float]:
        with cores.turn():
            return self.learner.forward_backward(data, loss, ahead)

    @property
    def tokens_at_once(self) -> int:
        return self.learner.micro_batch_tokens

    def train_ahead(self, data: Sequence[Datum], loss: Losses) -> None:
        with self._scoring, cores.turn(), self._beside_the_sampler():
            self.learner.train_ahead(data, loss)

    @contextlib.contextmanager
    def _beside_the_sampler(self) -> Iterator[None]:
        """On CUDA, a stream of its own for what is queued in a ``with`` of this, which waits for it at the end."""
        if self.model.device.type != "cuda":
            yield
            return
        now = torch.cuda.current_stream(self.model.device)
        self._aside = self._aside or torch.cuda.Stream(self.model.device)
        # What is not yet done there may still be read or written here, and memory freed there may be given out here.
        self._aside.wait_stream(now)
        try:
            with torch.cuda.stream(self._aside):
                yield
        finally:
            self._aside.synchronize()

    def logprobs(
        self, data: Sequence[Datum], adapter: str | None = None, trained_only: bool = False
    ) -> list[list[float]]:
        with cores.turn():
            return self.learner.logprobs(data, adapter, trained_only)

    def score(self, ids: Sequence[int], adapter: str = DEFAULT_ADAPTER) -> Scored:
        with self._scoring:  # one text at a time, so that many callers do not take the memory of many
            return self.learner.score(ids, adapter)

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        with cores.turn():
            return self.learner.optim_step(params)

    def discard_gradients(self) -> None:
        self.learner.discard_gradients()

    def publish(self) -> int:
        self.policy_version += 1
        self._publish_to_engine()
        return self.policy_version

    def probe(self) -> Probe:
        """Both prompts under every adapter at once, so the sampler's mixed batch is what is tested; a few ms of decoding."""
        names = list(self.adapters) or [DEFAULT_ADAPTER]
        longest = max(1, self.max_model_len - PROBE_TOKENS)
        prompts = [self.tokenizer(text, add_special_tokens=False)["input_ids"][:longest] or [0] for text in PROBE_TEXTS]
        params = SamplingParams(max_tokens=PROBE_TOKENS, temperature=1.0, seed=0)
        asked = [(name, ids, self.engine.submit(ids, params, name)) for name in names for ids in prompts]
        rows: list[Datum] = []
        versions: set[int] = set()
        for name, prompt, future in asked:
            answer = future.result()
            versions.update(answer.versions)
            row = Datum([*prompt, *answer.ids], [0] * len(prompt) + [1] * len(answer.ids), adapter=name)
            row.logprobs = [0.0] * len(prompt) + answer.logprobs
            rows.append(row)
        gaps = sampler_gaps(rows, self.logprobs(rows, trained_only=True))
        return Probe(
            sampler_version=next((v for v in versions if v != self.policy_version), self.policy_version),
            trainer_version=self.policy_version,
            gap_max=max(gaps),
            gap_mean=sum(gaps) / len(gaps),
            same_weights=self._sampler_holds_the_adapters(),
            tolerance=self.config.trainer.publish_tolerance or PROBE_TOLERANCE[self.model.dtype],
        )

    def _sampler_holds_the_adapters(self) -> bool:
        with cores.turn():
            return all(
                self.engine.holds(name, adapter.snapshot(self.model.dtype)) for name, adapter in self.adapters.items()
            )

    def describe(self) -> dict[str, Any]:
        with cores.turn():
            return describe(self.config, self.model, self.learner, self.engine)

    def export_adapter(self, path: Path, facts: Mapping[str, Any] | None = None) -> dict[str, Path]:
        """A PEFT folder with tokenizer and model card, one in a subfolder for each role, or the full model. Checked before this
        returns."""
        if not self.adapters:
            if not all(bool(torch.isfinite(tensor).all()) for _, tensor in self.model.hf_tensors()):
                raise ModelError("model not saved: it holds weights that are not finite")
            save_model(self.model, self.folder, path)
            return {"model": path}
        context = SaveContext(
            self.model, self.folder, self.model_name, {"policy version": self.policy_version, **(facts or {})}
        )
        shared = list(self.adapters) == [DEFAULT_ADAPTER]
        folders = {name: path if shared else path / name for name in self.adapters}
        for name, settings in self.config.lora.adapters().items():
            save_adapter(self.adapters[name], folders[name], settings, context)
        return folders

    def save_state(self, path: Path) -> None:
        """Weights in training, optimizer moments and the policy version, in one safetensors file that appears complete or not at all."""
        path.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        for i, (parameter, state) in enumerate(
            zip(self.learner.trainable(), self.learner.optimizer_state(), strict=True)
        ):
            tensors[f"{i}.value"] = parameter.detach().cpu().contiguous()
            tensors |= {f"{i}.{name}": value.detach().cpu().contiguous() for name, value in state.items()}
        partial = path / (STATE + ".partial")
        metadata = {"policy_version": str(self.policy_version), "trained": json.dumps(self._trained())}
        save_file(tensors, partial, metadata=metadata)
        partial.replace(path / STATE)

    def load_state(self, path: Path) -> None:
        """The exact inverse of `save_state` on a backend made with the same config. A file that does not fit changes nothing."""
        try:
            with safe_open(path / STATE, framework="pt") as file:
                version, trained = int(file.metadata()["policy_version"]), json.loads(file.metadata()["trained"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        except Exception as error:  # the reader raises many kinds
            raise ModelError(f"{path / STATE} cannot be read: {error}") from error
        for name, now in self._trained().items():
            if trained.get(name) != now:
                raise ModelError(
                    f"{path}: saved with {name}={trained.get(name)}, this config has {now}; a state goes on only as it was begun "
                    "(lora.adapter_path starts anew from saved weights)"
                )
        parameters = self.learner.trainable()
        values = [tensors.pop(f"{i}.value", None) for i in range(len(parameters))]
        states = [
            {name: tensors.pop(f"{i}.{name}") for name in ADAM_STATE if f"{i}.{name}" in tensors}
            for i in range(len(parameters))
        ]
        if tensors or any(v is None or v.shape != p.shape for v, p in zip(values, parameters, strict=True)):
            raise ModelError(f"{path}: the tensors are not those of this model and its adapters")
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                assert value is not None
                parameter.copy_(value)
            for weight, master in self.learner.masters.items():
                weight.copy_(master)
        self.learner.load_optimizer_state(states, AdamParams(self.config.optim.lr))
        self.policy_version = version
        self._publish_to_engine()

    def close(self) -> None:
        self.engine.close()
        self.learner.close()
        if self.model.device.type == "cuda":
            # The next run of this process wants the memory, whoever still holds this backend.
            gc.collect()
            torch.cuda.empty_cache()

    def _trained(self) -> dict[str, Any]:
        """What must be the same for a saved state to fit."""
        adapters = self.adapters.items()
        return {
            "model.path": self.model_name,
            "model.quantization": self.config.model.quantization,
            "lora.per_role": sorted(self.adapters),
            "lora.rank": {name: adapter.rank for name, adapter in adapters},
            "lora.target_modules": {name: sorted(adapter.modules_adapted) for name, adapter in adapters},
        }

    def _create_engine(self, **settings: Any) -> Engine:
        if self.config.rollout.engine == "vllm":
            from rllm.backends.local.vllm_engine import VllmEngine

            if not isinstance(self.model, Decoder):
                raise ConfigError(
                    f"rollout.engine=vllm: built for the architectures of the fast path, and {self.model_name} takes the plain one; leave "
                    "rollout.engine out"
                )
            ranks = [r for adapter in self.adapters.values() for own in adapter.part_ranks().values() for r in own]
            return VllmEngine(
                self.model, folder=self.folder, rank=max(ranks, default=0), adapters=len(self.adapters), **settings
            )
        return engine_class(self.model)(self.model, **settings)

    def _publish_to_engine(self) -> None:
        # Full fine-tuning trains the sampled tensors themselves: publishing only counts the version.
        with cores.turn():
            newest = {name: adapter.snapshot(self.model.dtype) for name, adapter in self.adapters.items()}
        self.engine.publish({**self._initial, **newest} or {DEFAULT_ADAPTER: None}, self.policy_version)
        self.published_bytes = sum(pairs.nbytes for pairs in newest.values())


def engine_class(model: LanguageModel) -> type[Engine]:
    """The sampler for a model."""
    if not isinstance(model, Decoder):
        from rllm.backends.local.plain.engine import PlainEngine

        return PlainEngine
    if not model.fused:
        return Engine
    from rllm.backends.local.cuda.engine import CudaEngine

    return CudaEngine


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device: {name!r} is no device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device: {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device: {name!r} asked for, but torch sees no CUDA device here; use cpu or auto")
    return device


def check_quantization(settings: ModelConfig, lora: bool, device: torch.device) -> None:
    """Refuse a quantised base that cannot be, before anything is loaded."""
    if problem := quantization_problem(settings, lora, device.type):
        raise ConfigError(problem)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def max_model_len(config: Config, model: LanguageModel) -> int:
    """Longest sequence: what the config says, or prompt + response limits; never more than the model can do."""
    able = min(model.config.max_position, model.config.attention_window or model.config.max_position)
    wanted = config.model.max_model_len
    if wanted is not None and wanted > able:
        raise ConfigError(f"model.max_model_len={wanted}: {config.model.path} can do at most {able} tokens")
    return wanted or min(able, config.data.max_prompt_length + config.data.max_response_length)
