"""A base in 4 bits on a CUDA device: right, how small, how fast. Prints a table; exits with 1 where something is not as it should be.

    python bench/qlora.py                        # needs CUDA and bitsandbytes; shapes of Qwen3-0.6B with random weights, no download
    python bench/qlora.py --model Qwen/Qwen3-4B  # weights of a folder or hub id
    python bench/qlora.py --small                # seconds, and on CPU too: checks the script itself

Checks: one layer's products and gradients against bitsandbytes' own Linear4bit; a whole model against bfloat16 and against the same
model holding the dequantised weights; memory of weights and at the peak of a training step; three training steps of a backend with
the proof after each publish; the merge of what it saved.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rllm.backends.base import AdamParams, Datum, LossSpec, SamplingParams
from rllm.backends.local.adapters import create_adapter, create_adapters
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.learner import Learner
from rllm.backends.local.loading import DEFAULT_MODEL, load_decoder, load_tokenizer, resolve_model
from rllm.backends.local.model import BLOCKS, Decoder, FusedLinear, PackedCausal
from rllm.backends.local.quantized import Nf4Linear
from rllm.config.schema import Config, LoraSettings

QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = QWEN3_06B | {"vocab_size": 640, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
GIB = 2**30


class Report:
    """Lines of the table, and whether all that was checked held."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def say(self, what: str, value: str) -> None:
        print(f"{what:<64} {value}", flush=True)

    def check(self, what: str, value: float, allowed: float) -> None:
        good = value <= allowed
        self.say(what, f"{value:.3g} (allowed {allowed:g}){'' if good else '  WRONG'}")
        if not good:
            self.failed.append(what)


def one_layer(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    """Product and input gradient of one matrix against bitsandbytes' layer, and its dequantised weight bit for bit."""
    bnb = importlib.import_module("bitsandbytes")
    torch.manual_seed(0)
    dense = FusedLinear(768, 512, False, dtype, "cpu")
    torch.nn.init.normal_(dense.weight, 0.0, 0.05)
    mine = Nf4Linear(dense, device)
    theirs = bnb.nn.Linear4bit(512, 768, bias=False, compute_dtype=dtype, compress_statistics=True, quant_type="nf4")
    theirs.weight = bnb.nn.Params4bit(
        dense.weight.detach().clone(), requires_grad=False, compress_statistics=True, quant_type="nf4", blocksize=64
    )
    theirs = theirs.to(device)
    whole = bnb.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state)
    report.check("layer: weight against Linear4bit's, largest difference", gap(mine.dequantized(), whole), 0.0)
    x = torch.randn(256, 512, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn(256, 768, device=device, dtype=dtype)
    results = []
    for layer in (mine, theirs):
        y = layer(x)
        results.append((y, *torch.autograd.grad((y * upstream).sum(), x)))
    for name, found, expected in zip(("product", "input gradient"), *results, strict=True):
        report.check(f"layer: {name} against Linear4bit's, relative", relative(found, expected), 0.01)


def whole_model(report: Report, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Logits and adapter gradients against the dequantised weights held densely (must agree) and against the base itself (a distance)."""
    dense, packed = load_decoder(folder, dtype, device), load_decoder(folder, dtype, device, "nf4")
    report.say("weights: dense / quantised", f"{dense.nbytes / GIB:.3f} / {packed.nbytes / GIB:.3f} GiB")
    original, _ = logits_and_gradients(dense)
    for mine, theirs in zip(packed.layers, dense.layers, strict=True):
        for block in BLOCKS:
            getattr(theirs, block).weight.data = getattr(mine, block).dequantized()
    found, gradients = logits_and_gradients(packed)
    expected, right = logits_and_gradients(dense)
    report.check("model: logits against the dequantised weights, relative", relative(found, expected), 0.02)
    report.check("model: adapter gradients against them, relative", relative(gradients, right), 0.05)
    report.say("model: logits against the unquantised base, relative (no limit)", f"{relative(found, original):.3g}")


def logits_and_gradients(model: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    adapter = create_adapter(model, LoraSettings(rank=8, alpha=16), seed=0)
    with torch.no_grad():
        for name in adapter.modules_adapted:
            adapter.matrices(name)[1].normal_(0.0, 0.02, generator=torch.Generator(model.device).manual_seed(1))
    ids = torch.arange(256, device=model.device) % model.config.vocab_size
    attend = PackedCausal([256], model.device)
    pairs = adapter.pairs(model.dtype, training=True)
    logits = model.logits(model(ids, attend.positions, attend, pairs), pairs)
    F.cross_entropy(logits, ids.roll(-1)).backward()
    gradients = torch.cat([p.grad.flatten() for p in adapter.parameters() if p.grad is not None])
    return logits.detach(), gradients


def training_step(
    report: Report, folder: Path, device: torch.device, dtype: torch.dtype, rows: int, length: int
) -> None:
    """Seconds and peak memory of forward, backward and step on `rows` rows of `length` tokens, dense and quantised."""
    for quantization in ("none", "nf4"):
        model = load_decoder(folder, dtype, device, quantization)
        learner = Learner(
            model, {"default": create_adapter(model, LoraSettings(rank=8, alpha=16), 0)}, micro_batch_tokens=8192
        )
        vocabulary = model.config.vocab_size
        data = [
            Datum([(i * 31 + t * 7) % vocabulary for t in range(length)], [0] + [1] * (length - 1)) for i in range(rows)
        ]
        for row in data:
            row.advantages, row.logprobs = [1.0] * length, [-8.0] * length

        def step(learner: Learner = learner, data: list[Datum] = data) -> None:
            learner.forward_backward(data, LossSpec("cross_entropy"))
            learner.optim_step(AdamParams(1e-4))

        step()
        seconds, peak = measured(step, device)
        report.say(f"training step, {rows} x {length} tokens, {quantization}", f"{seconds:.2f} s, peak {peak}")
        del model, learner, step
        collect(device)


def backend_run(report: Report, device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Three steps of the local backend with proof of each publish, sampling, and the merge of what it saves."""
    from rllm.lora.merge import merge_adapter

    settings: dict[str, Any] = {
        "quantization": "nf4",
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    config = Config.model_validate({"model": settings | {"path": str(folder)}, "lora": {"rank": 8}})
    if device.type == "cuda":
        backend = LocalBackend.create(config)
    else:  # what a run refuses, for `--small` without a GPU
        model = load_decoder(folder, dtype, device, "nf4")
        backend = LocalBackend(config, folder, model, load_tokenizer(folder), create_adapters(model, config.lora, 0))
    try:
        base = backend.model.fingerprint()
        ids = [5 + i % 200 for i in range(40)]
        row = Datum(ids, [0] * 10 + [1] * 30, [1.0] * 40, [-3.0] * 40)
        losses = []
        for _ in range(3):
            losses.append(backend.forward_backward([row], LossSpec("cross_entropy"))["loss"])
            backend.optim_step(AdamParams(1e-2))
            backend.publish()
            probe = backend.probe()
            report.check("run: sampler against trainer after a publish", probe.gap_max, probe.tolerance)
            report.check("run: sampler holds other weights than the trainer", float(not probe.same_weights), 0.0)
        report.check("run: loss after three steps over that before", losses[-1] / losses[0], 0.95)
        report.check("run: base changed", float(backend.model.fingerprint() != base), 0.0)
        params = [SamplingParams(max_tokens=64, temperature=1.0, seed=i) for i in range(32)]

        async def sample_all() -> int:
            return sum(len(a.ids) for a in await asyncio.gather(*(backend.sample(ids, p) for p in params)))

        clock = time.perf_counter()
        tokens = asyncio.run(sample_all())
        report.say("run: sampling, 32 at a time", f"{tokens / (time.perf_counter() - clock):,.0f} tokens/s")
        with tempfile.TemporaryDirectory() as out:
            saved = backend.export_adapter(Path(out) / "adapter")["default"]
            logits = merge_adapter(saved, folder, Path(out) / "merged").logits
            if logits is not None:
                report.check("merge into the unquantised base: logits against PEFT's", logits.gap, logits.tolerance)
    finally:
        backend.close()


def measured(step: Callable[[], None], device: torch.device) -> tuple[float, str]:
    """(seconds of `step`, peak memory meanwhile as text)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock = time.perf_counter()
    step()
    if device.type != "cuda":
        return time.perf_counter() - clock, "not measured on CPU"
    torch.cuda.synchronize()
    return time.perf_counter() - clock, f"{torch.cuda.max_memory_allocated() / GIB:.2f} GiB"


def collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).abs().max())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).norm() / b.norm())


def random_model(folder: Path, shapes: dict[str, Any]) -> Path:
    """A Qwen3 of these shapes with random weights, saved to `folder`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shapes))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; default: random weights in the shapes of Qwen3-0.6B")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on CPU where there is no CUDA")
    parser.add_argument("--rows", type=int, default=32, help="rows of the measured training step")
    parser.add_argument("--length", type=int, default=768, help="tokens of each")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.small:
        sys.exit("no CUDA device here; --small checks the script itself on CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, length = (4, 64) if args.small else (args.rows, args.length)
    report = Report()
    one_layer(report, device, dtype)
    with tempfile.TemporaryDirectory() as scratch:
        shapes = SMALL if args.small else QWEN3_06B
        folder = resolve_model(args.model) if args.model else random_model(Path(scratch) / "base", shapes)
        whole_model(report, folder, device, dtype)
        collect(device)
        training_step(report, folder, device, dtype, rows, length)
    backend_run(report, device, dtype, DEFAULT_MODEL)
    if report.failed:
        sys.exit(f"not as it should be: {', '.join(report.failed)}")
    print("all checks passed")


if __name__ == "__main__":
    main()
