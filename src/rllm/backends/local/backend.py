"""The local backend: one copy of a model, its adapter, the learner and the sampler over it, in this process.

Puts the parts together behind the `Backend` contract; the work is in model, engine and learner.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rllm.backends.base import (
    DEFAULT_ADAPTER,
    INITIAL_ADAPTER,
    AdamParams,
    Completion,
    Datum,
    LossSpec,
    SamplingParams,
)
from rllm.backends.local.engine import Engine
from rllm.backends.local.learner import Learner
from rllm.backends.local.loading import (
    TOKENIZER_FILES,
    end_of_turn_ids,
    load_decoder,
    load_tokenizer,
    resolve_model,
    save_decoder,
)
from rllm.backends.local.model import Decoder, LowRank, PackedCausal
from rllm.config.schema import Config, LoraConfig
from rllm.errors import ConfigError, ModelError
from rllm.lora.adapter import LoraAdapter
from rllm.lora.files import check_written, load_into, read_adapter, verify_with_peft, write_adapter
from rllm.lora.match import OUTPUT_HEAD, leaf_names, match_modules, unmatched_excludes

logger = logging.getLogger(__name__)
# Loading a second copy of the base to check a saved adapter is worth it up to here; above, the file itself is read back.
VERIFY_MAX_PARAMETERS = 500_000_000
VERIFY_TOLERANCE = 1e-4
SWITCH_INTERVAL_S = 0.0005
STATE = "state.safetensors"
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


class LocalBackend:
    """See `rllm.backends.base.Backend`."""

    def __init__(self, config: Config, folder: Path, model: Decoder, tokenizer: Any, adapters: dict[str, LoraAdapter]):
        self.config, self.folder, self.model, self.tokenizer = config, folder, model, tokenizer
        self.adapters = adapters
        self.model_name = config.model.path
        self.max_model_len = max_model_len(config, model)
        self.learner = Learner(model, adapters)
        self.policy_version = 0
        self.engine = Engine(
            model,
            eos_ids=end_of_turn_ids(folder, tokenizer),
            max_batch=config.rollout.max_batch,
            max_model_len=self.max_model_len,
            seed=config.trainer.seed,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )
        self._initial = self._snapshots({INITIAL_ADAPTER: adapters[DEFAULT_ADAPTER]} if adapters else {})
        self._publish_to_engine()
        # The sampler's thread lets go of the interpreter lock at every operation; with the usual 5 ms switch interval each gateway
        # request would hold it up for that long.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # The first optimizer step imports this, which takes seconds: have it ready before then.
        threading.Thread(target=importlib.import_module, args=("torch._dynamo",), daemon=True).start()

    @classmethod
    def create(cls, config: Config) -> LocalBackend:
        """Load the model that `config` names and put a fresh (or given) adapter on it."""
        device = pick_device(config.model.device)
        dtype = pick_dtype(config.model.dtype, device)
        folder = resolve_model(config.model.path)
        tokenizer = load_tokenizer(folder)
        model = load_decoder(folder, dtype, device)
        if len(tokenizer) > model.config.vocab_size:
            raise ModelError(
                f"model.path: the tokenizer of {folder} has {len(tokenizer)} tokens, the model {model.config.vocab_size}"
            )
        adapters = (
            {DEFAULT_ADAPTER: create_adapter(model, config.lora, config.trainer.seed)} if config.lora.rank else {}
        )
        return cls(config, folder, model, tokenizer, adapters)

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str = DEFAULT_ADAPTER
    ) -> Completion:
        return await self.engine.sample(prompt_ids, params, adapter)

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> dict[str, float]:
        return self.learner.forward_backward(data, loss)

    def logprobs(self, data: Sequence[Datum], adapter: str | None = None) -> list[list[float]]:
        return self.learner.logprobs(data, adapter)

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        return self.learner.optim_step(params)

    def publish(self) -> int:
        self.policy_version += 1
        self._publish_to_engine()
        return self.policy_version

    def describe(self) -> dict[str, Any]:
        total = sum(parameter.numel() for parameter in self.model.parameters())
        trained = sum(parameter.numel() for parameter in self.learner.trainable())
        lora = self.config.lora
        facts: dict[str, Any] = {
            "model": self.model_name,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "parameters": total,
            "trainable": trained,
            "method": f"LoRA rank {lora.rank}, alpha {lora.alpha:g}" if self.adapters else "full fine-tuning",
        }
        for adapter in self.adapters.values():
            kinds = [name.rpartition(".")[2] for name in adapter.modules_adapted]
            facts["targets"] = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        return facts

    def export_adapter(self, path: Path) -> Path:
        """A PEFT folder with tokenizer and model card, or the full model. Checked before this returns."""
        if not self.adapters:
            if not all(bool(torch.isfinite(tensor).all()) for _, tensor in self.model.hf_tensors()):
                raise ModelError("model not saved: it holds weights that are not finite")
            save_decoder(self.model, self.folder, path)
            return path
        adapter, lora = self.adapters[DEFAULT_ADAPTER], self.config.lora
        gap = save_adapter(self.model, adapter, self.folder, path, model_name=self.model_name, lora=lora)
        (path / "README.md").write_text(_model_card(self, adapter, gap))
        return path

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
        save_file(tensors, partial, metadata={"policy_version": str(self.policy_version)})
        partial.replace(path / STATE)

    def load_state(self, path: Path) -> None:
        """The exact inverse of `save_state` on a backend made with the same config. A file that does not fit changes nothing."""
        try:
            with safe_open(path / STATE, framework="pt") as file:
                version = int(file.metadata()["policy_version"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        except Exception as error:  # the reader raises many kinds
            raise ModelError(f"{path / STATE} cannot be read: {error}") from error
        parameters = self.learner.trainable()
        values = [tensors.pop(f"{i}.value", None) for i in range(len(parameters))]
        states = [
            {name: tensors.pop(f"{i}.{name}") for name in ADAM_STATE if f"{i}.{name}" in tensors}
            for i in range(len(parameters))
        ]
        if tensors or any(v is None or v.shape != p.shape for v, p in zip(values, parameters, strict=True)):
            raise ModelError(f"{path}: saved with another model, LoRA rank or targets than this config has")
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

    def _publish_to_engine(self) -> None:
        # Full fine-tuning trains the sampled tensors themselves: publishing only counts the version.
        adapters = {**self._initial, **self._snapshots(self.adapters)}
        self.engine.publish(adapters or {DEFAULT_ADAPTER: None}, self.policy_version)

    def _snapshots(self, adapters: Mapping[str, LoraAdapter]) -> dict[str, LowRank | None]:
        return {name: adapter.snapshot(self.model.dtype) for name, adapter in adapters.items()}


@torch.no_grad()
def save_adapter(
    model: Decoder, adapter: LoraAdapter, folder: Path, path: Path, *, model_name: str, lora: LoraConfig
) -> float | None:
    """Write `adapter` of the model in `folder` to `path` as a PEFT folder with tokenizer files, and check it by reloading.

    Returns the largest difference between the logits here and those of PEFT; None where the model is too large to load twice or not
    in float32, and the file was only read back and compared.
    """
    write_adapter(
        adapter,
        path,
        base=str(folder) if model_name == "default" else model_name,
        target=lora.target_modules,
        exclude=lora.exclude_modules,
    )
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, path / name)
    check_written(adapter, path)
    small = sum(p.numel() for p in model.parameters()) <= VERIFY_MAX_PARAMETERS
    if not small or model.dtype != torch.float32:
        return None
    ids = torch.arange(min(32, model.config.vocab_size), device=model.device)
    attend = PackedCausal([len(ids)], model.device)
    logits = model.logits(model(ids, attend.positions, attend, adapter.pairs(model.dtype)))
    gap = verify_with_peft(path, folder, ids.unsqueeze(0), logits)
    if not gap <= VERIFY_TOLERANCE:
        raise ModelError(
            f"the adapter saved to {path} gives other logits when PEFT loads it: largest difference {gap:.2e}, "
            f"allowed {VERIFY_TOLERANCE:.0e}; do not use it"
        )
    return gap


def create_adapter(model: Decoder, lora: LoraConfig, seed: int) -> LoraAdapter:
    """The adapter that `lora` asks for, from ``lora.adapter_path`` if given, else fresh."""
    shapes = model.linear_shapes()
    modules = match_modules(list(shapes), lora.target_modules, lora.exclude_modules)
    if OUTPUT_HEAD in modules:
        raise ConfigError(
            f"lora.target_modules: {OUTPUT_HEAD} cannot have an adapter on the local backend; leave it out "
            "(all-linear does)"
        )
    for entry in unmatched_excludes(list(shapes), lora.exclude_modules):
        logger.warning(
            "lora.exclude_modules: %r matches no module; the model has %s", entry, ", ".join(leaf_names(shapes))
        )
    adapter = LoraAdapter(
        shapes,
        modules,
        model.block_layout(),
        rank=lora.rank,
        alpha=lora.alpha,
        seed=seed,
        device=model.device,
    )
    if lora.adapter_path:
        folder = Path(lora.adapter_path)
        saved, matrices = read_adapter(folder)
        load_into(adapter, folder, matrices)
        if saved["r"] != lora.rank or saved["lora_alpha"] != lora.alpha:
            logger.warning(
                "lora.adapter_path: rank %s and alpha %s are taken from %s", saved["r"], saved["lora_alpha"], folder
            )
            adapter.rank, adapter.alpha = saved["r"], saved["lora_alpha"]
    return adapter


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


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def max_model_len(config: Config, model: Decoder) -> int:
    """Longest sequence: what the config says, or prompt + response limits; never more than the model can do."""
    able = min(model.config.max_position, model.config.attention_window or model.config.max_position)
    wanted = config.model.max_model_len
    if wanted is not None and wanted > able:
        raise ConfigError(f"model.max_model_len={wanted}: {config.model.path} can do at most {able} tokens")
    return wanted or min(able, config.data.max_prompt_length + config.data.max_response_length)


def _model_card(backend: LocalBackend, adapter: LoraAdapter, gap: float | None) -> str:
    checked = (
        "tensors read back and equal" if gap is None else f"reloaded with PEFT, largest logit difference {gap:.1e}"
    )
    return (
        f"---\nlibrary_name: peft\nbase_model: {backend.model_name}\n---\n\n# LoRA adapter trained with rllm\n\n"
        f"- base: {backend.model_name}\n- rank {adapter.rank}, alpha {adapter.alpha:g}, "
        f"target modules {backend.config.lora.target_modules}\n- policy version {backend.policy_version}\n"
        f"- trainable parameters: {adapter.parameter_count():,}\n- check: {checked}\n"
    )
