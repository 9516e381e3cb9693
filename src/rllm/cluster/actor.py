"""verl's actor worker that can also say what it trains and write its adapter for other tools.

Imported in processes of a run on verl only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import collect_lora_params
from verl.workers.engine_workers import ActorRolloutRefWorker

from rllm.lora.files import CONFIG, WEIGHTS


class FlowActorWorker(ActorRolloutRefWorker):
    """Adds `trained` and `export_adapter`; all ranks take part in both."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trained(self) -> dict[str, Any]:
        """Parameters trained and in all, and how many LoRA matrices there are among the trained ones."""
        named = list(self.actor.engine.module.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad]
        return {
            "trained": sum(p.numel() for _, p in trained),
            "total": sum(p.numel() for _, p in named),
            "adapters": sum("lora_" in name for name, _ in trained),
            "others": [name for name, _ in trained if "lora_" not in name][:3],
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_adapter(self, path: str, base: str) -> dict[str, Any] | None:
        """Write the adapter as PEFT does and read it back: names, shapes and values must be those in memory."""
        engine = self.actor.engine
        module = engine.module
        peft_model = getattr(module, "_fsdp_wrapped_module", module)
        if engine.is_param_offload_enabled:
            engine.to(get_device_name(), model=True, optimizer=False, grad=False)
        tensors = collect_lora_params(module=module, layered_summon=False, base_sync_done=True)
        if engine.is_param_offload_enabled:
            engine.to("cpu", model=True, optimizer=False, grad=False)
        if torch.distributed.get_rank() != 0:
            return None
        tensors = {
            name if name.startswith("base_model.model.") else f"base_model.model.{name}": value.detach()
            .cpu()
            .contiguous()
            .clone()
            for name, value in tensors.items()
        }
        about = peft_model.peft_config["default"].to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(about, indent=2, default=_plain) + "\n")
        read = load_file(folder / WEIGHTS)
        same = read.keys() == tensors.keys() and all(torch.equal(read[name], value) for name, value in tensors.items())
        finite = all(torch.isfinite(value).all() for value in read.values())
        return {"tensors": len(read), "same": same, "finite": bool(finite)}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))
