"""What Tinker's API costs over the backend behind it: the same work through the official SDK and without a server, on the packaged model.

python bench/tinker_api.py            # needs the tinker extra; prints one JSON object of seconds
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
ROWS, LENGTH, PROMPTS, GROUP, TOKENS, REPEATS = 64, 256, 16, 8, 64, 5


def medians_s(works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each, once warm; they take turns, so that whatever else the machine does meets all alike."""
    took: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(REPEATS + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if turn:
                took[name].append(time.perf_counter() - started)
    return {name: round(sorted(values)[REPEATS // 2], 4) for name, values in took.items()}


def direct(backend: Any, model_rows: list[list[int]]) -> dict[str, Callable[[], Any]]:
    import numpy as np

    from rllm.backends.base import AdamParams, SamplingParams
    from rllm.serve.tinker.losses import check_settings
    from rllm.serve.tinker.runs import AdapterSpec, TrainingRun
    from rllm.serve.tinker.wire import Row

    run = TrainingRun("direct", "direct", backend.model, "default", AdapterSpec(8, 32.0, 1))
    run.start()
    rows = [
        Row(np.array(ids[:-1], np.int32), {"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1)})
        for ids in model_rows
    ]

    def step() -> None:
        run.train(rows, "cross_entropy", check_settings("cross_entropy", {}), False)
        run.optim_step(AdamParams(1e-5))

    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    backend.engine.update({"bench": run.snapshot()})

    def sample() -> None:
        asked = [backend.engine.submit(ids[:16], params, "bench") for ids in model_rows[:PROMPTS] for _ in range(GROUP)]
        assert all(len(future.result().ids) == TOKENS for future in asked)

    return {"step": step, "sample": sample}


def served(url: str, model_rows: list[list[int]]) -> dict[str, Callable[[], Any]]:
    import tinker  # pyright: ignore[reportMissingImports]

    client = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = client.create_lora_training_client("default", rank=8, seed=1).result()
    # The client makes tensors of lists; its types do not say so.
    inputs: list[Any] = [{"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)} for ids in model_rows]
    rows = [
        tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=one)
        for ids, one in zip(model_rows, inputs, strict=True)
    ]

    def step() -> None:
        losses = training.forward_backward(rows, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
        losses.result()

    sampler = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=TOKENS, stop=[])

    def sample() -> None:
        asked = [sampler.sample(tinker.ModelInput.from_ints(ids[:16]), GROUP, params) for ids in model_rows[:PROMPTS]]
        assert all(len(s.tokens) == TOKENS for future in asked for s in future.result().sequences)

    def publish() -> None:
        training.save_weights_and_get_sampling_client().result()

    rest = tinker.RestClient(base_url=url, api_key="tml-local")

    def info() -> None:
        rest.get_server_capabilities().result()

    return {"step": step, "sample": sample, "publish": publish, "call": info}


def main() -> None:
    from rllm.backends.local.backend import LocalBackend
    from rllm.config.load import load_config
    from rllm.serve.server import ModelServer
    from rllm.serve.tinker.service import TinkerService
    from rllm.serve.tinker.store import Store

    backend = LocalBackend.create(load_config(training=False).config)
    model_rows = [[(7 * i + 3 * j) % 640 for j in range(LENGTH)] for i in range(ROWS)]
    works = {f"direct {name}": work for name, work in direct(backend, model_rows).items()}
    with tempfile.TemporaryDirectory() as folder:
        service = TinkerService(backend, Store(Path(folder)), name="default")
        with ModelServer(backend, "127.0.0.1", 0, service=service) as server:
            works |= {f"served {name}": work for name, work in served(server.url, model_rows).items()}
            seconds = medians_s(works)
        service.close()
    backend.close()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
