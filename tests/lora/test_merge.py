"""A merged folder is the base plus the adapter for any architecture: the oracle is PEFT over the same base, loaded by transformers."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, build
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from rllm.errors import ConfigError, ModelError
from rllm.lora import merge_check
from rllm.lora.merge import MergeOptions, base_of, find_adapter, merge_adapter

IDS = torch.arange(24).unsqueeze(0) % VOCAB
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OTHERS = {
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, ["query_key_value", "dense_h_to_4h", "dense"]),
    "gemma": (GemmaForCausalLM, GemmaConfig, "all-linear"),
    "gpt2": (GPT2LMHeadModel, GPT2Config, "all-linear"),
}


def base_model(kind, folder, dtype=torch.float32, shard=None, **settings):
    """A random model of any of our kinds or of OTHERS, saved to `folder`."""
    if kind in OTHERS:
        model_class, config_class, _ = OTHERS[kind]
        more = {"num_key_value_heads": 2, "head_dim": 8} if kind == "gemma" else {}
        torch.manual_seed(5)
        model = model_class(config_class(**(SIZES | more | settings)))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    else:
        model = build(kind, folder, **settings)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return folder


def peft_adapter(base, folder, scale=0.2, **settings):
    """A random adapter of PEFT's own making over `base`, saved to `folder`."""
    config = LoraConfig(
        **({"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings)
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def logits_of(folder, adapter=None):
    """In float32, by transformers, with `adapter` put on by PEFT."""
    from peft import PeftModel

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def tensors_of(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture
def pair(tmp_path):
    """``pair("qwen3")`` -> (base folder, adapter folder)."""

    def _pair(kind, dtype=torch.float32, shard=None, adapter=None, **settings):
        base = base_model(kind, tmp_path / f"{kind} base", dtype, shard, **settings)
        targets = {"target_modules": OTHERS[kind][2]} if kind in OTHERS else {}
        return base, peft_adapter(base, tmp_path / f"{kind} adapter", **(targets | (adapter or {})))

    return _pair


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt_neox", "gemma", "gpt2"])
def test_the_merged_model_gives_the_logits_of_peft_over_the_base(pair, tmp_path, kind, tied):
    base, adapter = pair(kind, tie_word_embeddings=tied)
    result = merge_adapter(adapter, base, tmp_path / "merged")
    expected = logits_of(base, adapter)
    assert (logits_of(tmp_path / "merged") - expected).abs().max() < 1e-4
    assert (logits_of(base) - expected).abs().max() > 0.1
    assert result.logits.gap < 1e-4 < 0.1 < result.logits.change
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_every_tensor_is_the_one_that_pefts_own_merge_makes(pair, tmp_path):
    from peft import PeftModel

    base, adapter = pair(
        "llama", tie_word_embeddings=False, adapter={"target_modules": ["q_proj", "down_proj", "lm_head"]}
    )
    merge_adapter(adapter, base, tmp_path / "merged")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    theirs, ours = model.state_dict(), tensors_of(tmp_path / "merged")
    assert theirs.keys() == ours.keys()
    assert all((ours[name] - tensor).abs().max() < 1e-6 for name, tensor in theirs.items())


@pytest.mark.parametrize("kind", ["qwen3", "gpt_neox"])
def test_a_bfloat16_base_stays_bfloat16_and_each_sum_is_rounded_once(pair, tmp_path, kind):
    base, adapter = pair(kind, torch.bfloat16)
    result = merge_adapter(adapter, base, tmp_path / "merged")
    before, after, update = (
        tensors_of(base),
        tensors_of(tmp_path / "merged"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    assert before.keys() == after.keys() and {t.dtype for t in after.values()} == {torch.bfloat16}
    adapted = 0
    for name, weight in after.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_%s.weight"
        if key % "A" not in update:
            assert torch.equal(weight, before[name])
            continue
        adapted += 1
        exact = (
            before.get(name, before.get("gpt_neox.embed_in.weight")).double()
            + 2.0 * update[key % "B"].double() @ update[key % "A"].double()
        )
        # Half a unit in the last place of bfloat16 is 2^-8 of the value, and nothing is lost before.
        assert ((weight.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert adapted == result.matrices > 5
    assert result.logits.gap < 0.5 * result.logits.change
    assert 0 < result.rounding < 0.1


def test_a_smaller_dtype_can_be_asked_for_and_is_what_config_and_tensors_say(pair, tmp_path):
    base, adapter = pair("qwen3", torch.bfloat16)
    merge_adapter(adapter, base, tmp_path / "wide", MergeOptions(torch.float32))
    assert {t.dtype for t in tensors_of(tmp_path / "wide").values()} == {torch.float32}
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert (logits_of(tmp_path / "wide") - logits_of(base, adapter)).abs().max() < 1e-4
    merge_adapter(adapter, base, tmp_path / "half", MergeOptions(torch.float16))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.float16


def test_shards_are_read_and_written_as_transformers_does(pair, tmp_path):
    base, adapter = pair("llama", shard="60KB", tie_word_embeddings=False)
    assert len(list(base.glob("model-*.safetensors"))) > 2
    result = merge_adapter(adapter, base, tmp_path / "merged", MergeOptions(max_shard_bytes=50_000))
    files = sorted(p.name for p in (tmp_path / "merged").glob("*.safetensors"))
    assert len(files) == result.shards > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index, theirs = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (tmp_path / "merged", base))
    assert index["metadata"] == theirs["metadata"] and index["weight_map"].keys() == theirs["weight_map"].keys()
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "merged" / file)
    assert (logits_of(tmp_path / "merged") - logits_of(base, adapter)).abs().max() < 1e-4
    whole = merge_adapter(adapter, base, tmp_path / "whole")
    assert whole.shards == 1 and not (tmp_path / "whole" / "model.safetensors.index.json").exists()
    assert tensors_of(tmp_path / "whole").keys() == tensors_of(tmp_path / "merged").keys()


def test_one_shard_is_in_memory_at_a_time(pair, tmp_path, monkeypatch):
    base, adapter = pair("llama", tie_word_embeddings=False)
    written = []

    def record(tensors, path, metadata=None):
        written.append(sum(t.nbytes for t in tensors.values()))
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr("rllm.lora.merge.save_file", record)
    merge_adapter(adapter, base, tmp_path / "merged", MergeOptions(max_shard_bytes=50_000))
    assert max(written) <= 50_000 and len(written) > 3


@pytest.mark.parametrize("kind", ["qwen3", "gemma", "gpt_neox"])
def test_an_adapted_head_of_a_tied_model_gets_a_matrix_of_its_own(pair, tmp_path, kind):
    base, adapter = pair(kind, adapter={"target_modules": ["lm_head"]}, tie_word_embeddings=True)
    result = merge_adapter(adapter, base, tmp_path / "merged")
    assert (logits_of(tmp_path / "merged") - logits_of(base, adapter)).abs().max() < 1e-4
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if "lm_head" not in name)
    assert any("tied" in note for note in result.notes)


def test_rank_alpha_patterns_rslora_and_chosen_layers_are_honoured(pair, tmp_path):
    settings = {
        "r": 6,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": r".*\.(q_proj|up_proj|down_proj)",
        "exclude_modules": ["layers.1.mlp.up_proj"],
        "rank_pattern": {r"layers\.0\.mlp\.up_proj": 3, "q_proj": 2},
        "alpha_pattern": {"down_proj": 11},
    }
    base, adapter = pair("qwen3", adapter=settings)
    result = merge_adapter(adapter, base, tmp_path / "merged")
    assert result.matrices == 8
    assert (logits_of(tmp_path / "merged") - logits_of(base, adapter)).abs().max() < 1e-4


def test_all_that_is_no_weight_is_copied_and_the_adapters_tokenizer_wins(pair, tmp_path, tokenizer):
    base, adapter = pair("qwen3")
    tokenizer.save_pretrained(base)
    (base / "LICENSE").write_text("free")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("x")
    (base / "pytorch_model.bin").write_bytes(b"old weights")
    (base / "README.md").write_text("the base's card")
    merge_adapter(adapter, base, tmp_path / "one")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (tmp_path / "one" / name).read_bytes() == (base / name).read_bytes(), name
    assert (tmp_path / "one" / "additional_chat_templates" / "tools.jinja").read_text() == "x"
    assert not (tmp_path / "one" / "pytorch_model.bin").exists()
    assert "merged into its base" in (tmp_path / "one" / "README.md").read_text()
    tokenizer.save_pretrained(adapter)
    (adapter / "chat_template.jinja").write_text("{{ 'trained with this' }}")
    result = merge_adapter(adapter, base, tmp_path / "two")
    assert (tmp_path / "two" / "chat_template.jinja").read_text() == "{{ 'trained with this' }}"
    assert result.notes == ["the tokenizer is the adapter's, which differs from the base's"]


# Refusals: nothing is written, and the message names what was found


def refused(error, message, adapter, base, out, options=None):
    with pytest.raises(error, match=message):
        merge_adapter(adapter, base, out, options)
    assert not out.exists() or sorted(p.name for p in out.iterdir()) == ["mine.txt"]
    assert [p.name for p in out.parent.iterdir() if "merging" in p.name] == []


def edit_config(folder, **values):
    file = folder / ("adapter_config.json" if (folder / "adapter_config.json").exists() else "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


FEATURES = {"use_dora": True, "modules_to_save": ["lm_head"], "bias": "lora_only"}


@pytest.mark.parametrize(("feature", "value"), FEATURES.items())
def test_a_feature_that_is_no_sum_of_matrices_is_refused_by_name(pair, tmp_path, feature, value):
    base, adapter = pair("qwen3")
    edit_config(adapter, **{feature: value})
    refused(ModelError, rf"^{adapter}.*{feature}", adapter, base, tmp_path / "out")


def test_values_that_are_not_finite_are_refused_in_adapter_base_and_result(pair, tmp_path):
    base, adapter = pair("qwen3")
    good = load_file(adapter / "adapter_model.safetensors")
    name = next(n for n in good if "lora_B" in n)
    save_file(good | {name: torch.full_like(good[name], float("inf"))}, adapter / "adapter_model.safetensors")
    refused(ModelError, "not finite", adapter, base, tmp_path / "out")
    save_file({n: t * (1e7 if "lora_B" in n else 1) for n, t in good.items()}, adapter / "adapter_model.safetensors")
    refused(ModelError, "does not fit torch.float16", adapter, base, tmp_path / "out", MergeOptions(torch.float16))
    save_file(good, adapter / "adapter_model.safetensors")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    refused(ModelError, "model.norm.weight is not finite in the base", adapter, base, tmp_path / "out")


def test_an_adapter_of_another_base_is_refused_with_what_does_not_fit(pair, tmp_path):
    _, adapter = pair("qwen3")
    neox = base_model("gpt_neox", tmp_path / "neox")
    refused(ModelError, r"GPTNeoXForCausalLM has no module 'model\.layers", adapter, neox, tmp_path / "out")
    wider = base_model("llama", tmp_path / "wider", hidden_size=96)
    refused(ModelError, "is it an adapter of another base", adapter, wider, tmp_path / "out")


def test_bases_that_cannot_be_merged_into_are_refused_by_reason(pair, tmp_path):
    base, adapter = pair("qwen3")
    (tmp_path / "empty").mkdir()
    refused(ModelError, r"empty has no model\.safetensors", adapter, tmp_path / "empty", tmp_path / "out")
    edit_config(base, quantization_config={"quant_method": "gptq"})
    refused(ModelError, r"is quantised \(gptq\)", adapter, base, tmp_path / "out")
    edit_config(base, quantization_config=None, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    (base / "modeling_x.py").write_text("raise SystemExit('ran')")
    refused(ModelError, r"its own code \(modeling_x\.py\).*--trust-remote-code", adapter, base, tmp_path / "out")
    edit_config(base, auto_map=None)
    (base / "modeling_x.py").unlink()
    data = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(data[:-10])
    refused(ModelError, "the file is incomplete", adapter, base, tmp_path / "out")
    (base / "model.safetensors").write_bytes(b"nonsense, and more of it")
    refused(ModelError, "cannot be read", adapter, base, tmp_path / "out")


def test_code_of_a_trusted_base_is_copied(pair, tmp_path):
    base, adapter = pair("qwen3")
    (base / "helper.py").write_text("x = 1\n")
    refused(ModelError, r"helper\.py", adapter, base, tmp_path / "out")
    merge_adapter(adapter, base, tmp_path / "out", MergeOptions(trust_remote_code=True))
    assert (tmp_path / "out" / "helper.py").read_text() == "x = 1\n"


def test_an_embedding_is_not_taken_for_a_linear_layer(pair, tmp_path):
    base, adapter = pair("qwen3", adapter={"target_modules": ["q_proj"]})
    tensors = load_file(adapter / "adapter_model.safetensors")
    shape = {"A": (4, 48), "B": (VOCAB, 4)}
    more = {f"base_model.model.model.embed_tokens.lora_{k}.weight": torch.ones(s) for k, s in shape.items()}
    save_file(tensors | more, adapter / "adapter_model.safetensors")
    refused(ModelError, "embed_tokens is a Embedding; only adapters of linear", adapter, base, tmp_path / "out")


def test_weights_of_the_base_inside_an_adapter_are_refused_with_the_fix(pair, tmp_path):
    base, adapter = pair("qwen3", adapter={"target_modules": ["lm_head"]}, tie_word_embeddings=False)
    tensors = load_file(adapter / "adapter_model.safetensors")
    head = "base_model.model.lm_head.base_layer.weight"
    save_file(
        tensors | {head: load_file(base / "model.safetensors")["lm_head.weight"]}, adapter / "adapter_model.safetensors"
    )
    refused(ModelError, r"lm_head\.base_layer\.weight.*save_embedding_layers=False", adapter, base, tmp_path / "out")


def test_a_result_that_peft_would_not_give_is_refused(pair, tmp_path, monkeypatch):
    base, adapter = pair("qwen3")
    monkeypatch.setattr("rllm.lora.merge.merged_weight", lambda weight, update: weight.float())
    refused(ModelError, "read back from model.safetensors, is not what it should be", adapter, base, tmp_path / "out")
    monkeypatch.setattr("rllm.lora.merge.check_tensors", lambda *a: None)
    refused(ModelError, "logits differ from PEFT's by", adapter, base, tmp_path / "out")


def test_a_model_too_large_to_load_is_checked_tensor_by_tensor(pair, tmp_path, monkeypatch):
    base, adapter = pair("qwen3")
    monkeypatch.setattr(merge_check, "MEMORY_SHARE", 0.0)
    result = merge_adapter(adapter, base, tmp_path / "merged")
    assert result.logits is None
    assert (logits_of(tmp_path / "merged") - logits_of(base, adapter)).abs().max() < 1e-4
    monkeypatch.setattr("rllm.lora.merge.merged_weight", lambda weight, update: weight.float())
    refused(ModelError, "is not what it should be", adapter, base, tmp_path / "out")


# The folder that is written


def test_a_folder_with_files_is_refused_and_overwrite_replaces_only_an_earlier_merge(pair, tmp_path):
    base, adapter = pair("llama", tie_word_embeddings=False)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep me")
    refused(ConfigError, "holds mine.txt; give a new folder", adapter, base, out)
    merge_adapter(adapter, base, out, MergeOptions(max_shard_bytes=50_000, overwrite=True))
    with pytest.raises(ConfigError, match="or --overwrite to replace an earlier merge"):
        merge_adapter(adapter, base, out)
    merge_adapter(adapter, base, out, MergeOptions(overwrite=True))
    assert (out / "mine.txt").read_text() == "keep me"
    assert [p.name for p in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert (logits_of(out) - logits_of(base, adapter)).abs().max() < 1e-4
    (out / "LICENSE").write_text("mine")
    (base / "LICENSE").write_text("the base's")
    with pytest.raises(ConfigError, match="LICENSE comes from no earlier merge"):
        merge_adapter(adapter, base, out, MergeOptions(overwrite=True))
    assert (out / "LICENSE").read_text() == "mine"


def test_other_peoples_weights_the_base_and_files_are_never_written_over(pair, tmp_path):
    base, adapter = pair("qwen3")
    before = (base / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="is what is merged"):
        merge_adapter(adapter, base, base, MergeOptions(overwrite=True))
    foreign = base_model("llama", tmp_path / "foreign")
    with pytest.raises(ConfigError, match=r"model\.safetensors comes from no earlier merge"):
        merge_adapter(adapter, base, foreign, MergeOptions(overwrite=True))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        merge_adapter(adapter, base, tmp_path / "file")
    assert (base / "model.safetensors").read_bytes() == before


def test_a_merge_that_fails_midway_leaves_an_earlier_one_as_it_was(pair, tmp_path, monkeypatch):
    base, adapter = pair("qwen3")
    merge_adapter(adapter, base, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rllm.lora.merge.check_logits", fail)
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(adapter, base, tmp_path / "out", MergeOptions(overwrite=True))
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir() if "merging" in p.name] == []


# Which adapter, which base


def test_several_adapters_in_a_folder_are_named_and_one_must_be_chosen(pair, tmp_path):
    _, adapter = pair("qwen3")
    run = tmp_path / "run" / "adapter"
    for role in ("judge", "solver"):
        shutil.copytree(adapter, run / role)
    with pytest.raises(ConfigError, match=r"holds 2 adapters: judge, solver; .* say which: .*adapter/judge"):
        find_adapter(run)
    assert find_adapter(run / "solver") == run / "solver"
    shutil.rmtree(run / "judge")
    assert find_adapter(run) == run / "solver"
    with pytest.raises(ModelError, match="no such folder"):
        find_adapter(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"base has no adapter_config\.json"):
        find_adapter(tmp_path / "qwen3 base")


def test_a_recorded_fingerprint_decides_whether_the_base_is_the_right_one(pair, tmp_path):
    from rllm.lora.checkpoint import fingerprint

    base, adapter = pair("llama", tie_word_embeddings=False)
    (adapter / "README.md").write_text(f"# mine\n- base fingerprint: {fingerprint(base)}\n")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("model-*"))) > 2 and fingerprint(sharded) == fingerprint(base)
    merge_adapter(adapter, sharded, tmp_path / "merged")
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    refused(ModelError, "holds other weights. Give the base it was trained on", adapter, base, tmp_path / "out")
    assert base_of(adapter, base) == str(base)
    shutil.rmtree(base)
    assert base_of(adapter, sharded) == "default"
    edit_config(adapter, base_model_name_or_path=None)
    with pytest.raises(ModelError, match="does not say which base"):
        base_of(adapter, sharded)
