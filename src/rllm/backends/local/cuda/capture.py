"""Passes captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

SAMPLING = -1
"""Priority of what is sampled: a training pass beside it takes what is left of the device."""


def capture(
    passes: Sequence[Callable[[], Any]], memory: Any, *, warm_up: bool = False, priority: int = 0
) -> tuple[list[torch.cuda.CUDAGraph], list[Any], Any]:
    """(a graph of each pass, what each returned, the memory they lie in, which is `memory` where there is one). Passes run one after
    the other in that memory. `warm_up` runs them once before, which compiles their kernels. The caller holds the device (`device_turn`).
    """
    stream = _stream(torch.cuda.current_device(), priority)
    stream.wait_stream(torch.cuda.current_stream())
    if warm_up:
        with torch.cuda.stream(stream):
            for run in passes:
                run()
    graphs: list[torch.cuda.CUDAGraph] = []
    results: list[Any] = []
    for run in passes:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads do what needs no holding of the device meanwhile, such as waiting for an event.
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            results.append(run())
        memory = memory or graph.pool()
        graphs.append(graph)
    torch.cuda.current_stream().wait_stream(stream)
    return graphs, results, memory


@cache
def _stream(device: int, priority: int) -> torch.cuda.Stream:
    """One for all captures: for every stream that products were ever queued on, cuBLAS keeps a workspace of 32 MiB. What is sampled has
    another one than what is trained, since the graphs of both may run at once and each writes to its workspace."""
    return torch.cuda.Stream(device, priority=priority)
