"""The CUDA path against the plain one, in float32, with Triton's interpreter on the CPU (or on a GPU where there is one).

Triton comes with torch for CUDA; without it these tests are skipped. Run them on a CPU with
    pip install triton && TRITON_INTERPRET=1 pytest tests/backends/local/cuda
"""

import os
import random

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is asked for with TRITON_INTERPRET=1", allow_module_level=True)

from rllm.backends.base import SamplingParams
from rllm.backends.local.cuda import train
from rllm.backends.local.cuda.engine import CudaEngine
from rllm.backends.local.engine import Engine
from rllm.backends.local.model import Decoder, DecoderConfig, PackedCausal
from rllm.lora.adapter import LoraAdapter

VOCAB = 700


def decoder(qk_norm=True, qkv_bias=False, layers=1):
    config = DecoderConfig(VOCAB, 96, layers, 6, 2, 32, 160, 1e-6, 512, True, qk_norm, qkv_bias)
    torch.manual_seed(0)
    model = Decoder(config, 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32))
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = noise * 0.2 if parameter.dim() > 1 else 1.0 + noise * 0.1
    return model


def adapter_on(model, rank=4, leave_out=("lm_head",), seed=0, **settings):
    names = [name for name in model.linear_shapes() if not any(part in name for part in leave_out)]
    adapter = LoraAdapter(model.linear_shapes(), names, model.block_layout(), rank=rank, alpha=8, seed=seed, **settings)
    for b in adapter.b.values():
        b.data = torch.randn_like(b) * 0.1
    return adapter


@pytest.fixture
def plain_attention(monkeypatch):
    """Attention by torch's own operator: flash and cuDNN need the device."""

    def mixed(q, k, v, layout):
        rows = [
            F.scaled_dot_product_attention(
                *(t[a:b].transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
            )
            for a, b in zip(layout.bounds[:-1].tolist(), layout.bounds[1:].tolist(), strict=True)
        ]
        return torch.cat([row[0].transpose(0, 1) for row in rows]).contiguous()

    def backward(grad, q, k, v, out, kept, layout):
        with torch.enable_grad():
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(mixed(*leaves, layout), leaves, grad)

    nothing = torch.zeros(1)
    monkeypatch.setattr(train, "attention", lambda q, k, v, layout: (mixed(q, k, v, layout), (nothing,) * 3))
    monkeypatch.setattr(train, "attention_backward", backward)


def relative(a, b):
    return ((a - b).abs().max() / (a.abs().max() + 1e-9)).item()


@pytest.mark.parametrize(("qk_norm", "qkv_bias"), [(True, False), (False, True)])
@pytest.mark.parametrize("full", [False, True])
def test_a_fused_layer_has_the_values_and_gradients_of_the_plain_one(plain_attention, qk_norm, qkv_bias, full):
    model = decoder(qk_norm, qkv_bias)
    adapter = adapter_on(model)
    if full:
        model.full_finetuning()
    layout, layer = PackedCausal([5, 17, 9]), model.layers[0]
    x, grad = torch.randn(31, 96, requires_grad=True), torch.randn(31, 96)
    trained = [x, *(layer.parameters() if full else adapter.parameters())]

    def gradients(y):
        return y, torch.autograd.grad((y * grad).sum(), trained)

    def pairs():
        return None if full else adapter.pairs(torch.float32)

    y, expected = gradients(layer(x, *model._rotary(layout.positions), layout, pairs()))
    ours, found = gradients(train.fused_layer(layer, x, model.rotary_tables(), layout, pairs()))
    assert relative(y, ours) < 1e-5
    assert max(relative(a, b) for a, b in zip(expected, found, strict=True)) < 1e-5


def test_gradients_added_up_over_passes_are_those_of_autograd(plain_attention):
    model = decoder()
    adapter = adapter_on(model, leave_out=("lm_head", "v_proj"), rank_pattern={"o_proj": 6})
    layout, layer = PackedCausal([5, 17, 9]), model.layers[0]
    x, grad = torch.randn(31, 96), torch.randn(31, 96)
    pairs, finish = adapter.accumulating(torch.float32)
    for _ in range(2):
        (train.fused_layer(layer, x, model.rotary_tables(), layout, pairs) * grad).sum().backward()
    finish()
    found = [parameter.grad.clone() for parameter in adapter.parameters()]
    for parameter in adapter.parameters():
        parameter.grad = None
    plain = layer(x, *model._rotary(layout.positions), layout, adapter.pairs(torch.float32))
    (2 * (plain * grad).sum()).backward()
    assert max(relative(p.grad, f) for p, f in zip(adapter.parameters(), found, strict=True)) < 1e-5


@pytest.mark.parametrize("full", [False, True])
def test_the_output_head_gives_logprobs_entropies_and_gradients_in_chunks(monkeypatch, full):
    monkeypatch.setattr(train, "HEAD_ROWS", 5)
    monkeypatch.setattr(train, "LOGPROB_BLOCK", 256)
    model = decoder()
    model.embed.requires_grad_(full)
    hidden, targets = torch.randn(13, 96, requires_grad=True), torch.randint(0, VOCAB, (13,))
    temperatures, grad = torch.rand(13) + 0.5, torch.randn(13)
    trained = [hidden, *([model.embed] if full else [])]
    plain = F.log_softmax(F.linear(hidden, model.embed) / temperatures[:, None], -1)
    expected = plain.gather(1, targets[:, None]).squeeze(1)
    logprobs, entropies = train.token_logprobs(model, hidden, targets, temperatures)
    assert (logprobs - expected).abs().max() < 1e-5
    assert (entropies + (plain.exp() * plain).sum(-1)).abs().max() < 1e-5
    reference = torch.autograd.grad((expected * grad).sum(), trained)
    found = torch.autograd.grad((logprobs * grad).sum(), trained)
    assert max(relative(a, b) for a, b in zip(reference, found, strict=True)) < 1e-5


def test_the_sampler_draws_what_the_plain_one_draws_for_every_adapter_of_a_mixed_batch():
    numbers = random.Random(0)
    prompts = [[numbers.randrange(VOCAB) for _ in range(length)] for length in (5, 64, 70)]
    found = []
    for kind in (Engine, CudaEngine):
        model = decoder(layers=2)
        adapters = {
            "a": adapter_on(model, 4),
            "b": adapter_on(model, 20, seed=1),
            "c": adapter_on(model, leave_out=("k_proj",)),
        }
        published = {name: adapter.snapshot(torch.float32) for name, adapter in adapters.items()}
        engine = kind(model, eos_ids=[], max_batch=24, max_model_len=100)
        engine.publish(published, 1)
        futures = [
            engine.submit(prompt, SamplingParams(4 + i, 0.0), name)
            for i, prompt in enumerate(prompts)
            for name in ("base", "a", "b", "c", "a")
        ]
        found.append([future.result() for future in futures])
        assert all(engine.holds(name, pairs) for name, pairs in published.items())
        other = adapter_on(model, 4, seed=9).snapshot(torch.float32)
        assert not engine.holds("a", other)
        engine.publish({"a": other}, 2)
        assert engine.holds("a", other) and engine.submit(prompts[0], SamplingParams(2), "a").result().versions == [
            2,
            2,
        ]
        engine.close()
    for plain, ours in zip(*found, strict=True):
        assert ours.ids == plain.ids and ours.versions == plain.versions
        assert max(abs(a - b) for a, b in zip(ours.logprobs, plain.logprobs, strict=True)) < 1e-4
