"""The sampler on vLLM, for who wants its scheduler and kernels: the same requests and rules, its tokens (``rollout.engine=vllm``).

vLLM holds a second copy of the base. A publish hands it the adapters as PEFT files in memory; requests under way end with the weights they
began with. Log-probabilities are those of the tempered distribution in float32, of logits that vLLM rounds to the model's dtype; top-k and
top-p, where a call asks for them, cut before they are taken, other than in our own engine.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rllm.backends.local.device_turn import device_turn
from rllm.backends.local.engine import Engine
from rllm.backends.local.language_model import LowRank
from rllm.backends.local.model import Decoder
from rllm.backends.local.requests import Request, fail
from rllm.config.names import VLLM_RANKS
from rllm.errors import ConfigError
from rllm.lora.adapter import LowRankPairs, parts_of

# Adapters that one batch may mix, beside the trained ones and their start: those of `rllm serve`.
MORE_ADAPTERS = 4
# vLLM asks for this share of the device to be free at its start; what it takes is set by `kv_cache_memory_bytes` and the weights.
FREE_SHARE = 0.05


@dataclass(eq=False)
class _Loaded:
    """An adapter in vLLM under a number of its own; `running`: the requests that sample with it."""

    request: Any
    pairs: LowRankPairs
    running: int = 0


@dataclass
class _Given:
    """What vLLM was given of a request: the name it goes by there, its adapter, and the version of the weights it began with."""

    name: str
    loaded: _Loaded | None
    version: int


class VllmEngine(Engine):
    """See `Engine`. `folder` holds the base that `model` was read from; `adapters` is how many are trained, `rank` their highest."""

    def __init__(self, model: Decoder, *, folder: Path, rank: int, adapters: int, **settings: Any):
        self._decoder = model
        self._folder, self._rank, self._most_adapters = folder, rank, 2 * adapters + MORE_ADAPTERS
        self._files = Path(
            tempfile.mkdtemp(prefix="rllm-adapters-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        self._numbers = count(1)
        self._loaded: dict[str, _Loaded | None] = {}
        self._leaving: list[_Loaded] = []
        self._given: dict[Request, _Given] = {}
        self._by_name: dict[str, Request] = {}
        try:
            super().__init__(model, **settings)
        except BaseException:
            shutil.rmtree(self._files, ignore_errors=True)
            raise

    def _prepare(self) -> None:
        # Its engine runs in this process: the adapters' files are read at once, and it ends with us.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        vllm = import_vllm()
        lora = {}
        if self._rank:
            lora = {
                "enable_lora": True,
                "max_lora_rank": next(rank for rank in VLLM_RANKS if rank >= self._rank),
                "max_loras": self._most_adapters,
                "max_cpu_loras": 2 * self._most_adapters,
            }
        self._sampling = vllm.SamplingParams
        self._deltas = vllm.sampling_params.RequestOutputKind.DELTA
        self._adapter_request = vllm.lora.request.LoRARequest
        self._vllm = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=str(self._folder),
                skip_tokenizer_init=True,
                dtype=str(self.model.dtype).removeprefix("torch."),
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_batch,
                gpu_memory_utilization=FREE_SHARE,
                kv_cache_memory_bytes=min(self.kv_bytes, self.kv_bytes_of(self.max_batch + 1, self.max_model_len)),
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                **lora,
            )
        )

    def kv_bytes_of(self, sequences: int, tokens: int) -> int:
        c = self._decoder.config
        return 2 * c.n_layers * c.n_kv_heads * c.head_dim * self.model.dtype.itemsize * sequences * tokens

    def holds(self, name: str, pairs: LowRankPairs) -> bool:
        loaded = self._loaded.get(name)
        return (
            super().holds(name, pairs) and loaded is not None and loaded.request.lora_int_id in self._vllm.list_loras()
        )

    def close(self) -> None:
        super().close()
        self._vllm.engine_core.shutdown()
        shutil.rmtree(self._files, ignore_errors=True)

    # Adapters

    def _adopt(self, adapters: Mapping[str, LowRank | None]) -> None:
        for name in [name for name in self._loaded if name not in adapters]:
            self._retire(self._loaded.pop(name))
        for name, pairs in adapters.items():
            known = self._loaded.get(name)
            if known is not None and known.pairs is pairs:
                continue
            self._retire(known)
            self._loaded[name] = None if pairs is None else self._load(name, pairs)

    def _load(self, name: str, pairs: LowRank) -> _Loaded:
        """Under a number and name that no weights had before, so that vLLM's prefix cache cannot mistake them for older ones."""
        assert isinstance(pairs, LowRankPairs)
        number = next(self._numbers)
        folder = self._files / str(number)
        write_adapter(folder, self.model.block_layout(), pairs)
        request = self._adapter_request(f"{name}@{number}", number, str(folder))
        self._vllm.add_lora(request)
        shutil.rmtree(folder)
        return _Loaded(request, pairs)

    def _retire(self, loaded: _Loaded | None) -> None:
        """Drop it once no request samples with it."""
        if loaded is not None:
            self._leaving.append(loaded)
        for gone in [old for old in self._leaving if not old.running]:
            self._leaving.remove(gone)
            self._vllm.remove_lora(gone.request.lora_int_id)

    def _forget_prefixes(self, adapters: Collection[str] | None = None) -> None:
        """Nothing to do: prefixes are kept under names that are never used again."""

    # Requests

    def _next_requests(self) -> list[Request]:
        """All that wait: vLLM has a queue of its own."""
        with self._wake:
            fresh = [request for request in self._waiting if not request.future.cancelled()]
            self._waiting.clear()
        return fresh

    def _admit(self) -> None:
        for request in self._next_requests():
            given = _Given(str(next(self._numbers)), self._loaded.get(request.adapter), self.version)
            try:
                self._vllm.add_request(
                    given.name,
                    {"prompt_token_ids": list(request.prompt)},
                    self._params(request),
                    lora_request=given.loaded.request if given.loaded is not None else None,
                )
            except Exception as error:
                fail(request, error)
                continue
            if given.loaded is not None:
                given.loaded.running += 1
            self._given[request], self._by_name[given.name] = given, request
            self._running.append(request)

    def _params(self, request: Request) -> Any:
        params = request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)}
        return self._sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=request.seed & (2**63 - 1),
            max_tokens=request.limit,
            stop_token_ids=sorted(ends),
            ignore_eos=True,  # ours are among the stop tokens, its own come from another file
            logprobs=0,
            detokenize=False,
            output_kind=self._deltas,
        )

    def _decode_step(self) -> None:
        self._stats["decode_steps"] += 1
        done: set[Request] = set()
        with device_turn(self.model):
            outputs = self._vllm.step()
        for output in outputs:
            request = self._by_name.get(output.request_id)
            if request is None:  # cancelled meanwhile
                continue
            [part] = output.outputs
            for token, entry in zip(part.token_ids, part.logprobs or (), strict=True):
                self._stats["generated_tokens"] += 1
                if self._accept(request, token, entry[token].logprob, self._given[request].version):
                    done.add(request)
                    break
            if output.finished and request not in done:
                fail(request, RuntimeError(f"vLLM ended a request early: {part.finish_reason}"))
                done.add(request)
        if done:
            self._remove([slot for slot, request in enumerate(self._running) if request in done])

    def _remove(self, slots: Sequence[int]) -> None:
        gone = {self._running[slot] for slot in slots}
        self._set_running([request for request in self._running if request not in gone])

    def _set_running(self, requests: list[Request]) -> None:
        """Keep only these; vLLM is told of those that it has not ended itself."""
        kept = set(requests)
        names = []
        for request in [request for request in self._given if request not in kept]:
            given = self._given.pop(request)
            del self._by_name[given.name]
            names.append(given.name)
            if given.loaded is not None:
                given.loaded.running -= 1
        self._running = requests
        if names:
            self._vllm.abort_request(names)
        self._retire(None)


def import_vllm() -> Any:
    """The package with what is used of it, or a `ConfigError` that says what to install."""
    try:
        import vllm  # pyright: ignore[reportMissingImports]
        import vllm.lora.request  # pyright: ignore[reportMissingImports]
        import vllm.sampling_params  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine=vllm: vLLM cannot be imported ({error}); pip install 'rllm[vllm]', or leave rollout.engine out for the "
            "engine that is built in"
        ) from error
    return vllm


@torch.no_grad()
def write_adapter(
    folder: Path, layout: Mapping[tuple[int, str], Sequence[tuple[str, int]]], pairs: LowRankPairs
) -> None:
    """A PEFT folder of published matrices: their scale is in B, so alpha is the rank."""
    tensors: dict[str, torch.Tensor] = {}
    ranks: list[int] = []
    for key, parts in layout.items():
        pair = pairs.pair(*key)
        if pair is None:
            continue
        on_host = (pair[0].detach().cpu(), pair[1].detach().cpu())
        for name, a, b in parts_of(on_host, parts, pairs.part_ranks(*key)):
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
            ranks.append(len(a))
    modules = sorted({name.split(".")[-3] for name in tensors})
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": max(ranks), "lora_alpha": max(ranks), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(facts | {"target_modules": modules}))
