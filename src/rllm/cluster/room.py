"""Whether there is a Ray cluster and it has the GPUs that a run asks for, before anything waits for them.

Knows Ray's list of nodes; nothing of verl. verl itself compares the sum over all nodes only, and then waits without end for a node that
has enough.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import RunError

# verl reserves so many CPUs beside each GPU.
CPUS_PER_GPU = 3
# So long an address may take to answer; Ray itself tries for minutes, and says little then.
ANSWER_S = 10.0


def connect(asked: Mapping[str, Any]) -> None:
    """``ray.init`` with the settings `asked`. Raises a `RunError` where no cluster answers at the address that these, RAY_ADDRESS or the
    last ``ray start`` on this machine name; where none of them names any, Ray is started."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    address = asked.get("address") or os.environ.get("RAY_ADDRESS")
    try:
        if address in (None, "", "auto"):
            address = canonicalize_bootstrap_address(address, asked.get("_temp_dir")) or address
        if address and (place := re.fullmatch(r"(?P<host>[\w.-]+):(?P<port>\d+)", str(address))):
            socket.create_connection((place["host"], int(place["port"])), ANSWER_S).close()
        ray.init(**asked)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:  # nobody there, or what is no address of Ray's
        raise RunError(
            f"Ray at {address or 'this machine'}: {str(error).strip() or type(error).__name__}; start a cluster (ray start --head), correct "
            "RAY_ADDRESS, or, to use this machine alone, unset it and forget one that has ended (ray stop)"
        ) from error


def check_room(nodes: int, gpus: int) -> None:
    """Raise a `RunError` where fewer than `nodes` nodes have `gpus` GPUs each."""
    import ray

    lack = lacking([node["Resources"] for node in ray.nodes() if node["Alive"]], nodes, gpus)
    if lack:
        raise RunError(lack)


def lacking(found: Sequence[dict[str, Any]], nodes: int, gpus: int) -> str | None:
    """What the nodes with the resources `found` lack for `nodes` nodes of `gpus` GPUs; None where nothing."""
    fit = [node for node in found if node.get("GPU", 0) >= gpus]
    asked = f"trainer.nnodes={nodes} trainer.n_gpus_per_node={gpus}"
    each = ", ".join(f"{node.get('GPU', 0):g}" for node in found) or "none"
    if len(fit) < nodes:
        return (
            f"{asked}: the Ray cluster has {len(found)} machine{'s' * (len(found) != 1)}, with this many GPUs each: {each}; lower these "
            "keys, start Ray on more machines (RAY_ADDRESS names the cluster), or use backend=local where there is no GPU"
        )
    if sum(node.get("CPU", 0) >= gpus * CPUS_PER_GPU for node in fit) < nodes:
        cpus = ", ".join(f"{node.get('CPU', 0):g}" for node in fit)
        return (
            f"{asked}: verl wants {CPUS_PER_GPU} CPUs beside each GPU, {gpus * CPUS_PER_GPU} a machine, and Ray counts {cpus}; "
            "say ray start --num-cpus=N (or ray_kwargs.ray_init.num_cpus=N where the run starts Ray itself)"
        )
    return None
