"""An adapter folder is PEFT's, exactly what was trained, complete or absent, and what cannot be imported is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import random_adapter, with_peft

from rllm.backends.local.model import PackedCausal
from rllm.config.schema import LoraSettings
from rllm.errors import ModelError
from rllm.lora.adapter import LoraAdapter
from rllm.lora.files import check_written, load_into, read_adapter, verify_with_peft, write_adapter

IDS = torch.arange(20)


def logits_with(decoder, adapter):
    attend = PackedCausal([len(IDS)])
    with torch.no_grad():
        return decoder.logits(decoder(IDS, attend.positions, attend, adapter.pairs(torch.float32)))


def write(adapter, folder, base):
    names = adapter.modules_adapted
    write_adapter(adapter, folder, base=str(base), settings=LoraSettings(), names=names)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_peft_loads_the_folder_and_gives_the_same_logits(make, tmp_path, kind):
    _, decoder, base = make(kind)
    adapter = random_adapter(decoder)
    write(adapter, tmp_path / "adapter", base)
    expected = logits_with(decoder, adapter)
    assert verify_with_peft(tmp_path / "adapter", base, IDS[None], expected) < 1e-4
    assert verify_with_peft(tmp_path / "adapter", base, IDS[None], expected + 0.01) > 5e-3
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8.0, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(base)


def test_an_adapter_made_by_peft_is_imported_exactly(make, tmp_path):
    model, decoder, _ = make("qwen3")
    source = random_adapter(decoder)
    with_peft(model, source).save_pretrained(tmp_path / "foreign")
    saved, matrices = read_adapter(tmp_path / "foreign")
    mine = random_adapter(decoder, scale=0.0)
    load_into(mine, tmp_path / "foreign", matrices)
    assert saved["r"] == 4
    assert torch.equal(logits_with(decoder, mine), logits_with(decoder, source))


def test_ranks_and_alphas_that_differ_by_module_survive(make, tmp_path):
    _, decoder, base = make("qwen3")
    adapter = random_adapter(decoder)
    name = adapter.modules_adapted[2]
    inputs, outputs = decoder.linear_shapes()[name]
    adapter.set_matrices(name, torch.randn(2, inputs), torch.randn(outputs, 2), scale=1.5)
    write(adapter, tmp_path / "adapter", base)
    assert verify_with_peft(tmp_path / "adapter", base, IDS[None], logits_with(decoder, adapter)) < 1e-4
    _, matrices = read_adapter(tmp_path / "adapter")
    assert matrices[name][2] == 1.5


def test_a_value_that_is_not_finite_is_never_saved(make, tmp_path):
    _, decoder, base = make("qwen3")
    adapter = random_adapter(decoder)
    with torch.no_grad():
        adapter.matrices(adapter.modules_adapted[0])[1][0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        write(adapter, tmp_path / "adapter", base)
    assert not (tmp_path / "adapter").exists()


def test_the_seed_decides_the_initial_bytes(make):
    _, decoder, _ = make("qwen3")

    def fresh(seed):
        shapes = decoder.linear_shapes()
        modules = [name for name in shapes if name != "lm_head"]
        adapter = LoraAdapter(shapes, modules, decoder.block_layout(), rank=4, alpha=8, seed=seed)
        return [p.detach().clone() for p in adapter.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(fresh(1), fresh(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(fresh(1), fresh(2), strict=True))


@pytest.mark.parametrize(("rank", "count"), [(1, 630784), (8, 5046272), (32, 20185088)])
def test_the_parameter_count_of_qwen3_06b_is_the_formulas(rank, count):
    rows = [(1024, 2048), (1024, 1024), (1024, 1024), (2048, 1024), (1024, 3072), (1024, 3072), (3072, 1024)]
    shapes = {f"m.{i}.{j}": shape for i in range(28) for j, shape in enumerate(rows)}
    layout = {(i, str(j)): [(f"m.{i}.{j}", rows[j][1])] for i in range(28) for j in range(len(rows))}
    adapter = LoraAdapter(shapes, list(shapes), layout, rank=rank, alpha=8, seed=0)
    assert adapter.parameter_count() == count


def test_lora_forward_has_the_value_of_the_formula():
    """W = I, A = [[.5, .25]], B = [[1], [-2]], rank 1, alpha 2, x = [1, 2] -> y = [3, -2]."""
    adapter = LoraAdapter({"m": (2, 2)}, ["m"], {(0, "b"): [("m", 2)]}, rank=1, alpha=2, seed=0)
    adapter.set_matrices("m", torch.tensor([[0.5, 0.25]]), torch.tensor([[1.0], [-2.0]]), scale=2.0)
    a, b = adapter.pairs(torch.float32).pair(0, "b")
    x = torch.tensor([1.0, 2.0])
    assert (x + x @ a.T @ b.T).tolist() == [3.0, -2.0]


def test_patterns_and_rslora_scale_as_peft_reads_them(make, tmp_path):
    from peft import LoraConfig, get_peft_model

    model, decoder, base = make("qwen3")
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "up_proj"],
        rank_pattern={"up_proj": 2},
        alpha_pattern={r"layers\.[01]\.self_attn\.[qv]_proj": 3, "up_proj": 5},
        use_rslora=True,
        init_lora_weights=False,
    )
    get_peft_model(model, config).save_pretrained(tmp_path / "foreign")
    _, matrices = read_adapter(tmp_path / "foreign")
    mine = random_adapter(decoder, target=["q_proj", "v_proj", "up_proj"])
    load_into(mine, tmp_path / "foreign", matrices)
    assert verify_with_peft(tmp_path / "foreign", base, IDS[None], logits_with(decoder, mine)) < 1e-4
    write(mine, tmp_path / "again", base)
    assert verify_with_peft(tmp_path / "again", base, IDS[None], logits_with(decoder, mine)) < 1e-4


def test_saving_into_a_folder_replaces_the_adapter_and_leaves_other_files(make, tmp_path):
    _, decoder, base = make("qwen3")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    write(random_adapter(decoder, rank=2), tmp_path / "mine", base)
    adapter = random_adapter(decoder)
    write(adapter, tmp_path / "mine", base)
    check_written(adapter, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    assert [file.name for file in tmp_path.iterdir() if "partial" in file.name] == []
    with pytest.raises(ModelError, match="is a file; give a folder"):
        write(adapter, tmp_path / "mine" / "notes.txt", base)


def test_a_saved_matrix_that_differs_is_told(make, tmp_path):
    _, decoder, base = make("qwen3")
    adapter = random_adapter(decoder)
    write(adapter, tmp_path / "adapter", base)
    name = adapter.modules_adapted[5]
    with torch.no_grad():
        adapter.matrices(name)[0][0, 0] += 1e-3
    with pytest.raises(ModelError, match=f"differs from the trained one in {name}"):
        check_written(adapter, tmp_path / "adapter")


FEATURES = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "peft_type": "IA3",
    "init_lora_weights": "pissa_niter_4",
    "alora_invocation_tokens": [1, 2],
    "lora_alpha": None,
}


@pytest.mark.parametrize(("feature", "value"), FEATURES.items())
def test_a_feature_that_cannot_be_imported_is_refused_by_name(make, tmp_path, feature, value):
    _, decoder, base = make("qwen3")
    write(random_adapter(decoder), tmp_path / "adapter", base)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {feature: value}))
    with pytest.raises(ModelError, match=feature if feature not in ("bias", "peft_type") else "biases|IA3"):
        read_adapter(tmp_path / "adapter")


def test_missing_and_damaged_files_are_named(make, tmp_path):
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path)
    _, decoder, base = make("qwen3")
    write(random_adapter(decoder), tmp_path / "adapter", base)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors.pop(next(key for key in tensors if "lora_B" in key))
    save_file(tensors, weights)
    with pytest.raises(ModelError, match="lora_A but no lora_B"):
        read_adapter(tmp_path / "adapter")
    name = next(key for key in tensors if "lora_B" in key)
    broken = {name: torch.full_like(tensors[name], float("nan")), name.replace("_B", "_A"): torch.zeros(4, 48)}
    save_file(broken, weights)
    with pytest.raises(ModelError, match="not finite"):
        read_adapter(tmp_path / "adapter")
    save_file({**broken, name: torch.zeros(48, 3)}, weights)
    with pytest.raises(ModelError, match=r"lora_A \[4, 48\] and lora_B \[48, 3\]"):
        read_adapter(tmp_path / "adapter")
    weights.write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(tmp_path / "adapter")


def test_an_adapter_of_another_base_is_refused_with_the_module_that_differs(make, tmp_path):
    _, decoder, base = make("qwen3")
    write(random_adapter(decoder), tmp_path / "adapter", base)
    _, matrices = read_adapter(tmp_path / "adapter")
    with pytest.raises(ModelError, match="differ in"):
        load_into(random_adapter(decoder, target=["q_proj"]), tmp_path / "adapter", matrices)
    _, other, _ = make("llama", hidden_size=96)
    with pytest.raises(ModelError, match="another base"):
        load_into(random_adapter(other), tmp_path / "adapter", matrices)
