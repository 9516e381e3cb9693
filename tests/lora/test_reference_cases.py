"""The LoRA kinds of the reference cases: values worked out by hand or taken from other tools, one function per kind."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rllm.backends.local.model import FusedLinear
from rllm.config.schema import LoraSettings
from rllm.errors import ConfigError
from rllm.lora.adapter import LoraAdapter
from rllm.lora.match import adapted_modules, match_modules

CASES = json.loads((Path(__file__).parents[1] / "reference" / "cases.json").read_text())


def cases(kind):
    return [pytest.param(c["input"], c["expected"], c["tolerance"], id=c["id"]) for c in CASES if c["kind"] == kind]


def one_layer(given):
    """(adapter over the single module ``m`` with the case's matrices, frozen linear layer)"""
    a, b = torch.tensor(given["A"]), torch.tensor(given["B"])
    shape = (a.shape[1], b.shape[0])
    layout = {(0, "m"): [("m", shape[1])]}
    adapter = LoraAdapter({"m": shape}, ["m"], layout, rank=given["r"], alpha=given["alpha"], seed=0)
    adapter.set_matrices("m", a, b, given["alpha"] / given["r"])
    linear = FusedLinear(shape[1], shape[0], False, torch.float32, "cpu")
    linear.weight.data = torch.tensor(given.get("W", torch.zeros(shape[1], shape[0]).tolist()))
    return adapter, linear


@pytest.mark.parametrize(("given", "expected", "tolerance"), cases("lora_forward"))
def test_forward(given, expected, tolerance):
    adapter, linear = one_layer(given)
    x = torch.tensor([given["x"]])
    pair = adapter.pairs(torch.float32).pair(0, "m")
    assert adapter.scales["m"] == pytest.approx(expected["scale"], abs=tolerance)
    for grad in (False, True):  # sampling and training take different ways
        with torch.set_grad_enabled(grad):
            assert linear(x, pair)[0].tolist() == pytest.approx(expected["y"], abs=tolerance)
    assert pair is not None
    merged = linear.weight + pair[1] @ pair[0]
    assert merged.flatten().tolist() == pytest.approx([w for row in expected["merged_W"] for w in row], abs=tolerance)


@pytest.mark.parametrize(("given", "expected", "tolerance"), cases("lora_grad"))
def test_gradient_of_a_fresh_adapter(given, expected, tolerance):
    adapter, linear = one_layer(given)
    x = torch.tensor([given["x"]])
    y = linear(x, adapter.pairs(torch.float32).pair(0, "m"))
    assert (y - linear(x))[0].tolist() == expected["delta_y"]
    y.backward(torch.tensor([given["dL_dy"]]))
    a, b = adapter.matrices("m")
    assert a.grad is not None and b.grad is not None
    assert torch.allclose(a.grad, torch.tensor(expected["dA"]), atol=tolerance)
    assert torch.allclose(b.grad, torch.tensor(expected["dB"]), atol=tolerance)


@pytest.mark.parametrize(("given", "expected", "tolerance"), cases("lora_scale"))
def test_scale(given, expected, tolerance):
    def scale(rank, alpha, rslora):
        layout = {(0, "m"): [("m", 2)]}
        return LoraAdapter({"m": (2, 2)}, ["m"], layout, rank=rank, alpha=alpha, seed=0, rslora=rslora).scales["m"]

    plain = [scale(rank, alpha, False) for rank, alpha in given["pairs"]]
    assert plain == pytest.approx(expected["alpha_over_r"], abs=tolerance)
    stabilised = [scale(rank, alpha, True) for rank, alpha in given["pairs"]]
    assert stabilised == pytest.approx(expected["rslora_alpha_over_sqrt_r"], abs=tolerance)


@pytest.mark.parametrize(("given", "expected", "tolerance"), cases("lora_param_count"))
def test_parameter_count(given, expected, tolerance):
    config = Qwen3Config(
        hidden_size=given["hidden"],
        intermediate_size=given["intermediate"],
        num_hidden_layers=given["layers"],
        num_attention_heads=given["q_out"] // 128,
        num_key_value_heads=given["kv_out"] // 128,
        head_dim=128,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    shapes = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    for rank, trainable in zip(given["ranks"], expected["trainable"], strict=True):
        modules = adapted_modules(list(shapes), LoraSettings(rank=rank, target_modules=given["target"]))
        layout = {(i, "m"): [(name, shapes[name][1])] for i, name in enumerate(modules)}
        adapter = LoraAdapter(shapes, modules, layout, rank=rank, alpha=8, seed=0)
        assert adapter.parameter_count() == trainable


@pytest.mark.parametrize(("given", "expected", "tolerance"), cases("module_match"))
def test_module_match(given, expected, tolerance):
    which = (given["modules"], given["target_modules"], given["exclude_modules"])
    if expected["error"] is None:
        assert match_modules(*which) == expected["matched"]
        return
    with pytest.raises(ConfigError) as error:
        match_modules(*which)
    text = str(error.value)
    assert all(repr(unknown) in text for unknown in expected["unknown"])
    assert f"did you mean {expected['suggest']!r}" in text and "up_proj" in text and "lm_head" in text
