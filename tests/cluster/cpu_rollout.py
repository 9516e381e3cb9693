"""Our local engine in the place of vLLM: a rollout server that samples for real, and the adapter that sends it what was trained."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import save_file
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

SERVER = "rllm_engine_server_{}"


class EngineServer:
    """Samples with `LocalBackend`, which is told new weights as a PEFT folder (adapter mode) or a full model (merge mode)."""

    def __init__(self, model: str, max_model_len: int):
        self.model, self.max_model_len = Path(model), max_model_len
        self.folder = Path(tempfile.mkdtemp(prefix="rllm-engine-"))
        self.global_steps, self.updates = None, []
        self.backend = self._backend(self.model, {})

    def _backend(self, model: Path, lora: dict[str, Any]) -> Any:
        from rllm.backends.local.backend import LocalBackend
        from rllm.config.load import load_config

        config: Any = {"model": {"path": str(model), "device": "cpu", "max_model_len": self.max_model_len}}
        return LocalBackend.create(load_config(base=config | {"lora": lora or {"rank": 0}}, training=False).config)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        from rllm.backends.base import SamplingParams

        s = sampling_params
        params = SamplingParams(
            max_tokens=s["max_tokens"], temperature=s["temperature"], seed=s.get("seed"), stop=tuple(s.get("stop", ()))
        )
        done = await self.backend.sample(prompt_ids, params)
        return TokenOutput(
            token_ids=done.ids,
            log_probs=done.logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": self.global_steps},
        )

    async def update(self, tensors: dict[str, Any], peft: dict[str, Any] | None, global_steps: int | None) -> None:
        import torch

        from rllm.lora.files import load_into, read_adapter

        tensors = {name: torch.from_numpy(value) for name, value in tensors.items()}
        self.global_steps = global_steps
        self.updates.append(("adapter" if peft else "full", len(tensors)))
        if peft is None:
            folder = self.folder / "model"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            self.backend.close()
            self.backend = self._backend(folder, {})
            return
        folder = self.folder / "adapter"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(
            json.dumps(peft, default=lambda v: sorted(v) if isinstance(v, set) else str(v))
        )
        if not self.backend.adapters:
            self.backend.close()
            lora = {"rank": peft["r"], "alpha": peft["lora_alpha"], "adapter_path": str(folder)}
            self.backend = self._backend(self.model, lora)
        load_into(self.backend.adapters["default"], folder, read_adapter(folder)[1])
        self.backend.publish()

    async def told(self) -> list[tuple[str, int]]:
        return self.updates

    async def wake_up(self, *_: Any, **__: Any) -> None: ...

    async def sleep(self, *_: Any, **__: Any) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def abort_all_requests(self, **_: Any) -> None: ...

    async def resume_generation(self) -> None: ...


class EngineReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        longest = self.config.max_model_len
        name = SERVER.format(self.replica_rank)
        server = ray.remote(EngineServer).options(name=name, num_cpus=0, max_concurrency=1000)
        self._server_handle = server.remote(str(self.model_config.path), longest)
        self.servers, self._server_address = [self._server_handle], name

    def rollout_worker_use_gpu(self) -> bool:
        return False


class EngineAdapter(BaseRollout):
    """In the actor's process: sends the weights of an update to the server of this rank."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **told: Any) -> None:
        import torch

        tensors = {name: value.detach().float().cpu().numpy().copy() for name, value in weights}
        if not told.get("base_sync_done", True):
            return  # this server has loaded the base itself
        server = ray.get_actor(SERVER.format(torch.distributed.get_rank()))
        peft = told.get("peft_config")
        await server.update.remote(tensors, peft, told.get("global_steps"))
