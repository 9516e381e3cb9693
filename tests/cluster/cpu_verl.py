"""verl on a machine without accelerators: a CPU platform, its FSDP2 engine on gloo, and OUR engine as its rollout servers.

verl imports this module in every process by ``VERL_USE_EXTERNAL_MODULES=cpu_verl``; ``VERL_PLATFORM=cpu`` chooses the platform. Only the
places where verl names a device are replaced: what trains and what samples is real.
"""

from __future__ import annotations

import types
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

RESOURCE = "GPU"  # the logical ones that `ray.init(num_gpus=...)` declares: verl counts no other
NAME = "rllm_engine"


def _nothing(*_: Any, **__: Any) -> None:
    return None


_DEVICE: Any = types.SimpleNamespace(
    **{
        name: getattr(torch.cpu, name)
        for name in ("synchronize", "stream", "Stream", "current_stream")
        if hasattr(torch.cpu, name)
    },
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: "cpu",
    set_device=_nothing,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    reset_peak_memory_stats=_nothing,
    mem_get_info=lambda *_: (2**30, 2**30),
    get_device_name=lambda *_: "cpu",
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    Event=object,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: Any = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return RESOURCE

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _replica() -> Any:
    from cpu_rollout import EngineReplica

    return EngineReplica


def _register_rollout() -> None:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[NAME, "async"] = "cpu_rollout.EngineAdapter"
    RolloutReplicaRegistry.register(NAME, _replica)


_register_rollout()


def _one_backend_for_each_device() -> None:
    """verl asks for "cpu:gloo" beside the platform's own backend, which here is that one again."""
    begin = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return begin(",".join(dict.fromkeys(backend.split(","))) if backend else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


_one_backend_for_each_device()
