"""Whatever the adapter and the shapes of its base: the exported folder, loaded by PEFT over transformers' own model, gives our logits."""

import json
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rllm.backends.local.adapters import SaveContext, create_adapter, save_adapter
from rllm.backends.local.loading import load_decoder
from rllm.backends.local.model import PackedCausal
from rllm.config.schema import LoraSettings

MODELS = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
TARGETS = [
    "all-linear",
    ["q_proj", "v_proj"],
    ["o_proj", "mlp.down_proj"],
    ["layers.1.mlp.gate_proj", "k_proj"],
    r".*\.(q|k|up)_proj",
    r"model\.layers\.1\..*",
    ["lm_head", "up_proj"],
]


@st.composite
def shapes(draw):
    """Sizes of a small decoder: any grouping of heads, head sizes that are not hidden / heads, odd vocabularies, tied or not."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    return {
        "vocab_size": draw(st.integers(33, 90)),
        "hidden_size": heads * 2 * draw(st.integers(2, 6)),
        "intermediate_size": draw(st.integers(9, 70)),
        "num_hidden_layers": draw(st.integers(2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(2, 9)),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


lora = st.builds(
    LoraSettings,
    rank=st.integers(1, 9),
    alpha=st.sampled_from([1, 4, 7.5, 16, 32]),
    target_modules=st.sampled_from(TARGETS),
    exclude_modules=st.sampled_from([None, ["layers.0.self_attn.q_proj"], r".*\.0\.mlp\.(up|down)_proj"]),
    rank_pattern=st.sampled_from([{}, {".*": 3}, {r"layers\.1\..*": 5, ".*": 2}, {r"model\.layers\.1\.[a-z_.]*": 4}]),
    alpha_pattern=st.sampled_from([{}, {".*": 9}, {r"model\.layers\.1\.[a-z_.]*": 20}]),
    use_rslora=st.booleans(),
    train_unembed=st.booleans(),
)


def random_model(kind, sizes, seed, folder):
    """Every weight random, saved to `folder`; norms around 1."""
    torch.manual_seed(seed)
    config_class, model_class = MODELS[kind]
    model = model_class(config_class(**sizes))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)


def trained(decoder, settings, seed):
    """The adapter that `settings` make, as after training: B random."""
    adapter = create_adapter(decoder, settings, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in adapter.modules_adapted:
            b = adapter.matrices(name)[1]
            b.copy_(torch.randn(b.shape, generator=generator) * 0.2)
    return adapter


def our_logits(decoder, ids, adapter):
    attend = PackedCausal([ids.shape[1]])
    pairs = None if adapter is None else adapter.pairs(torch.float32)
    with torch.no_grad():
        return decoder.logits(decoder(ids[0], attend.positions, attend, pairs), pairs)


def within(logits):
    """1e-4, of the largest logit where that is above 1: a scale of 32 makes logits of hundreds, which float32 rounds at 1e-5 each."""
    return 1e-4 * max(1.0, logits.abs().max().item())


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(sizes=shapes(), lora=lora, seed=st.integers(0, 2**20))
def test_peft_reads_the_exported_folder_as_we_mean_it(kind, sizes, lora, seed):
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied heads, which are what is checked
        base, folder = Path(scratch) / "base", Path(scratch) / "adapter"
        random_model(kind, sizes, seed, base)
        decoder = load_decoder(base)
        adapter = trained(decoder, lora, seed)
        save_adapter(adapter, folder, lora, SaveContext(decoder, base, str(base)))
        ids = torch.arange(min(24, sizes["vocab_size"])).unsqueeze(0)
        ours, plain = our_logits(decoder, ids, adapter), our_logits(decoder, ids, None)
        model = MODELS[kind][1].from_pretrained(base, dtype=torch.float32)
        with torch.no_grad():
            assert (model.eval()(input_ids=ids).logits[0] - plain).abs().max() < within(plain)
            theirs = PeftModel.from_pretrained(model, folder).eval()(input_ids=ids).logits[0]
        saved = json.loads((folder / "adapter_config.json").read_text())
    assert (theirs - ours).abs().max() < within(ours)
    assert (ours - plain).abs().max() > 1e-3
    assert saved["use_rslora"] == lora.use_rslora and saved["base_model_name_or_path"] == str(base)
