"""The decoder computes what transformers computes, for every architecture it claims to run, and says so when it cannot."""

import json

import pytest
import torch
from tiny_models import VOCAB, random_adapter, with_peft

from rllm.backends.local.loading import load_decoder, load_tokenizer, resolve_model, save_model
from rllm.backends.local.model import FusedLinear, PackedCausal
from rllm.errors import ModelError

LENGTHS = [5, 9, 1, 7]


def packed_logits(decoder, sequences, lora=None):
    attend = PackedCausal([len(s) for s in sequences])
    with torch.no_grad():
        hidden = decoder(torch.cat(sequences), attend.positions, attend, lora)
    return decoder.logits(hidden).split([len(s) for s in sequences])


def sequences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_ragged_batch_equal_transformers(make, kind, tied):
    model, decoder, _ = make(kind, tie_word_embeddings=tied)
    for ids, logits in zip(sequences(), packed_logits(decoder, sequences()), strict=True):
        with torch.no_grad():
            assert (model(ids[None]).logits[0] - logits).abs().max() < 1e-5


def test_scaled_rotary_embeddings_equal_transformers(make):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model, decoder, _ = make("llama", rope_parameters=rope)
    (ids,) = sequences([120])
    with torch.no_grad():
        assert (model(ids[None]).logits[0] - packed_logits(decoder, [ids])[0]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_logits_with_an_adapter_equal_peft_and_differ_from_the_base(make, kind):
    model, decoder, _ = make(kind)
    adapter = random_adapter(decoder)
    ours = packed_logits(decoder, sequences(), adapter.pairs(torch.float32))
    base = packed_logits(decoder, sequences())
    peft_model = with_peft(model, adapter)
    for ids, logits, plain in zip(sequences(), ours, base, strict=True):
        with torch.no_grad():
            assert (peft_model(input_ids=ids[None]).logits[0] - logits).abs().max() < 1e-4
        assert (logits - plain).abs().max() > 1e-3


def test_an_adapter_on_some_matrices_of_a_fused_block_equals_peft(make):
    model, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder, target=["v_proj", "up_proj"], exclude=["layers.1.self_attn.v_proj"])
    assert len(adapter.modules_adapted) == 5
    (ids,) = sequences([12])
    peft_model = with_peft(model, adapter)
    with torch.no_grad():
        expected = peft_model(input_ids=ids[None]).logits[0]
    assert (packed_logits(decoder, [ids], adapter.pairs(torch.float32))[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_the_low_rank_product_and_its_gradients_are_those_of_the_formula(tokens, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, a, b, out = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in [(tokens, 20), (30, 20), (30,), (4, 20), (30, 4), (tokens, 30)]
    )
    linear = FusedLinear(30, 20, True, dtype, "cpu")
    linear.weight.data.copy_(weight)
    linear.bias.data.copy_(bias)
    ours = [t.clone().requires_grad_() for t in (x, a, b)]
    y = linear(ours[0], (ours[1], ours[2]))
    (y * out).sum().backward()
    exact = [t.double().requires_grad_() for t in (x, a, b)]
    expected = exact[0] @ weight.double().T + bias.double() + exact[0] @ exact[1].T @ exact[2].T
    (expected * out.double()).sum().backward()
    assert (y.double() - expected).norm() < tolerance * expected.norm()
    assert all((o.grad.double() - e.grad).norm() < tolerance * e.grad.norm() for o, e in zip(ours, exact, strict=True))
    with torch.no_grad():
        assert (linear(x, (a, b)).double() - expected).norm() < tolerance * expected.norm()


def test_a_fresh_adapter_changes_no_bit(make):
    _, decoder, _ = make("qwen3")
    adapter = random_adapter(decoder, scale=0.0)
    for with_lora, plain in zip(
        packed_logits(decoder, sequences(), adapter.pairs(torch.float32)),
        packed_logits(decoder, sequences()),
        strict=True,
    ):
        assert torch.equal(with_lora, plain)


def test_a_saved_model_loads_in_transformers_and_here(make, tmp_path):
    from transformers import AutoModelForCausalLM

    model, decoder, folder = make("qwen3", tie_word_embeddings=False)
    save_model(decoder, folder, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    (ids,) = sequences([9])
    with torch.no_grad():
        assert torch.equal(again(ids[None]).logits, model(ids[None]).logits)
    assert torch.equal(packed_logits(load_decoder(tmp_path / "out"), [ids])[0], packed_logits(decoder, [ids])[0])


def test_a_model_saved_over_a_sharded_one_is_the_one_that_loads(make, tmp_path, monkeypatch):
    from rllm.backends.local import loading

    _, decoder, folder = make("qwen3")
    monkeypatch.setattr(loading, "MAX_SHARD_BYTES", 20_000)
    save_model(decoder, folder, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    (ids,) = sequences([9])
    assert torch.equal(packed_logits(load_decoder(tmp_path / "out"), [ids])[0], packed_logits(decoder, [ids])[0])
    monkeypatch.undo()
    with torch.no_grad():
        decoder.final_norm.mul_(2.0)
    save_model(decoder, folder, tmp_path / "out")
    # Shards of the earlier save lie beside the new file and must not be read.
    assert torch.equal(packed_logits(load_decoder(tmp_path / "out"), [ids])[0], packed_logits(decoder, [ids])[0])


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_missing_folder_is_named_with_what_to_give():
    with pytest.raises(ModelError, match=r"no folder './nowhere'.*config.json"):
        resolve_model("./nowhere")


def test_a_hub_id_that_cannot_be_fetched_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="could not be fetched from the hub"):
        resolve_model("nobody/no-such-model")


def test_a_folder_without_config_or_weights_is_named(make, tmp_path):
    _, _, folder = make("qwen3")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load_decoder(folder)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_decoder(tmp_path)


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path):
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"'gpt2', and the decoder is for llama, mistral, qwen2, qwen3"):
        load_decoder(tmp_path)


def test_weights_that_do_not_fit_the_config_are_named(make):
    _, _, folder = make("qwen3")
    edit_config(folder, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.raises(ModelError, match=r"unexpected tensor 'model\.layers\.2"):
        load_decoder(folder)
    edit_config(folder, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    with pytest.raises(ModelError, match=r"lacks 11 tensors"):
        load_decoder(folder)


def test_a_cut_off_weights_file_is_named(make):
    _, _, folder = make("qwen3")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_decoder(folder)


def test_a_tokenizer_without_chat_template_is_refused(tmp_path):
    folder = resolve_model("default")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    with pytest.raises(ModelError, match=r"no chat template; add chat_template\.jinja"):
        load_tokenizer(tmp_path)
