"""Where the time of one decoding step goes, and which variants of a kernel are best on this GPU. For whoever tunes them.

python bench/gpu_kernels.py
"""

from __future__ import annotations

import argparse
import time

import torch
import triton
from gpu import SHAPES, adapter_of, generate, profile, prompts_of, random_decoder, rows_of_w

from rllm.backends.base import LossSpec
from rllm.backends.local.cuda.engine import CudaEngine
from rllm.backends.local.cuda.train import attention, attention_backward
from rllm.backends.local.learner import Learner
from rllm.backends.local.model import PackedCausal
from rllm.backends.local.sums import Sums


def products() -> None:
    """How the rows of adapters below a weight, and how many there are, change the time of a decoding product."""
    for n in (64, 128, 256):
        for name, columns, rows in (
            ("qkv", 1024, 4096),
            ("o", 2048, 1024),
            ("gate_up", 1024, 6144),
            ("down", 3072, 1024),
        ):
            times = []
            for tail in (0, 16, 32, 64, 128, 256):
                weights = [torch.randn(rows + tail, columns, device="cuda", dtype=torch.bfloat16) for _ in range(12)]
                x = torch.randn(n, columns, device="cuda", dtype=torch.bfloat16)
                graph = torch.cuda.CUDAGraph()
                for w in weights:
                    torch.nn.functional.linear(x, w)
                with torch.cuda.graph(graph):
                    for w in weights:
                        torch.nn.functional.linear(x, w)
                times.append(
                    f"+{tail} {triton.testing.do_bench(graph.replay, return_mode='median') * 1e3 / len(weights):.2f}"
                )
            print(f"product {n} x {name}: us", "  ".join(times))


def host_and_device() -> None:
    """Time of a decoding step on the device alone, and of queueing it."""
    model = random_decoder(SHAPES["0.6b"])
    for label, ranks in (("base", ()), ("r8", (8,))):
        for batch in (64, 128):
            engine = CudaEngine(model, eos_ids=[], max_batch=batch, max_model_len=768)
            names = [f"a{i}" for i in range(len(ranks))] or ["base"]
            engine.publish(
                {n: adapter_of(model, r).snapshot(model.dtype) for n, r in zip(names, ranks, strict=False)}, 1
            )
            generate(engine, prompts_of(batch, 256), names, 8)
            step = engine._step
            engine._state.positions.fill_(512)
            with torch.inference_mode():
                for _ in range(3):
                    step.run(batch)
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(50):
                    step.run(batch)
                queued = time.perf_counter() - started
                torch.cuda.synchronize()
                done = time.perf_counter() - started
            print(f"step {label} batch {batch}: queued in {queued * 20:.2f} ms, done in {done * 20:.2f} ms")
            engine.close()
    learner = Learner(model, {"default": adapter_of(model, 8)})
    rows = rows_of_w(argparse.Namespace(prompt=256, tokens=512), 151936)
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        learner.model.fused = True
        plain, Sums.metrics = Sums.metrics, lambda self: {}
        learner.forward_backward(rows, LossSpec())
        Sums.metrics = plain
        queued = time.perf_counter() - started
        torch.cuda.synchronize()
        print(f"forward_backward of W: queued in {queued:.3f} s, done in {time.perf_counter() - started:.3f} s")
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.enable()
    learner.forward_backward(rows[:28], LossSpec())
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


def training_attention() -> None:
    """The two ways of attention in training: times, and that they agree."""
    rows, length = 7, 768
    n = rows * length
    q = torch.randn(n, 16, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(n, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    g = torch.randn_like(q)
    found = {}
    for name in ("flash", "cuDNN"):
        layout = PackedCausal([length] * rows, "cuda")
        layout.ragged = name == "flash"
        out, kept = attention(q, k, v, layout)
        found[name] = (out, *attention_backward(g, q, k, v, out, kept, layout))
        forward = triton.testing.do_bench(lambda x=layout: attention(q, k, v, x))
        backward = triton.testing.do_bench(lambda o=out, s=kept, x=layout: attention_backward(g, q, k, v, o, s, x))
        print(f"{name}: forward {forward * 1e3:.0f} us, backward {backward * 1e3:.0f} us")
    print("differ", [((a - b).float().norm() / a.float().norm()).item() for a, b in zip(*found.values(), strict=True)])
    big = torch.randn(64 * 2**20, device="cuda")
    us = triton.testing.do_bench(lambda: big.sum(), return_mode="median") * 1e3
    print(f"reading {big.nbytes / 2**20:.0f} MiB: {big.nbytes / us / 1e6:.2f} TB/s")


def decode_profile() -> None:
    model = random_decoder(SHAPES["0.6b"])
    prompts = prompts_of(128, 16)
    for label, ranks in (("r8", (8,)), ("r32", (32,)), ("4 adapters", (4, 8, 16, 32))):
        engine = CudaEngine(model, eos_ids=[], max_batch=128, max_model_len=768)
        names = [f"a{i}" for i in range(len(ranks))]
        engine.publish({n: adapter_of(model, r).snapshot(model.dtype) for n, r in zip(names, ranks, strict=True)}, 1)
        generate(engine, prompts, names, 24)
        profile(lambda e=engine, m=names: generate(e, prompts, m, 24), label)
        engine.close()


if __name__ == "__main__":
    products()
    host_and_device()
    training_attention()
