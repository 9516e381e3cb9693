"""A run on the plain path from start to adapter: said at start, trained, saved as PEFT reads it, gone on with, merged."""

import asyncio
import json
import logging
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import build_plain
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm.backends.base import BASE, TEACHER, AdamParams, Datum, LossSpec, SamplingParams
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.loading import DEFAULT_MODEL, TOKENIZER_FILES
from rllm.config.schema import Config
from rllm.errors import ConfigError, ModelError

FLOW = Path(__file__).parents[4] / "examples" / "solver_judge" / "solver_judge_flow.py"
PROMPT = list(range(10, 30))
IDS = torch.arange(40).unsqueeze(0)


def model_folder(folder, kind, **settings):
    """A random model of `kind` with the packaged tokenizer and chat template."""
    build_plain(kind, folder, vocab_size=640, **settings)
    for name in TOKENIZER_FILES:
        if (DEFAULT_MODEL / name).is_file():
            shutil.copyfile(DEFAULT_MODEL / name, folder / name)
    return folder


@pytest.fixture
def backend_of(tmp_path):
    """``backend_of("gpt2", lora={...})`` -> a backend over such a model."""
    made = []

    def _make(kind, **sections):
        folder = tmp_path / kind
        if not folder.exists():
            model_folder(folder, kind)
        lora = {"rank": 4, "alpha": 8} | sections.pop("lora", {})
        data = {"max_prompt_length": 64, "max_response_length": 64} | sections.pop("data", {})
        model = {"path": str(folder), "device": "cpu", "dtype": "float32"} | sections.pop("model", {})
        made.append(
            LocalBackend.create(Config.model_validate({"lora": lora, "model": model, "data": data, **sections}))
        )
        return made[-1]

    yield _make
    for backend in made:
        backend.close()


def step(backend, seed):
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i in range(3):
        ids = torch.randint(5, 200, (20 + i,), generator=generator).tolist()
        mask = [0] * 8 + [1] * (len(ids) - 8)
        data.append(Datum(ids, mask, [(-1.0) ** i * m for m in mask], [-3.0 * m for m in mask]))
    backend.forward_backward(data, LossSpec("ppo_clip"))
    return backend.optim_step(AdamParams(1e-2))


def greedy(backend, adapter="default"):
    return asyncio.run(backend.sample(PROMPT, SamplingParams(max_tokens=8, temperature=0.0), adapter)).ids


def peft_logits(base, adapter, head=False):
    """`head`: the output head, which is no Conv1D, is adapted too, and PEFT says that it sees that."""
    from peft import PeftModel

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter(
            "ignore" if head else "error", UserWarning
        )  # PEFT has nothing to put right in what we wrote
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits[0]


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("gpt2", {}),
        ("gpt_neox", {"target_modules": ["query_key_value"]}),
        ("gemma2", {}),
        ("qwen3_moe", {"train_unembed": True}),
    ],
)
def test_a_trained_adapter_is_published_and_exported_as_peft_reads_it(backend_of, tmp_path, kind, lora):
    backend = backend_of(kind, lora=lora)
    base = greedy(backend, BASE)
    before = backend.score(IDS[0].tolist()).logprobs
    assert greedy(backend) == base
    for seed in (1, 2, 3):
        assert step(backend, seed)["grad_norm"] > 0
    assert backend.publish() == 1
    probe = backend.probe()
    assert probe.same_weights and probe.gap_max < 1e-4
    assert greedy(backend, BASE) == base and backend.score(IDS[0].tolist(), BASE).logprobs == before
    backend.export_adapter(tmp_path / "adapter")
    expected = backend.score(IDS[0].tolist()).logprobs
    assert expected != pytest.approx(before, abs=1e-3)
    logprobs = torch.log_softmax(peft_logits(tmp_path / kind, tmp_path / "adapter"), -1)
    for t, value in enumerate(expected):
        assert value == pytest.approx(logprobs[t, IDS[0, t + 1]].item(), abs=1e-4)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] == (kind == "gpt2")
    # The folder is the start of another run.
    again = backend_of(kind, lora=lora | {"adapter_path": str(tmp_path / "adapter")})
    assert again.score(IDS[0].tolist()).logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "gemma2", "qwen3_moe", "phi3", "olmo2", "opt", "mamba"])
def test_on_cuda_a_trained_policy_is_sampled_and_scored_as_trained(backend_of, tmp_path, kind, dtype):
    # PEFT, which reads the adapter in the end, takes no update of mamba's out_proj, and changes what it finds on fused experts.
    chosen = {"gpt_neox": ["query_key_value"], "mamba": ["in_proj", "x_proj"], "qwen3_moe": ["q_proj", "o_proj"]}
    lora = {"target_modules": chosen[kind]} if kind in chosen else {}
    backend = backend_of(kind, lora=lora, model={"device": "cuda", "dtype": dtype})
    for seed in (1, 2, 3):
        assert step(backend, seed)["grad_norm"] > 0
    backend.publish()
    probe = backend.probe()
    assert probe.same_weights and probe.gap_max < (1e-3 if dtype == "float32" else 0.2)
    answers = [
        asyncio.run(backend.sample(PROMPT[:n], SamplingParams(max_tokens=12, temperature=1.0, seed=n)))
        for n in (3, 11, 20)
    ]
    for n, answer in zip((3, 11, 20), answers, strict=True):
        scored = backend.score(PROMPT[:n] + answer.ids).logprobs[n - 1 :]
        assert answer.logprobs == pytest.approx(scored, abs=1e-3 if dtype == "float32" else 0.2)
    backend.export_adapter(tmp_path / "adapter")
    logprobs = torch.log_softmax(peft_logits(tmp_path / kind, tmp_path / "adapter"), -1)
    expected = [logprobs[t, IDS[0, t + 1]].item() for t in range(39)]
    assert backend.score(IDS[0].tolist()).logprobs == pytest.approx(expected, abs=5e-3 if dtype == "float32" else 0.3)


@pytest.mark.parametrize("rank", [4, 0])
def test_training_goes_on_from_a_saved_state_bit_for_bit(backend_of, tmp_path, rank):
    first = backend_of("gpt2", lora={"rank": rank})
    step(first, 1)
    first.publish()
    first.save_state(tmp_path / "state")
    step(first, 2)
    first.publish()
    second = backend_of("gpt2", lora={"rank": rank})
    second.load_state(tmp_path / "state")
    step(second, 2)
    second.publish()
    pairs = zip(first.learner.trainable(), second.learner.trainable(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and greedy(first) == greedy(second)
    if rank == 0:
        first.export_adapter(tmp_path / "full")
        with torch.no_grad():
            saved = AutoModelForCausalLM.from_pretrained(tmp_path / "full")(input_ids=IDS).logits[0]
        expected = torch.log_softmax(saved, -1)[torch.arange(39), IDS[0, 1:]]
        assert first.score(IDS[0].tolist()).logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        assert len(AutoTokenizer.from_pretrained(tmp_path / "full")) <= 640


def test_full_fine_tuning_keeps_a_copy_of_where_it_started(backend_of):
    backend = backend_of("gpt2", lora={"rank": 0}, algorithm={"kl_beta": 0.1})
    data = [Datum(IDS[0].tolist(), [0] + [1] * 39)]
    before = backend.logprobs(data)[0]
    assert step(backend, 1)["grad_norm"] > 0
    assert backend.logprobs(data, BASE)[0] == before
    assert backend.logprobs(data)[0] != pytest.approx(before, abs=1e-2)


def test_the_start_says_which_path_and_what_is_idle(backend_of, caplog):
    with caplog.at_level(logging.WARNING, logger="rllm"):
        backend = backend_of("mamba")
    told = [record.getMessage() for record in caplog.records]
    assert sum("plain path: MambaForCausalLM" in line and "one row at a time" in line for line in told) == 1
    assert any("text does not go through 2 of the" in line and "dt_proj" in line for line in told)
    facts = backend.describe()
    assert facts["path"].startswith("plain path: MambaForCausalLM")
    assert facts["adapters"]["default"]["formula"] == facts["trainable"]
    assert facts["memory_bytes"]["activations up to"] > 0


def test_the_doctor_tries_a_model_and_says_its_path(tmp_path):
    from rllm.doctor import as_text, examine

    report = examine(str(model_folder(tmp_path / "model", "gpt2")))
    assert report.can_run and report.model["sampled_tokens"] >= 1
    assert "plain path: GPT2LMHeadModel" in as_text(report)
    assert "no folder" in examine(str(tmp_path / "nowhere")).problems[0].what


def test_bases_and_lengths_that_cannot_be_are_refused(backend_of):
    with pytest.raises(ConfigError, match=r"model\.max_model_len=300: .*can do at most 256 tokens"):
        backend_of("gpt2", model={"max_model_len": 300})
    with pytest.raises((ConfigError, ModelError), match=r"model\.quantization=nf4"):
        backend_of("gpt2", model={"quantization": "nf4"})


def test_a_teacher_may_be_of_any_architecture(backend_of, tmp_path):
    teacher = model_folder(tmp_path / "teacher", "gpt_neox")
    student = backend_of("gpt2", distill={"teacher": str(teacher)}, algorithm={"adv_estimator": "distill"})
    values = student.logprobs([Datum(IDS[0].tolist(), [0] + [1] * 39)], TEACHER)[0][1:]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(teacher)(input_ids=IDS).logits[0]
    expected = torch.log_softmax(logits, -1)[torch.arange(39), IDS[0, 1:]]
    assert values == pytest.approx(expected.tolist(), abs=1e-4)


def test_rllm_train_and_merge_on_gpt2(tmp_path):
    folder = model_folder(tmp_path / "model", "gpt2", max_position_embeddings=512)

    def rllm(*arguments):
        command = [sys.executable, "-m", "rllm.cli", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=tmp_path)

    done = rllm(
        "train", FLOW, f"model.path={folder}", "model.device=cpu", "trainer.total_steps=2", "trainer.experiment_name=run",
        "data.train_batch_size=2", "rollout.n=2", "data.max_response_length=8", "data.val_size=2", "algorithm.zero_std=keep",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plain path: GPT2LMHeadModel" in done.stderr + done.stdout
    (adapter,) = {p.parent for p in (tmp_path / "runs" / "run").rglob("adapter_model.safetensors")}
    expected = peft_logits(folder, adapter)
    merged = rllm("merge", adapter, "--base", folder, "--out", tmp_path / "merged")
    assert merged.returncode == 0, merged.stderr
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=IDS).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_tinkers_api_trains_samples_and_scores_on_it(backend_of, tmp_path):
    """Two runs over one base, the official SDK as client: values are those of transformers and PEFT."""
    tinker = pytest.importorskip("tinker", reason="the tinker SDK is not installed; it comes with the dev extra")
    from tinker_server import KEY, Served, datum

    served = Served(backend_of("gpt2"), tmp_path / "state")
    client = tinker.ServiceClient(base_url=served.url, api_key=KEY)
    try:
        runs = [client.create_lora_training_client("default", rank=4, seed=seed).result(timeout=60) for seed in (1, 2)]
        row = datum(tinker, range(40), weights=[1.0] * 39)
        first = [run.forward_backward([row], "cross_entropy").result(timeout=60) for run in runs]
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")(input_ids=IDS).logits[0]
        base = torch.log_softmax(logits, -1)[torch.arange(39), IDS[0, 1:]].tolist()
        for told in first:
            assert told.loss_fn_outputs[0]["logprobs"].data == pytest.approx(base, abs=1e-4)
        runs[0].optim_step(tinker.AdamParams(learning_rate=1e-2)).result(timeout=60)
        sampler = runs[0].save_weights_and_get_sampling_client().result(timeout=60)
        trained = sampler.compute_logprobs(tinker.ModelInput.from_ints(range(40))).result(timeout=60)
        assert sum(trained[1:]) > sum(base) + 1.0
        asked = tinker.SamplingParams(max_tokens=6, temperature=0.0)
        (answer,) = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, asked).result(timeout=60).sequences
        rescored = sampler.compute_logprobs(tinker.ModelInput.from_ints([*PROMPT, *answer.tokens])).result(timeout=60)
        assert answer.logprobs == pytest.approx(rescored[len(PROMPT) :], abs=1e-4)
        (folder,) = {file.parent for file in (tmp_path / "state").rglob("adapter_model.safetensors")}
        expected = torch.log_softmax(peft_logits(tmp_path / "gpt2", folder, head=True), -1)[
            torch.arange(39), IDS[0, 1:]
        ]
        assert trained[1:] == pytest.approx(expected.tolist(), abs=1e-4)
    finally:
        client.close("success").result(timeout=20)
        served.close()
