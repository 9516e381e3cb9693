"""A base in 4 bits: one set of weights for sampler and trainer, gradients through what is dequantised, and refusals before any load.

The oracle is a plain NF4 written from the paper; with bitsandbytes installed the same holds for its own functions.
"""

import asyncio
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import build, random_adapter

from rllm.backends.base import AdamParams, Datum, LossSpec, SamplingParams
from rllm.backends.local import adapters, quantized
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.loading import DEFAULT_MODEL, load_decoder, load_tokenizer, save_model
from rllm.backends.local.model import BLOCKS, FusedLinear, PackedCausal
from rllm.config.load import load_config
from rllm.config.schema import Config
from rllm.errors import ConfigError, ModelError
from rllm.sft import SftConfig, run_sft

CPU = torch.device("cpu")
# Dettmers et al. 2023, appendix E.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip


def nf4_round_trip(weight):
    """The nearest NF4 value of every weight, in blocks of 64 along the flat matrix, scales in full."""
    flat = F.pad(weight.float().flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = flat.abs().amax(1, keepdim=True).clamp_min(1e-30)
    code = torch.tensor(NF4)
    nearest = (flat / scales).unsqueeze(-1).sub(code).abs().argmin(-1)
    return (code[nearest] * scales).flatten()[: weight.numel()].view(weight.shape)


def plain_quantize(weight, blocksize, compress_statistics, quant_type):
    assert (blocksize, compress_statistics, quant_type) == (64, True, "nf4")
    state = SimpleNamespace(
        absmax=weight.abs().amax().view(1), nested=False, whole=nf4_round_trip(weight).to(weight.dtype)
    )
    return torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8), state


@pytest.fixture(params=["plain", "bitsandbytes"])
def nf4(request, monkeypatch):
    """Quantisation by the plain NF4 above, or by bitsandbytes where it is installed."""
    if request.param == "plain":
        functions = SimpleNamespace(quantize_4bit=plain_quantize, dequantize_4bit=lambda codes, state: state.whole)
        monkeypatch.setattr(quantized, "_bitsandbytes", lambda: functions)
    else:
        pytest.importorskip("bitsandbytes")
    return request.param


@pytest.fixture
def pair_of(tmp_path, nf4):
    """``pair_of("qwen3")`` -> (quantised decoder, dense decoder that holds the dequantised weights)."""

    def _pair(kind="qwen3", dtype=torch.float32, **settings):
        build(kind, tmp_path / kind, **settings)
        packed, dense = load_decoder(tmp_path / kind, dtype, CPU, "nf4"), load_decoder(tmp_path / kind, dtype)
        for mine, theirs in zip(packed.layers, dense.layers, strict=True):
            for block in BLOCKS:
                getattr(theirs, block).weight.data = getattr(mine, block).dequantized()
        return packed, dense

    return _pair


def run(model, pairs=None):
    ids = torch.arange(30) % model.config.vocab_size
    attend = PackedCausal([18, 12])
    return model.logits(model(ids, attend.positions, attend, pairs), pairs)


def test_dequantised_weights_are_the_nearest_nf4_values(tmp_path, nf4):
    build("llama", tmp_path / "m")
    dense, packed = load_decoder(tmp_path / "m"), load_decoder(tmp_path / "m", quantization="nf4")
    for mine, theirs in zip(packed.layers, dense.layers, strict=True):
        for block in BLOCKS:
            weight, found = getattr(theirs, block).weight, getattr(mine, block).dequantized()
            # bitsandbytes keeps the scales in 8 bits, which moves a value by up to some percent of its block's largest.
            assert (found - nf4_round_trip(weight)).abs().max() <= (
                0.03 if nf4 == "bitsandbytes" else 0.0
            ) * weight.abs().max()
            assert 0.02 < (found - weight).norm() / weight.norm() < 0.15
    for name in ("embed", "final_norm"):
        assert torch.equal(getattr(packed, name), getattr(dense, name))
    assert packed.quantized and not dense.quantized


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients_are_those_of_the_dequantised_weights(pair_of, kind, dtype):
    packed, dense = pair_of(kind, dtype)
    with torch.no_grad():
        assert torch.equal(run(packed), run(dense))
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    gradients = []
    for model in (packed, dense):
        adapter = random_adapter(model, exclude=["layers.0.self_attn.o_proj", "layers.2.mlp.down_proj"])
        logits = run(model, adapter.pairs(dtype, training=True))
        F.cross_entropy(logits, torch.arange(30) % 7).backward()
        gradients.append([logits.detach(), *(p.grad for p in adapter.parameters())])
        with torch.no_grad():
            assert torch.allclose(run(model, adapter.snapshot(dtype)), logits, **close)
    assert all(torch.allclose(a, b, **close) for a, b in zip(*gradients, strict=True))
    assert all(g.abs().max() > 0 for g in gradients[0])


def test_the_backward_pass_agrees_with_finite_differences(pair_of):
    packed, dense = pair_of("qwen2")
    linear = packed.layers[1].qkv
    weight = dense.layers[1].qkv.weight.double()
    assert linear.bias is not None
    x, a = torch.randn(5, weight.shape[1], requires_grad=True), torch.randn(3, weight.shape[1], requires_grad=True)
    b = torch.randn(weight.shape[0], 3, requires_grad=True)
    upstream = torch.randn(5, weight.shape[0])
    for pair in (None, (a, b)):
        wanted = [x] if pair is None else [x, a, b]
        found = torch.autograd.grad((linear(x, pair) * upstream).sum(), wanted)
        x64, a64, b64 = (t.detach().double().requires_grad_() for t in (x, a, b))
        y = x64 @ weight.T + linear.bias.double() + (0 if pair is None else x64 @ a64.T @ b64.T)
        expected = torch.autograd.grad((y * upstream).sum(), [x64, a64, b64][: len(wanted)])
        assert all(torch.allclose(m.double(), e, atol=1e-3, rtol=1e-4) for m, e in zip(found, expected, strict=True))


def test_dropout_falls_on_the_adapters_input_alone(pair_of):
    packed, dense = pair_of("llama")
    x, a, b = torch.randn(4, 48), torch.randn(2, 48), torch.randn(dense.layers[0].qkv.weight.shape[0], 2)
    y = packed.layers[0].qkv(x, (a, b), lambda t: t * 0)
    assert torch.allclose(y, F.linear(x, dense.layers[0].qkv.weight), atol=1e-5)


def test_counts_memory_and_fingerprint_are_those_of_what_is_kept(pair_of, nf4):
    packed, dense = pair_of("qwen3")
    assert packed.parameter_count() == dense.parameter_count() == sum(p.numel() for p in dense.parameters())
    small = sum(getattr(layer, block).weight.numel() for layer in dense.layers for block in BLOCKS)
    assert packed.nbytes < dense.nbytes - 3 * small
    again, _ = pair_of("qwen3")
    assert packed.fingerprint() == again.fingerprint() != dense.fingerprint()
    if nf4 == "bitsandbytes":
        again.layers[1].o.codes[0, 0] ^= 1
        assert packed.fingerprint() != again.fingerprint()


def test_a_full_save_is_refused_by_name(pair_of, tmp_path):
    packed, _ = pair_of("qwen3")
    with pytest.raises(ModelError, match=r"model\.quantization=nf4.*cannot be saved as a full model.*rllm merge"):
        save_model(packed, tmp_path / "qwen3", tmp_path / "out")


def test_a_run_trains_publishes_and_saves_on_one_quantised_base(nf4, tmp_path, monkeypatch):
    config = Config.model_validate({"model": {"quantization": "nf4", "device": "cpu"}, "lora": {"rank": 4}})
    model = load_decoder(DEFAULT_MODEL, quantization="nf4")
    made = adapters.create_adapters(model, config.lora, 0)
    backend = LocalBackend(config, DEFAULT_MODEL, model, load_tokenizer(DEFAULT_MODEL), made)
    try:
        before = backend.describe()
        ids = list(range(10, 40))
        row = Datum(ids, [0] * 10 + [1] * 20, [1.0] * 30, [-3.0] * 30)
        losses = []
        for _ in range(3):
            losses.append(backend.forward_backward([row], LossSpec("cross_entropy"))["loss"])
            backend.optim_step(AdamParams(1e-2))
            backend.publish()
            assert backend.probe().passed
        assert losses[2] < losses[0] - 0.1
        answer = asyncio.run(backend.sample(ids, SamplingParams(max_tokens=12, temperature=1.0, seed=1)))
        (values,) = backend.logprobs([Datum(ids + answer.ids, [0] * 30 + [1] * len(answer.ids))])
        assert answer.logprobs == pytest.approx(values[30:], abs=1e-4)
        after = backend.describe()
        assert after["base_fingerprint"] == before["base_fingerprint"] and "nf4" in after["dtypes"]
        assert after["memory_bytes"]["base"] < 0.5 * 4 * after["parameters"]
        backend.save_state(tmp_path / "state")
        backend.load_state(tmp_path / "state")
        folder = backend.export_adapter(tmp_path / "adapter")["default"]
        assert "in 4 bits (nf4)" in (folder / "README.md").read_text()
    finally:
        backend.close()
    from rllm.lora.merge import merge_adapter

    assert merge_adapter(folder, DEFAULT_MODEL, tmp_path / "merged").logits.gap < 1e-3


# Refusals, before anything is loaded


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.device=cpu"], "needs a CUDA device"),
        (["model.device=cuda", "lora.rank=0"], "weights in 4 bits cannot be trained"),
        (["model.device=cuda"], r"bitsandbytes is not installed; pip install 'rllm\[qlora\]'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(settings, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"argument: model.quantization=nf4.*{message}"):
        load_config(overrides=["model.quantization=nf4", *settings])


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is CUDA here")
def test_a_cpu_that_auto_came_to_is_refused_before_the_model_is_looked_for(tmp_path):
    model = {"path": "./nowhere", "quantization": "nf4"}
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        LocalBackend.create(Config.model_validate({"model": model}))
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        run_sft(SftConfig.model_validate({"model": model, "data": {"train_files": "chats.jsonl"}}))


def test_every_other_base_keeps_its_dense_matrices(tmp_path):
    build("llama", tmp_path / "m")
    assert all(
        isinstance(getattr(layer, b), FusedLinear) for layer in load_decoder(tmp_path / "m").layers for b in BLOCKS
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_product_is_that_of_bitsandbytes_own_layer():
    bnb = pytest.importorskip("bitsandbytes")
    dense = FusedLinear(256, 512, False, torch.bfloat16, CPU)
    torch.nn.init.normal_(dense.weight, 0, 0.05)
    mine = quantized.Nf4Linear(dense, torch.device("cuda"))
    theirs = bnb.nn.Linear4bit(
        512, 256, bias=False, compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4"
    )
    theirs.weight = bnb.nn.Params4bit(
        dense.weight.data.clone(), requires_grad=False, compress_statistics=True, quant_type="nf4"
    )
    theirs = theirs.cuda()
    x = torch.randn(40, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randn(40, 256, device="cuda", dtype=torch.bfloat16)
    for found, expected in zip(
        (mine(x), *torch.autograd.grad((mine(x) * y).sum(), x)),
        (theirs(x), *torch.autograd.grad((theirs(x) * y).sum(), x)),
        strict=True,
    ):
        assert torch.allclose(found, expected, atol=2e-2, rtol=2e-2)
