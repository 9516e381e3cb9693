"""The sampler on vLLM: what it is handed, what it refuses, and on a GPU that it samples what is trained.

The GPU tests need vLLM: ``pytest -m gpu tests/backends/local/test_vllm_engine.py``.
"""

import asyncio
import importlib.util

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import build, random_adapter, with_peft
from transformers import AutoModelForCausalLM

from rllm.backends.base import BASE, AdamParams, Datum, LossSpec, SamplingParams
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.loading import load_decoder
from rllm.backends.local.model import PackedCausal
from rllm.backends.local.vllm_engine import import_vllm, write_adapter
from rllm.config.check import check, engine_problem
from rllm.config.names import VLLM_MAX_RANK, VLLM_RANKS
from rllm.config.schema import Config
from rllm.errors import ConfigError

has_vllm = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None, reason="needs CUDA and vLLM"
)


@pytest.mark.parametrize("which", [{}, {"target": ["q_proj", "down_proj"]}])
def test_the_files_that_vllm_is_handed_hold_what_is_published(tmp_path, which):
    build("qwen3", tmp_path / "m")
    decoder = load_decoder(tmp_path / "m")
    adapter = random_adapter(decoder, rank=3, alpha=7.0, **which)
    # One module of another rank and scale, as lora.rank_pattern gives.
    name = next(n for n in adapter.modules_adapted if "q_proj" in n)
    a, b = adapter.matrices(name)
    adapter.set_matrices(name, torch.cat([a, a])[:5].detach(), torch.cat([b, b], 1)[:, :5].detach(), 0.3)
    write_adapter(tmp_path / "a", decoder.block_layout(), adapter.snapshot(torch.float32))
    ids = torch.tensor([[5, 9, 33, 60, 2, 17]])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    plain = base(ids).logits.detach()
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(adapter.modules_adapted)
    with torch.no_grad():
        for module in adapter.modules_adapted:
            low = tensors[f"base_model.model.{module}.lora_A.weight"]
            high = tensors[f"base_model.model.{module}.lora_B.weight"]
            base.get_submodule(module).weight += high @ low
    expected = base(ids).logits
    attend = PackedCausal([6], "cpu")
    pairs = adapter.pairs(torch.float32)
    found = decoder.logits(decoder(ids[0], attend.positions, attend, pairs), pairs)
    assert torch.allclose(found, expected[0], atol=1e-4) and not torch.allclose(expected, plain, atol=1e-2)


def test_peft_loads_a_folder_of_one_rank(tmp_path):
    model = build("llama", tmp_path / "m")
    decoder = load_decoder(tmp_path / "m")
    adapter = random_adapter(decoder, rank=4, alpha=2.0)
    write_adapter(tmp_path / "a", decoder.block_layout(), adapter.snapshot(torch.float32))
    ids = torch.tensor([[5, 9, 33, 60, 2, 17]])
    loaded = PeftModel.from_pretrained(model, tmp_path / "a").eval()
    expected = with_peft(AutoModelForCausalLM.from_pretrained(tmp_path / "m"), adapter)
    assert torch.allclose(loaded(ids).logits, expected(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    "sections, device, says",
    [
        ({"model": {"device": "cpu"}}, None, "needs a CUDA device, model.device=cpu is the CPU"),
        ({}, "cpu", "needs a CUDA device, model.device=auto is the CPU"),
        ({"lora": {"rank": 0}}, None, "lora.rank=0: only adapters are handed to vLLM"),
        ({"lora": {"rank": 600}}, None, "vLLM serves ranks up to 512"),
        ({"lora": {"rank": 8, "rank_pattern": {"q_proj": 1024}}}, None, "with rank 1024"),
        ({"backend": "tinker"}, None, "with backend=tinker: that backend samples itself"),
        ({"model": {"quantization": "nf4"}}, None, "would sample from other weights"),
    ],
)
def test_what_vllm_cannot_do_is_said_before_anything_is_loaded(sections, device, says):
    config = Config.model_validate({"rollout": {"engine": "vllm"}, **sections})
    problem = engine_problem(config, device)
    assert problem and says in problem and problem.startswith("rollout.engine=vllm")
    assert engine_problem(Config.model_validate({**sections}), device) is None


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_vllm_is_one_line_with_the_command():
    config = Config.model_validate({"rollout": {"engine": "vllm"}})
    check(config)  # nothing is known of the device yet
    assert "pip install 'rllm[vllm]'" in (engine_problem(config, "cuda") or "")
    with pytest.raises(ConfigError, match="vLLM cannot be imported"):
        import_vllm()


def test_the_ranks_end_where_the_config_says():
    assert VLLM_RANKS[-1] == VLLM_MAX_RANK == 512 and sorted(VLLM_RANKS) == list(VLLM_RANKS)


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    config = {
        "rollout": {"engine": "vllm", "max_batch": 32},
        "model": {"device": "cuda"},
        "lora": {"rank": 8, "alpha": 8},
    }
    backend = LocalBackend.create(Config.model_validate(config))
    yield backend
    backend.close()


def sample(backend, count=8, adapter="default", **params):
    async def all_of_them():
        settings = SamplingParams(**({"max_tokens": 24} | params))
        return await asyncio.gather(*(backend.sample([10 + i, 20, 30, 40], settings, adapter) for i in range(count)))

    return asyncio.run(all_of_them())


def rows_of(answers):
    rows = []
    for i, answer in enumerate(answers):
        head = [10 + i, 20, 30, 40]
        mask = [0] * 4 + [1] * len(answer.ids)
        rows.append(Datum(head + answer.ids, mask, [(-1.0) ** i * m for m in mask], [0.0] * 4 + answer.logprobs))
    return rows


@pytest.mark.gpu
@has_vllm
def test_vllm_samples_what_is_trained_step_after_step(backend):
    for version in range(3):
        answers = sample(backend, temperature=0.8)
        rows = rows_of(answers)
        for row in rows:
            row.temperature = 0.8
        trained = backend.logprobs(rows, trained_only=True)
        gaps = [
            abs(a - b)
            for row, values in zip(rows, trained, strict=True)
            for a, b, m in zip(row.logprobs, values, row.mask, strict=True)
            if m
        ]
        assert max(gaps) < 0.25 and sum(gaps) / len(gaps) < 0.03, gaps
        assert {v for answer in answers for v in answer.versions} == {version}
        backend.forward_backward(rows, LossSpec())
        backend.optim_step(AdamParams(1e-2))
        backend.publish()
        probe = backend.probe()
        assert probe.same_weights and probe.sampler_version == version + 1, probe


@pytest.mark.gpu
@has_vllm
def test_base_adapter_stop_seeds_streams_and_cancelling(backend):
    greedy = [[a.ids for a in sample(backend, 4, name, temperature=0.0)] for name in ("default", BASE)]
    assert greedy[0] != greedy[1]  # the steps before have moved it
    stop = greedy[1][0][3]
    [short] = sample(backend, 1, BASE, temperature=0.0, stop_token_ids=(stop,))
    assert short.ids == greedy[1][0][: greedy[1][0].index(stop) + 1] and short.finish_reason == "stop"
    assert [a.ids for a in sample(backend, 1, seed=3)] == [a.ids for a in sample(backend, 1, seed=3)]
    heard: list[int] = []

    async def listen():
        return await backend.sample(
            [10, 20], SamplingParams(12, ignore_eos=True), "default", lambda token, _: heard.append(token)
        )

    assert asyncio.run(listen()).ids == heard and len(heard) == 12
    future = backend.engine.submit([10, 20], SamplingParams(900, ignore_eos=True), "default")
    future.cancel()
    with pytest.raises(ValueError, match="unknown adapter"):
        backend.engine.submit([10], SamplingParams(4), "nobody")
    assert len(sample(backend, 4)) == 4


@pytest.mark.gpu
@has_vllm
def test_rows_are_trained_while_vllm_samples(backend):
    rows = rows_of(sample(backend, temperature=1.0))
    backend.forward_backward(rows, LossSpec())
    expected = [p.grad.clone() for p in backend.learner.trainable()]
    backend.discard_gradients()
    long = SamplingParams(600, ignore_eos=True)
    asked = [backend.engine.submit([10 + i, 20, 30], long, "default") for i in range(8)]
    for _ in range(4):  # a shape is captured when it is seen again
        backend.discard_gradients()
        backend.train_ahead(rows[:4], LossSpec())
    assert not all(future.done() for future in asked)
    backend.forward_backward(rows[4:], LossSpec(), rows[:4])
    for parameter, gradient in zip(backend.learner.trainable(), expected, strict=True):
        assert (parameter.grad - gradient).norm() <= 3e-2 * gradient.norm() + 1e-6
    backend.discard_gradients()
    assert all(len(future.result().ids) == 600 for future in asked)
