"""The local backend keeps its promises to the trainer: states come back exactly, exports are checked, odd settings are refused by name."""

import asyncio
import logging
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rllm.backends.base import BASE, INITIAL_ADAPTER, AdamParams, Datum, LossSpec, SamplingParams
from rllm.backends.local.backend import LocalBackend, max_model_len, pick_device
from rllm.config.schema import Config
from rllm.errors import ConfigError, ModelError

PPO, ADAM = LossSpec("ppo_clip"), AdamParams(1e-2, weight_decay=0.1)
PROMPT = list(range(10, 30))


@pytest.fixture
def backend_of():
    """``backend_of(lora={...})`` -> a backend over the default model on CPU."""
    made = []

    def _make(**sections):
        lora = {"rank": 4, "alpha": 8} | sections.pop("lora", {})
        model = {"device": "cpu", "dtype": "float32"} | sections.pop("model", {})
        made.append(LocalBackend.create(Config.model_validate({"lora": lora, "model": model, **sections})))
        return made[-1]

    yield _make
    for backend in made:
        backend.close()


def step(backend, seed):
    """One training step on random rows."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i in range(3):
        ids = torch.randint(5, 200, (20 + i,), generator=generator).tolist()
        mask = [0] * 8 + [1] * (len(ids) - 8)
        data.append(Datum(ids, mask, [(-1.0) ** i * m for m in mask], [-3.0 * m for m in mask]))
    backend.forward_backward(data, PPO)
    return backend.optim_step(ADAM)


def weights(backend):
    return [p.detach().clone() for p in backend.learner.trainable()]


def greedy(backend, adapter):
    return asyncio.run(backend.sample(PROMPT, SamplingParams(max_tokens=8, temperature=0.0), adapter))


@pytest.mark.parametrize("rank", [4, 0])
def test_training_goes_on_from_a_saved_state_bit_for_bit(backend_of, tmp_path, rank):
    first = backend_of(lora={"rank": rank})
    step(first, 1)
    first.publish()
    first.save_state(tmp_path / "state")
    step(first, 2)
    second = backend_of(lora={"rank": rank}, trainer={"seed": 9})
    second.load_state(tmp_path / "state")
    assert second.policy_version == 1
    step(second, 2)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    assert first.publish() == second.publish() == 2
    assert greedy(first, "default").logprobs == pytest.approx(greedy(second, "default").logprobs, abs=1e-5)


def test_a_state_before_any_step_comes_back_too(backend_of, tmp_path):
    first, second = backend_of(), backend_of(trainer={"seed": 9})
    first.save_state(tmp_path)
    second.load_state(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(backend_of, tmp_path):
    first = backend_of()
    first.save_state(tmp_path / "state")
    for lora, key in (
        ({"rank": 2}, "saved with lora.rank={'default': 4}, this config has {'default': 2}"),
        ({"target_modules": ["q_proj"]}, "saved with lora.target_modules"),
        ({"exclude_modules": ["down_proj"]}, "saved with lora.target_modules"),
        ({"per_role": {"solver": {}}}, "saved with lora.per_role"),
    ):
        other = backend_of(lora=lora)
        before = weights(other)
        with pytest.raises(ModelError, match=re.escape(key)):
            other.load_state(tmp_path / "state")
        assert all(torch.equal(a, b) for a, b in zip(weights(other), before, strict=True))
    with pytest.raises(ModelError, match="cannot be read"):
        first.load_state(tmp_path / "nowhere")
    file = tmp_path / "state" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        first.load_state(tmp_path / "state")


def test_base_and_starting_policy_stay_samplable_while_the_adapter_learns(backend_of):
    backend = backend_of()
    base = greedy(backend, BASE)
    assert greedy(backend, "default").logprobs == pytest.approx(base.logprobs, abs=1e-5)
    step(backend, 1)
    assert greedy(backend, "default").versions == [0] * 8  # not published yet
    assert backend.publish() == 1
    trained = greedy(backend, "default")
    assert trained.versions == [1] * len(trained.ids) and trained.logprobs != pytest.approx(base.logprobs, abs=1e-3)
    assert greedy(backend, BASE).logprobs == greedy(backend, INITIAL_ADAPTER).logprobs == base.logprobs


def test_an_export_is_what_a_later_run_starts_from(backend_of, tmp_path, caplog):
    first = backend_of()
    step(first, 1)
    out = first.export_adapter(tmp_path / "adapter")["default"]
    card = (out / "README.md").read_text()
    assert "reloaded with PEFT" in card and "- rank: 4\n- alpha: 8 " in card
    assert {"tokenizer.json", "adapter_model.safetensors"} <= {file.name for file in out.iterdir()}
    second = backend_of(lora={"adapter_path": str(out)})
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    with caplog.at_level(logging.WARNING):
        third = backend_of(lora={"rank": 16, "adapter_path": str(out)})
    assert "rank 4 and alpha 8" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(third), strict=True))


def test_a_full_model_is_exported_whole_and_never_with_nan(backend_of, tmp_path):
    backend = backend_of(lora={"rank": 0})
    step(backend, 1)
    again = backend_of(lora={"rank": 0}, model={"path": str(backend.export_adapter(tmp_path / "model")["model"])})
    assert all(torch.equal(a, b) for a, b in zip(weights(backend), weights(again), strict=True))
    with torch.no_grad():
        backend.model.final_norm[0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        backend.export_adapter(tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_a_bfloat16_base_keeps_float32_weights_in_training(backend_of):
    backend = backend_of(lora={"rank": 0}, model={"dtype": "bfloat16"})
    before = weights(backend)
    backend.forward_backward([Datum(PROMPT, [0] * 10 + [1] * 10, [1.0] * 20, [-3.0] * 20)], PPO)
    backend.optim_step(AdamParams(1e-6))
    assert all(w.dtype == torch.float32 for w in before)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(backend), strict=True))
    assert all(torch.equal(weight, master.bfloat16()) for weight, master in backend.learner.masters.items())


def test_the_banner_counts_what_is_trained(backend_of):
    facts = backend_of(lora={"target_modules": ["q_proj", "down_proj"]}).describe()
    c = backend_of().model.config
    q, down = 4 * (c.hidden_size + c.n_heads * c.head_dim), 4 * (c.intermediate_size + c.hidden_size)
    assert facts["trainable"] == c.n_layers * (q + down)
    assert facts["adapters"]["default"]["targets"] == {"q_proj": c.n_layers, "down_proj": c.n_layers}
    full = backend_of(lora={"rank": 0}).describe()
    assert full["trainable"] == full["parameters"] and full["method"] == "full fine-tuning"


def test_settings_that_cannot_work_are_refused_by_name(backend_of, caplog):
    with pytest.raises(ConfigError, match="can do at most 1024 tokens"):
        backend_of(model={"max_model_len": 2000})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no CUDA device"):
            pick_device("cuda")
    with caplog.at_level(logging.WARNING):
        backend = backend_of(lora={"exclude_modules": ["c_attn"]})
    assert "exclude_modules: 'c_attn' matches no module; the model has q_proj" in caplog.text
    assert max_model_len(Config.model_validate({"data": {"max_prompt_length": 100}}), backend.model) == 612


def test_a_state_file_with_an_extra_tensor_is_refused(backend_of, tmp_path):
    backend = backend_of()
    backend.save_state(tmp_path)
    tensors = load_file(tmp_path / "state.safetensors")
    with safe_open(tmp_path / "state.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file({**tensors, "999.value": torch.zeros(2)}, tmp_path / "state.safetensors", metadata=metadata)
    with pytest.raises(ModelError, match="the tensors are not those of this model"):
        backend.load_state(tmp_path)
