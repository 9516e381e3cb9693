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
    """Flash against cuDNN on packed rows: times and agreement."""
    layout = PackedCausal([768] * 7, "cuda")
    n = 7 * 768
    q = torch.randn(n, 16, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(n, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    g = torch.randn_like(q)
    kept = attention(q, k, v, layout)
    ours = attention_backward(g, q, k, v, kept, layout)
    print("flash forward", triton.testing.do_bench(lambda: attention(q, k, v, layout)))
    print("flash backward", triton.testing.do_bench(lambda: attention_backward(g, q, k, v, kept, layout)))
    bounds = layout.bounds
    for packed in (True, False):
        try:
            if packed:
                forms = [q, k, v, g]
                lengths = (bounds, bounds, 768, 768)
            else:
                forms = [t.view(7, 768, -1, 128).transpose(1, 2) for t in (q, k, v, g)]
                lengths = (None, None, 768, 768)
            a, b, c, d = forms
            run = lambda: torch.ops.aten._cudnn_attention_forward(  # noqa: E731
                a, b, c, None, *lengths, True, 0.0, True, False, scale=128**-0.5
            )
            out = run()
            print("cudnn packed" if packed else "cudnn rows", "forward", triton.testing.do_bench(run))
            flat = out[0] if packed else out[0].transpose(1, 2).reshape(n, 16, 128)
            print("  out differs", (flat - kept[0]).abs().max().item(), "lse", tuple(out[1].shape), out[1].dtype)
            back = lambda: torch.ops.aten._cudnn_attention_backward(  # noqa: E731
                d, a, b, c, out[0], out[1], out[6], out[7], torch.empty(0), *(x if x is not None else torch.empty(0) for x in lengths[:2]),
                768, 768, 0.0, True, scale=128**-0.5,
            )  # fmt: skip
            grads = back()
            print("  backward", triton.testing.do_bench(back))
            for mine, theirs in zip(ours, grads, strict=True):
                theirs = theirs if packed else theirs.transpose(1, 2).reshape(mine.shape)
                print("  grad differs", ((mine - theirs).norm() / mine.norm()).item())
        except Exception as error:
            print("cudnn", packed, "failed:", str(error)[:300])


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
