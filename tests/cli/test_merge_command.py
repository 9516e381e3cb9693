"""`rllm merge` from the shell: a trained adapter becomes a model that evaluates without it, and mistakes are told in one line."""

import json
import shutil

import pytest
import torch
from test_cli import FLOW, refused, rllm
from transformers import AutoModelForCausalLM

from rllm.backends.base import AdamParams, Datum, LossSpec
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.loading import DEFAULT_MODEL
from rllm.config.schema import Config


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    """A folder with two trained adapters over the default model, as a run leaves it."""
    lora = {"per_role": {"solver": {"rank": 4}, "judge": {"rank": 2, "train_unembed": True}}}
    backend = LocalBackend.create(Config.model_validate({"lora": lora, "model": {"device": "cpu"}}))
    for step in range(2):
        for role in ("solver", "judge"):
            ids = [(7 * i + step) % 600 + 5 for i in range(30)]
            backend.forward_backward(
                [Datum(ids, [0] + [1] * 29, [1.0] * 30, [-3.0] * 30, adapter=role)], LossSpec("ppo_clip")
            )
        backend.optim_step(AdamParams(2e-2))
    folder = tmp_path_factory.mktemp("run") / "adapter"
    backend.export_adapter(folder)
    backend.close()
    return folder


def logits_of(folder, adapter=None):
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40).unsqueeze(0)).logits


@pytest.mark.parametrize("role", ["solver", "judge"])
@pytest.mark.slow
def test_the_merged_model_is_evaluated_like_any_other_and_says_what_the_adapter_says(roles, tmp_path, role):
    out = tmp_path / "merged"
    done = rllm("merge", roles / role, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "logits within" in done.stdout and done.stdout.splitlines()[-1].startswith("merged ")
    assert ("tied" in done.stdout) == (role == "judge")
    assert (logits_of(out) - logits_of(DEFAULT_MODEL, roles / role)).abs().max() < 1e-4
    limits = ("data.val_size=4", "data.max_response_length=24", "rollout.val_temperature=0")
    merged = rllm("eval", FLOW, "--model", out, *limits, cwd=tmp_path)
    assert merged.returncode == 0, merged.stderr
    assert json.loads(merged.stdout)["failed"] == 0
    mine = LocalBackend.create(Config.model_validate({"model": {"path": str(out), "device": "cpu"}}))
    try:
        rows = [Datum(list(range(40)), [0] + [1] * 39, [0.0] * 40, [0.0] * 40)]
        (values,) = mine.logprobs(rows)
    finally:
        mine.close()
    expected = torch.log_softmax(logits_of(DEFAULT_MODEL, roles / role)[0, :-1], -1)
    assert values[1:] == pytest.approx([float(expected[t, t + 1]) for t in range(39)], abs=1e-3)


def test_roles_are_named_and_one_must_be_chosen(roles, tmp_path):
    assert "2 adapters: judge, solver" in refused("merge", roles, "--out", tmp_path / "out")


@pytest.mark.slow
def test_an_adapter_saved_elsewhere_finds_the_packaged_model_by_its_fingerprint(roles, tmp_path):
    moved = shutil.copytree(roles / "solver", tmp_path / "moved")
    file = moved / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "/somewhere/else/default"}))
    assert rllm("merge", moved, "--out", tmp_path / "out").returncode == 0
    card = moved / "README.md"
    card.write_text(card.read_text().replace("base fingerprint: ", "base fingerprint: 0000"))
    assert "base: no folder '/somewhere/else/default'" in refused("merge", moved, "--out", tmp_path / "out2")
    card.write_text("\n".join(line for line in card.read_text().splitlines() if "fingerprint" not in line))
    assert rllm("merge", moved, "--base", "default", "--out", tmp_path / "out2", "--dtype", "bfloat16").returncode == 0
    assert json.loads((tmp_path / "out2" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out2" / "tokenizer.json").read_bytes() == (DEFAULT_MODEL / "tokenizer.json").read_bytes()


def test_mistakes_are_told_in_one_line(roles, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    solver = roles / "solver"
    assert "holds thesis.txt" in refused("merge", solver, "--out", tmp_path / "full")
    assert "expected keep, float32" in refused("merge", solver, "--out", tmp_path / "x", "--dtype", "fp8")
    assert "expected a size such as 5GB" in refused(
        "merge", solver, "--out", tmp_path / "x", "--max-shard-size", "5 parsecs"
    )
    assert "no such folder" in refused("merge", tmp_path / "nowhere", "--out", tmp_path / "x")
    assert "no folder './nowhere'" in refused("merge", solver, "--out", tmp_path / "x", "--base", "./nowhere")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine" and not (tmp_path / "x").exists()
