"""Where the time of one decoding step goes, and which variants of a kernel are best on this GPU. For whoever tunes them.

python bench/gpu_kernels.py
"""

from __future__ import annotations

import math

import torch
import triton
from gpu import SHAPES, adapter_of, generate, profile, prompts_of, random_decoder

from rllm.backends.local.cuda import kernels
from rllm.backends.local.cuda.engine import CudaEngine
from rllm.backends.local.cuda.train import attention, attention_backward
from rllm.backends.local.model import PackedCausal

BANDWIDTH = 4.24e12


def decode_attention_variants() -> None:
    n, heads, kv_heads, size, context = 128, 16, 8, 128, 512
    for page in (64, 128):
        pages = n * context // page
        k, v = (torch.randn(pages + 1, kv_heads, page, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        table = (torch.randperm(pages, device="cuda").view(n, -1) + 1).to(torch.int32)
        positions = torch.full((n,), context - 1, device="cuda", dtype=torch.int32)
        q = torch.randn(n, heads, size, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(q)
        for warps in (2, 4, 8):
            for stages in (2, 3, 4):

                def run(
                    page=page, k=k, v=v, table=table, warps=warps, stages=stages, q=q, out=out, positions=positions
                ):
                    kernels.decode_attention_kernel[(n, kv_heads, 1)](
                        q, k, v, table, table.stride(0), positions, out, out, out, size**-0.5 * math.log2(math.e),
                        HEADS=heads, KV_HEADS=kv_heads, GROUP=2, PADDED=16, SIZE=size, PAGE=page, SPLITS=1,
                        num_warps=warps, num_stages=stages,
                    )  # fmt: skip

                try:
                    us = triton.testing.do_bench(run, return_mode="median") * 1e3
                except Exception as error:
                    print("attention", page, warps, stages, type(error).__name__)
                    continue
                floor = n * context * kv_heads * size * 4 / BANDWIDTH * 1e6
                print(
                    f"decode attention page {page} warps {warps} stages {stages}: {us:.1f} us, {floor / us:.2f} of floor"
                )


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
    decode_attention_variants()
    training_attention()
    decode_profile()
