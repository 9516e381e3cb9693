"""One base, several adapters: each role trains and samples its own, the base never moves, and what is published is proven."""

import asyncio
import logging
import zlib
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rllm.backends.base import BASE, INITIAL_ADAPTER, AdamParams, Datum, LossSpec, SamplingParams, initial_of
from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.facts import formula_count
from rllm.backends.local.loading import DEFAULT_MODEL
from rllm.backends.local.model import PackedCausal
from rllm.config.schema import Config, LoraSettings
from rllm.errors import ConfigError, ModelError
from rllm.lora.files import match_config_to_adapter, read_adapter

PPO, ADAM = LossSpec("ppo_clip"), AdamParams(1e-2)
IDS = list(range(10, 40))
TWO_ROLES = {"per_role": {"solver": {"rank": 4}, "judge": {"rank": 2, "target_modules": ["q_proj", "v_proj"]}}}


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


def rows(seed, adapter="default", n=3):
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i in range(n):
        ids = torch.randint(5, 200, (20 + i,), generator=generator).tolist()
        mask = [0] * 8 + [1] * (len(ids) - 8)
        data.append(Datum(ids, mask, [(-1.0) ** i * m for m in mask], [-3.0 * m for m in mask], adapter=adapter))
    return data


def train(backend, seed, *adapters, params=ADAM):
    for adapter in adapters or ("default",):
        backend.forward_backward(rows(seed, adapter), PPO)
    metrics = backend.optim_step(params)
    backend.publish()
    return metrics


def sampled(backend, adapter, n=8):
    return asyncio.run(backend.sample(IDS, SamplingParams(max_tokens=n, temperature=0.0), adapter))


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def own_logits(backend, adapter):
    attend = PackedCausal([len(IDS)])
    pairs = None if adapter is None else backend.adapters[adapter].pairs(torch.float32)
    with torch.no_grad():
        hidden = backend.model(torch.tensor(IDS), attend.positions, attend, pairs)
        return backend.model.logits(hidden, pairs)


def transformers_base():
    return AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32).eval()


def test_a_step_on_one_role_leaves_the_files_of_the_other_byte_identical(backend_of, tmp_path):
    backend = backend_of(lora=TWO_ROLES)
    train(backend, 1, "solver", "judge")
    before = backend.export_adapter(tmp_path / "before")
    train(backend, 2, "solver")
    after = backend.export_adapter(tmp_path / "after")
    assert before.keys() == after.keys() == {"solver", "judge"}
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (before["judge"] / name).read_bytes() == (after["judge"] / name).read_bytes()
    weights = "adapter_model.safetensors"
    assert (before["solver"] / weights).read_bytes() != (after["solver"] / weights).read_bytes()


def test_roles_of_different_rank_are_sampled_in_one_batch_each_with_its_own(backend_of):
    backend = backend_of(lora=TWO_ROLES)
    train(backend, 1, "solver", "judge")

    async def together():
        params = SamplingParams(max_tokens=12, temperature=0.0)
        names = ["solver", "judge", BASE, initial_of("judge")] * 3
        return names, await asyncio.gather(*(backend.sample(IDS, params, name) for name in names))

    names, answers = asyncio.run(together())
    data = [
        Datum(IDS + a.ids, [0] * len(IDS) + [1] * len(a.ids), adapter=n) for n, a in zip(names, answers, strict=True)
    ]
    for datum, answer in zip(data, answers, strict=True):
        (trainer,) = backend.logprobs([datum])
        assert answer.logprobs == pytest.approx(trainer[len(IDS) :], abs=1e-4)
    by_name = {name: answer.logprobs for name, answer in zip(names, answers, strict=True)}
    assert by_name[initial_of("judge")] == pytest.approx(by_name[BASE], abs=1e-5)
    assert abs(by_name["solver"][0] - by_name["judge"][0]) > 1e-3


def test_roles_start_from_their_own_seeded_matrices(backend_of):
    a, b, other = (
        backend_of(lora=TWO_ROLES),
        backend_of(lora=TWO_ROLES),
        backend_of(lora=TWO_ROLES, trainer={"seed": 1}),
    )
    for role in ("solver", "judge"):
        mine, again, moved = (next(iter(x.adapters[role].a.values())) for x in (a, b, other))
        assert torch.equal(mine, again) and not torch.equal(mine, moved)
    name = a.adapters["judge"].modules_adapted[0]
    assert not torch.equal(a.adapters["solver"].matrices(name)[0][:2], a.adapters["judge"].matrices(name)[0])
    assert zlib.crc32(b"solver") != zlib.crc32(b"judge")


def test_a_role_folder_is_what_eval_and_serve_start_from(backend_of, tmp_path):
    backend = backend_of(lora=TWO_ROLES)
    train(backend, 1, "solver", "judge")
    backend.export_adapter(tmp_path / "adapter")
    config = match_config_to_adapter(Config.model_validate({"lora": {"adapter_path": str(tmp_path / "adapter")}}))
    again = LocalBackend.create(config)
    try:
        for role in ("solver", "judge"):
            assert sampled(again, role).logprobs == pytest.approx(sampled(backend, role).logprobs, abs=1e-5)
    finally:
        again.close()


# The fresh adapter is the base, and the reference is what it is said to be


def test_a_fresh_adapter_is_the_base_bit_for_bit_and_its_kl_is_exactly_zero(backend_of):
    backend = backend_of()
    assert torch.equal(own_logits(backend, "default"), own_logits(backend, None))
    assert torch.allclose(own_logits(backend, None), logits_of(transformers_base()), atol=1e-4)
    data = rows(3) + rows(4, n=1)
    policy = backend.logprobs(data, trained_only=True)
    for reference in (BASE, INITIAL_ADAPTER):
        assert backend.logprobs(data, reference, trained_only=True) == policy
    everywhere = backend.logprobs(data)
    for datum, whole, part in zip(data, everywhere, policy, strict=True):
        assert [v for v, m in zip(part, datum.mask, strict=True) if not m] == [0.0] * datum.mask.count(0)
        assert [v for v, m in zip(part, datum.mask, strict=True) if m] == pytest.approx(
            [v for v, m in zip(whole, datum.mask, strict=True) if m], abs=1e-5
        )


def test_references_stay_where_they_were_while_the_policy_moves(backend_of):
    backend = backend_of(lora=TWO_ROLES)
    data = rows(5, "solver") + rows(6, "judge")
    base = backend.logprobs(data, BASE, trained_only=True)
    train(backend, 1, "solver", "judge")
    assert backend.logprobs(data, BASE, trained_only=True) == base
    assert backend.logprobs(data, INITIAL_ADAPTER, trained_only=True) == base
    moved = backend.logprobs(data, trained_only=True)
    assert max(abs(a - b) for x, y in zip(moved, base, strict=True) for a, b in zip(x, y, strict=True)) > 1e-3


def test_the_initial_adapter_of_a_warm_start_is_the_file_not_the_base(backend_of, tmp_path):
    first = backend_of()
    train(first, 1)
    folder = first.export_adapter(tmp_path / "sft")["default"]
    second = backend_of(lora={"adapter_path": str(folder)})
    data = rows(7)
    start = second.logprobs(data, trained_only=True)
    assert start == first.logprobs(data, trained_only=True)
    train(second, 2)
    assert second.logprobs(data, INITIAL_ADAPTER, trained_only=True) == start
    assert second.logprobs(data, BASE, trained_only=True) != start


def test_full_finetuning_keeps_its_starting_weights_only_where_a_reference_is_asked_for(backend_of):
    with_reference = backend_of(lora={"rank": 0}, algorithm={"kl_beta": 0.1})
    data = rows(8)
    start = with_reference.logprobs(data, trained_only=True)
    assert with_reference.logprobs(data, BASE, trained_only=True) == start
    train(with_reference, 1, params=AdamParams(1e-4))
    assert with_reference.logprobs(data, BASE, trained_only=True) == start
    assert with_reference.logprobs(data, trained_only=True) != start
    without = backend_of(lora={"rank": 0})
    with pytest.raises(KeyError, match="no adapter 'base'"):
        without.logprobs(data, BASE)


# Proof of publish


def test_the_probe_passes_after_a_publish_and_sees_a_sampler_left_behind(backend_of, monkeypatch):
    backend = backend_of(lora=TWO_ROLES)
    assert backend.probe().passed
    train(backend, 1, "solver", "judge")
    good = backend.probe()
    assert good.passed and good.gap_max < 1e-4 and good.sampler_version == good.trainer_version == 1
    # The sampler is told a new version but keeps the old weights: the worst silent failure.
    old = dict(backend.engine.adapters)
    backend.forward_backward(rows(2, "judge"), PPO)
    backend.optim_step(ADAM)
    backend.policy_version += 1
    backend.engine.publish({name: held for name, held in old.items() if name != BASE}, backend.policy_version)
    stale = backend.probe()
    assert not stale.passed and not stale.same_weights and stale.gap_max > 1e-3
    assert (stale.sampler_version, stale.trainer_version) == (2, 2)
    # The weights are there, the version is not.
    monkeypatch.setattr(backend, "policy_version", 9)
    assert (backend.probe().sampler_version, backend.probe().trainer_version) == (2, 9)


def test_a_sampler_that_ignores_the_adapter_fails_the_probe(backend_of):
    backend = backend_of()
    train(backend, 1)
    backend.engine.publish({"default": None, INITIAL_ADAPTER: None}, backend.policy_version)
    probe = backend.probe()
    assert not probe.passed and not probe.same_weights and probe.gap_max > 1e-3


def test_a_prefix_cache_that_outlives_a_publish_fails_the_probe(backend_of, monkeypatch):
    backend = backend_of()
    backend.probe()
    kept = type(backend.engine._prefixes)(backend.engine._prefixes)
    train(backend, 1)
    backend.engine._prefixes.update(kept)
    probe = backend.probe()
    assert not probe.passed and probe.same_weights and probe.gap_max > probe.tolerance


def test_a_publish_moves_the_adapters_and_nothing_of_the_base(backend_of):
    backend = backend_of(lora={"target_modules": ["o_proj", "down_proj"]})
    backend.publish()
    # Nothing is stacked with these two, so what moves is exactly the adapter.
    assert backend.published_bytes == sum(p.nbytes for p in backend.adapters["default"].parameters())
    assert backend_of(lora={"rank": 0}).published_bytes == 0


def test_a_thousand_publishes_leak_nothing_and_never_touch_the_base(backend_of):
    backend = backend_of(lora={"target_modules": ["q_proj", "down_proj"]})
    base = backend.model.fingerprint()

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    data = rows(1, n=1)
    after_warm_up = 0
    for i in range(1000):
        if i % 10 == 0:
            backend.forward_backward(data, PPO)
            backend.optim_step(AdamParams(1e-4))
        backend.publish()
        if i == 200:
            after_warm_up = resident()
    assert backend.policy_version == 1000 and backend.probe().passed
    assert set(backend.engine.adapters) == {BASE, "default", INITIAL_ADAPTER}
    assert resident() - after_warm_up < 16 * 2**20
    assert backend.model.fingerprint() == base
    assert sampled(backend, "default").versions == [1000] * 8


def test_a_fingerprint_sees_one_bit_and_a_swap(backend_of):
    model = backend_of().model
    before = model.fingerprint()
    with torch.no_grad():
        weight = model.layers[1].down.weight
        weight[0, 0], weight[0, 1] = weight[0, 1].clone(), weight[0, 0].clone()
        swapped = model.fingerprint()
        weight[0, 0], weight[0, 1] = weight[0, 1].clone(), weight[0, 0].clone()
        assert model.fingerprint() == before != swapped
        weight[3, 3] = torch.nextafter(weight[3, 3], torch.tensor(9.0))
    assert model.fingerprint() not in (before, swapped)


# One training step moves what it should and nothing else


def test_one_step_moves_every_target_and_keeps_the_base(backend_of):
    backend = backend_of()
    base = backend.model.fingerprint()
    train(backend, 1)
    adapter = backend.adapters["default"]
    assert all(adapter.matrices(name)[1].abs().max() > 0 for name in adapter.modules_adapted)
    assert backend.model.fingerprint() == base


def test_optimizer_memory_is_two_float32_moments_of_the_adapter_and_nothing_of_the_base(backend_of):
    backend = backend_of(lora=TWO_ROLES)
    train(backend, 1, "solver", "judge")
    states = backend.learner.optimizer_state()
    moments = sum(v.nbytes for state in states for name, v in state.items() if name != "step")
    count = sum(formula_count(backend.model.linear_shapes(), s) for s in backend.config.lora.adapters().values())
    assert moments == 2 * 4 * count == backend.describe()["memory_bytes"]["optimizer"]
    assert all(p.grad is None for p in backend.model.parameters())


def test_dropout_is_on_in_training_only_and_repeats_with_the_seed(backend_of):
    def losses(dropout, seed=0):
        backend = backend_of(lora={"dropout": dropout}, trainer={"seed": seed})
        train(backend, 1)
        quiet = backend.logprobs(rows(2), trained_only=True)
        assert quiet == backend.logprobs(rows(2), trained_only=True)
        assert backend.probe().passed
        # Without a publish the loss at the sampler's own log-probabilities shows what the training pass computes.
        return [backend.learner.forward_backward(rows(2), PPO)["sampler_kl"] for _ in range(2)]

    without, with_it, again = losses(0.0), losses(0.5), losses(0.5)
    assert without[0] == without[1]
    assert with_it[0] != with_it[1] and with_it == again


def test_dropout_keeps_the_expected_output(backend_of):
    adapter = backend_of(lora={"dropout": 0.25}).adapters["default"]
    x = torch.ones(200, 500)
    dropped = adapter._drop(x)
    assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)


# Settings against PEFT


@pytest.mark.parametrize(
    ("ours", "peft"),
    [
        ({"use_rslora": True}, {"use_rslora": True}),
        (
            {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 6}},
            {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 6}},
        ),
        (
            {"alpha_pattern": {"o_proj": 32.0}, "use_rslora": True},
            {"alpha_pattern": {"o_proj": 32.0}, "use_rslora": True},
        ),
        ({"train_mlp": False}, {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
        (
            {"train_attn": False, "train_unembed": True},
            {"target_modules": ["gate_proj", "up_proj", "down_proj", "lm_head"]},
        ),
        ({"target_modules": r".*layers\.[01]\..*_proj"}, {"target_modules": r".*layers\.[01]\..*_proj"}),
    ],
)
def test_every_setting_trains_and_exports_what_peft_makes_of_it(backend_of, tmp_path, ours, peft):
    backend = backend_of(lora=ours)
    adapter = backend.adapters["default"]
    config = PeftConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | peft))
    reference = get_peft_model(transformers_base(), config).eval()
    state = dict(reference.named_parameters())
    generator = torch.Generator().manual_seed(0)
    prefix = "base_model.model."
    assert {f"{prefix}{name}" for name in adapter.modules_adapted} == {
        key.removesuffix(".lora_A.default.weight") for key in state if ".lora_A." in key
    }
    with torch.no_grad():
        for name in adapter.modules_adapted:
            a, b = adapter.matrices(name)
            b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
            state[f"{prefix}{name}.lora_A.default.weight"].copy_(a)
            state[f"{prefix}{name}.lora_B.default.weight"].copy_(b)
    expected = logits_of(reference)
    assert torch.allclose(own_logits(backend, "default"), expected, atol=1e-4)
    assert (expected - logits_of(transformers_base())).abs().max() > 1e-2
    folder = backend.export_adapter(tmp_path / "out")["default"]
    loaded = PeftModel.from_pretrained(transformers_base(), str(folder)).eval()
    assert torch.allclose(logits_of(loaded), expected, atol=1e-4)
    backend.publish()
    assert backend.probe().passed
    again = backend_of(lora={"adapter_path": str(folder)})  # the file says rank, scale and modules
    assert torch.allclose(own_logits(again, "default"), expected, atol=1e-5)
    assert read_adapter(folder)[0]["use_rslora"] is bool(ours.get("use_rslora", False))


def test_an_adapter_on_the_output_head_of_a_tied_model_trains_and_leaves_the_embeddings(backend_of):
    backend = backend_of(lora={"target_modules": ["lm_head"]})
    assert backend.model.config.tied
    before = backend.model.fingerprint()
    train(backend, 1)
    _, b = backend.adapters["default"].matrices("lm_head")
    assert b.abs().max() > 0 and backend.model.fingerprint() == before and backend.probe().passed


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"target_modules": ["q_proj", "k_prj"]},
            "'k_prj' matches no module .* did you mean 'k_proj'.* q_proj, k_proj",
        ),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "'embed_tokens' matches no module"),
        (
            {"rank_pattern": {"q_prj": 2}},
            "lora.rank_pattern: 'q_prj' matches no module that is adapted; did you mean 'q_proj'",
        ),
        (
            {"target_modules": ["q_proj"], "alpha_pattern": {"up_proj": 2}},
            "lora.alpha_pattern: 'up_proj' matches no module",
        ),
        ({"target_modules": ["up_proj"], "train_mlp": False}, "leaves no module to train"),
        ({"per_role": {"solver": {}, "judge": {"target_modules": ["qproj"]}}}, "'qproj' matches no module"),
    ],
)
def test_settings_that_would_train_nothing_are_refused_by_name(backend_of, lora, message):
    with pytest.raises(ConfigError, match=message):
        backend_of(lora=lora)


def test_a_foreign_adapter_brings_its_modules_and_ranks_or_is_refused_by_feature(backend_of, tmp_path, caplog):
    def made_by_peft(name, **settings):
        settings = {
            "r": 3,
            "lora_alpha": 9,
            "target_modules": ["q_proj", "up_proj"],
            "task_type": "CAUSAL_LM",
        } | settings
        model = get_peft_model(transformers_base(), PeftConfig(**settings))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(0, 0.1)
        model.save_pretrained(tmp_path / name)
        return model.eval(), str(tmp_path / name)

    model, path = made_by_peft("plain", rank_pattern={"up_proj": 5}, alpha_pattern={"q_proj": 3}, use_rslora=True)
    with caplog.at_level(logging.WARNING):
        backend = backend_of(lora={"adapter_path": path})
    assert "rank 3 and alpha 9" in caplog.text
    assert torch.allclose(own_logits(backend, "default"), logits_of(model), atol=1e-4)
    for feature, settings in (("use_dora", {"use_dora": True}), ("modules_to_save", {"modules_to_save": ["lm_head"]})):
        _, path = made_by_peft(feature, **settings)
        with pytest.raises(ModelError, match=feature):
            backend_of(lora={"adapter_path": path})


def test_settings_are_plain_where_nothing_is_asked_for():
    assert LoraSettings().model_dump(exclude_defaults=True) == {}
