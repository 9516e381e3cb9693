"""On the plain path a model gives what transformers and PEFT give, in values and gradients, whatever rows stand beside each other."""

import copy
import json
import logging

import pytest
import torch
from tiny_models import PLAIN_KINDS, VOCAB, build, build_plain, random_adapter, with_peft

from rllm.backends.base import BASE, AdamParams, Datum, LossSpec
from rllm.backends.local.learner import Learner
from rllm.backends.local.loading import load_decoder, load_model, save_model
from rllm.backends.local.model import Decoder, PackedCausal
from rllm.backends.local.plain.model import PlainModel, adapted
from rllm.errors import ConfigError, ModelError
from rllm.lora.match import adapted_modules, match_modules

# One of each: Conv1D, fused matrices, soft caps and windows, norms after, experts, heads that cannot be run apart, states.
TRAINED = ["gpt2", "gpt_neox", "gemma2", "phi3", "olmo2", "qwen3_moe", "opt", "mamba"]
LENGTHS = [5, 23, 1, 14]


def token_rows(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def packed_logits(model, rows, lora=None):
    attend = PackedCausal([len(row) for row in rows])
    ids = torch.tensor([token for row in rows for token in row])
    with torch.no_grad():
        return model.logits(model(ids, attend.positions, attend, lora), lora).split([len(row) for row in rows])


def own_logits(model, row):
    with torch.no_grad():
        return model(input_ids=torch.tensor([row])).logits[0]


def data_of(rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i, ids in enumerate(rows):
        mask = [int(t > 1) for t in range(len(ids))]
        logprobs = (torch.randn(len(ids), generator=generator) - 4.5).tolist()
        data.append(
            Datum(ids, mask, [((-1.0) ** i) * m for m in mask], [x * m for x, m in zip(logprobs, mask, strict=True)])
        )
    return data


def cross_entropy(model, data):
    """Weighted by the advantages, mean over all trained tokens, one unpadded row at a time."""
    total, count = torch.zeros(()), sum(datum.n_trained for datum in data)
    for datum in data:
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([datum.ids])).logits[0].float(), -1)
        for t, trained in enumerate(datum.mask):
            if trained:
                total = total - datum.advantages[t] * logprobs[t - 1, datum.ids[t]] / count
    return total


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_logits_of_rows_side_by_side_are_transformers_own_on_each_row(make_plain, kind):
    model, plain, _ = make_plain(kind)
    assert isinstance(plain, PlainModel)
    rows = token_rows()
    for ours, row in zip(packed_logits(plain, rows), rows, strict=True):
        torch.testing.assert_close(ours, own_logits(model, row), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TRAINED)
def test_adapters_are_on_the_modules_that_peft_chooses_and_give_its_logits_and_gradients(make_plain, kind):
    from peft import LoraConfig, get_peft_model

    model, plain, _ = make_plain(kind)
    everything = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    excluded = None
    if kind == "mamba":  # PEFT refuses its output projection
        excluded = ["out_proj"]
        everything.exclude_modules = excluded
    chosen = get_peft_model(copy.deepcopy(model), everything).targeted_module_names
    names = list(plain.linear_shapes())
    assert match_modules(names, exclude=excluded, head=plain.head_name) == [name for name in names if name in chosen]

    adapter = random_adapter(plain, exclude=excluded)
    peft = with_peft(model, adapter)
    data = data_of(token_rows([9, 23, 4]))
    for ours, datum in zip(
        packed_logits(plain, [d.ids for d in data], adapter.pairs(torch.float32)), data, strict=True
    ):
        torch.testing.assert_close(ours, own_logits(peft, datum.ids), atol=1e-4, rtol=1e-4)

    Learner(plain, {"default": adapter}, micro_batch_tokens=40).forward_backward(data, LossSpec("cross_entropy"))
    cross_entropy(peft, data).backward()
    state = dict(peft.named_parameters())
    compared = 0
    for name in adapter.modules_adapted:
        for letter, ours in zip("AB", adapter.matrices(name), strict=True):
            expected = state[f"base_model.model.{name}.lora_{letter}.default.weight"].grad
            if expected is None:  # text does not go through it
                assert plain.idle([name]) == [name] and ours.grad is None
                continue
            assert (ours.grad - expected).norm() <= 1e-5 * expected.norm() + 1e-8
            compared += 1
    assert compared >= 2 * 4


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "qwen3_moe", "opt"])
def test_full_fine_tuning_takes_the_gradient_of_transformers_own_loss(make_plain, kind):
    model, plain, _ = make_plain(kind)
    data = data_of(token_rows([9, 23, 4]))
    learner = Learner(plain, {})
    learner.forward_backward(data, LossSpec("cross_entropy"))
    model.requires_grad_(True)
    cross_entropy(model, data).backward()
    ours = dict(plain.hf.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert ours[name].grad is None
        else:
            assert (ours[name].grad - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-7, name
    before = {name: p.detach().clone() for name, p in ours.items()}
    learner.optim_step(AdamParams(1e-3))
    assert all(
        not torch.equal(before[name], p) for name, p in ours.items() if before[name].abs().sum() > 0 and p.dim() > 1
    )


def test_the_learner_scores_rows_as_transformers_does_with_and_without_the_adapter(make_plain):
    model, plain, _ = make_plain("gemma2")
    adapter = random_adapter(plain)
    learner = Learner(plain, {"default": adapter}, micro_batch_tokens=30)
    data = data_of(token_rows())
    for asked, reference in ((None, with_peft(copy.deepcopy(model), adapter)), (BASE, model)):
        for values, datum in zip(learner.logprobs(data, asked), data, strict=True):
            expected = torch.log_softmax(own_logits(reference, datum.ids), -1)
            for t in range(1, len(datum.ids)):
                assert values[t] == pytest.approx(expected[t - 1, datum.ids[t]].item(), abs=1e-4)


def test_the_two_paths_agree_on_a_model_that_both_can_run(tmp_path):
    """The same Qwen3 layers, once by our decoder, once as transformers runs them."""
    from transformers import AutoConfig

    from rllm.backends.local.plain.loading import load_plain

    build("qwen3", tmp_path)
    fast = load_model(tmp_path)
    assert isinstance(fast, Decoder) and fast.path == "own decoder"
    plain = load_plain(tmp_path, AutoConfig.from_pretrained(tmp_path), torch.float32, torch.device("cpu"))
    assert plain.linear_shapes() == fast.linear_shapes()
    adapters = [random_adapter(model) for model in (fast, plain)]
    rows = token_rows()
    both = [packed_logits(m, rows, a.pairs(m.dtype)) for m, a in zip((fast, plain), adapters, strict=True)]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings", "longest", "reason"),
    [
        ("qwen3", {}, 10_000, None),
        ("llama", {"attention_bias": True, "mlp_bias": True}, None, None),
        ("mistral", {"sliding_window": 12}, 12, None),
        ("mistral", {"sliding_window": 12}, 13, "its attention sees 12 tokens, and sequences may have 13"),
        ("llama", {"hidden_act": "gelu"}, None, "its activation is 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, None, "changes with the length"),
    ],
)  # fmt: skip
def test_a_model_takes_the_fast_path_unless_one_line_says_why_not(tmp_path, caplog, kind, settings, longest, reason):
    model = build(kind, tmp_path, **settings)
    with caplog.at_level(logging.WARNING, logger="rllm"):
        loaded = load_model(tmp_path, longest=longest)
    said = [record.getMessage() for record in caplog.records]
    row = token_rows([40])[0][: loaded.config.attention_window]
    torch.testing.assert_close(packed_logits(loaded, [row])[0], own_logits(model, row), atol=1e-4, rtol=1e-4)
    if reason is None:
        assert isinstance(loaded, Decoder) and not said
    else:
        assert isinstance(loaded, PlainModel) and len(said) == 1
        assert reason in said[0] and "plain path" in said[0] and "slower" in said[0]


def test_what_a_model_can_do_is_found_by_running_it(tmp_path):
    found = {}
    for kind in ("gpt2", "opt", "mamba", "rwkv"):
        build_plain(kind, tmp_path / kind)
        found[kind] = load_model(tmp_path / kind)
    assert {kind: m.traits.decoding for kind, m in found.items()} == {
        "gpt2": "batched", "opt": "batched", "mamba": "single", "rwkv": "recompute",
    }  # fmt: skip
    assert found["gpt2"].traits.cache_bytes == 2 * 2 * 32 * 4  # keys and values, layers, width, float32
    # The scan reads the weight of this projection by itself: an adapter of it would do nothing.
    assert found["mamba"].idle(list(found["mamba"].linear_shapes())) == [
        f"backbone.layers.{i}.mixer.dt_proj" for i in range(2)
    ]


def test_what_cannot_be_run_is_refused_by_name(tmp_path):
    build_plain("bert", tmp_path / "bert")
    with pytest.raises(ModelError, match="BertLMHeadModel lets tokens see those that come after them"):
        load_model(tmp_path / "bert")
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match="type 't5', for which transformers has no causal language model"):
        load_model(tmp_path / "t5")
    build_plain("gpt2", tmp_path / "gpt2")
    with pytest.raises(ModelError, match=r"model\.quantization=nf4: .*'gpt2'.*set model\.quantization=none"):
        load_model(tmp_path / "gpt2", quantization="nf4")
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    with pytest.raises(ModelError, match="lacks 12 tensors"):
        load_model(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load_model(tmp_path / "gpt2")


def test_rope_that_changes_with_the_length_bounds_the_length(make_plain):
    factors = [1.0] * 4
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 32}
    _, plain, _ = make_plain("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    assert plain.config.max_position == 32


def test_a_saved_full_model_is_the_model_and_nothing_is_left_of_an_earlier_one(make_plain, tmp_path):
    model, plain, folder = make_plain("qwen3_moe")
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors.index.json").write_text("{}")
    save_model(plain, folder, out)
    assert not (out / "model.safetensors.index.json").exists()
    row = token_rows([12])[0]
    again = load_model(out)
    torch.testing.assert_close(packed_logits(again, [row])[0], own_logits(model, row), atol=1e-6, rtol=1e-6)
    assert again.fingerprint() == plain.fingerprint()
    with torch.no_grad():
        next(iter(again.parameters()))[0, 0] += 1e-3
    assert again.fingerprint() != plain.fingerprint()


def test_each_thread_sees_its_own_adapter(make_plain):
    """The sampler's and the trainer's thread run the same modules: what one has in force, the other must not see."""
    from threading import Barrier, Thread

    _, plain, _ = make_plain("gpt2")
    pairs = random_adapter(plain).pairs(torch.float32)
    row = token_rows([12])[0]
    expected = {False: packed_logits(plain, [row])[0], True: packed_logits(plain, [row], pairs)[0]}
    assert not torch.allclose(expected[False], expected[True], atol=1e-3)
    barrier, wrong = Barrier(2), []

    def run(lora):
        for _ in range(20):
            barrier.wait()
            if not torch.equal(packed_logits(plain, [row], lora)[0], expected[lora is not None]):
                wrong.append(lora is not None)

    threads = [Thread(target=run, args=(lora,)) for lora in (None, pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    with adapted(pairs):
        torch.testing.assert_close(own_logits(plain.hf, row), expected[True])
    torch.testing.assert_close(own_logits(plain.hf, row), expected[False])


def test_switches_for_halves_follow_the_architecture_or_are_refused(make_plain):
    from rllm.config.schema import LoraSettings

    _, gpt2, _ = make_plain("gpt2")
    names = list(gpt2.linear_shapes())
    left = adapted_modules(names, LoraSettings(rank=4, train_attn=False), gpt2.head_name)
    assert left and all(".mlp." in name for name in left)
    _, mamba, _ = make_plain("mamba")
    with pytest.raises(
        ConfigError, match=r"lora\.train_attn=false: no module of this model .*use lora\.exclude_modules"
    ):
        adapted_modules(list(mamba.linear_shapes()), LoraSettings(rank=4, train_attn=False), mamba.head_name)


def test_our_decoder_refuses_what_takes_the_plain_path(tmp_path):
    build_plain("gpt2", tmp_path)
    with pytest.raises(ModelError, match="cannot be run by the decoder: it is of type 'gpt2'"):
        load_decoder(tmp_path)


def test_dropout_drops_inputs_of_a_in_training_only_and_keeps_the_mean(make_plain):
    _, plain, _ = make_plain("gpt2")
    adapter = random_adapter(plain)
    adapter.dropout = 0.5
    layer, x = plain.hf.get_submodule("transformer.h.0.attn.c_attn"), torch.randn(2, 3, 32)

    def through(training):
        with torch.no_grad(), adapted(adapter.pairs(torch.float32, training=training)):
            return layer(x)

    whole = through(False)
    assert torch.equal(through(False), whole)
    draws = torch.stack([through(True) for _ in range(2000)])
    spread = draws.std(0)
    assert (spread > 0).all()
    assert ((draws.mean(0) - whole).abs() <= 5 * spread / 2000**0.5).all()
