"""What a backend cannot do is refused before anything loads, from the one table."""

from dataclasses import fields, replace

import pytest

from rllm.backends import base
from rllm.backends.base import CAPABILITIES, Capabilities, refuse_impossible
from rllm.config.check import LOSSES
from rllm.config.load import load_config, load_model
from rllm.config.schema import Config
from rllm.errors import ConfigError
from rllm.trainer import AgentTrainer, create_backend

# capability -> (what a backend without it has, settings that ask for it, what is said)
ASKS = {
    "full_finetuning": (False, ["lora.rank=0"], "lora.rank=0: .*trains adapters only; give lora.rank at least 1"),
    "adapter_per_role": (
        False,
        ["lora.per_role={solver: {}, judge: {}}"],
        r"lora\.per_role=solver, judge: .*set lora\.per_role=shared",
    ),
    "max_lora_rank": (32, ["lora.rank=64"], "lora.rank=64: .*ranks go up to 32"),
    "top_p_in_training": (False, ["rollout.top_p=0.9"], r"rollout\.top_p=0\.9: .*set rollout\.top_p=1"),
    "temperature_in_training": (
        False,
        ["rollout.temperature=0.7"],
        r"rollout\.temperature=0\.7: .*set rollout\.temperature=1",
    ),
    "entropy_bonus": (
        False,
        ["algorithm.entropy_coeff=0.01"],
        r"algorithm\.entropy_coeff=0\.01: .*set algorithm\.entropy_coeff=0",
    ),
    "lora_options": (frozenset(), ["lora.use_rslora=true"], r"lora\.use_rslora=True: .*alpha / rank"),
    "losses": (
        frozenset({"cross_entropy"}),
        ["algorithm.loss=ppo_clip"],
        r"algorithm\.loss=ppo_clip: .*it can do cross_entropy",
    ),
    "devices": (frozenset({"cpu"}), ["model.device=cuda:1"], r"model\.device=cuda: .*it can do auto, cpu"),
    "dtypes": (frozenset({"float32"}), ["model.dtype=bfloat16"], r"model\.dtype=bfloat16: .*it can do auto, float32"),
    "quantization": (frozenset({"none"}), ["model.quantization=nf4"], r"model\.quantization=nf4: .*it can do none"),
    "teachers": (
        frozenset({"endpoint"}),
        ["distill.teacher=default"],
        r"distill\.teacher=model: .*it can do endpoint",
    ),
    "overlap": (False, ["trainer.overlap=true"], r"trainer\.overlap=true: .*leave it out"),
}
ABLE = Capabilities(
    full_finetuning=True,
    adapter_per_role=True,
    max_lora_rank=4096,
    top_p_in_training=True,
    temperature_in_training=True,
    entropy_bonus=True,
    lora_options=frozenset(base.LORA_OPTIONS),
    losses=frozenset(LOSSES),
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({"float32", "bfloat16"}),
    quantization=frozenset({"none", "nf4"}),
    teachers=frozenset({"model", "endpoint"}),
    overlap=True,
)


def test_every_capability_of_the_table_is_asked_for_here():
    assert set(ASKS) == {field.name for field in fields(Capabilities)}


@pytest.mark.parametrize("capability", ASKS)
def test_asking_for_what_the_backend_cannot_do_is_refused_and_only_that(monkeypatch, capability):
    without, overrides, message = ASKS[capability]
    resolved = load_model(Config, overrides=overrides)  # without what this machine's packages and devices cannot do
    monkeypatch.setitem(base.CAPABILITIES, "local", ABLE)
    refuse_impossible(resolved.config, resolved.provenance)
    monkeypatch.setitem(base.CAPABILITIES, "local", replace(ABLE, **{capability: without}))
    with pytest.raises(ConfigError, match=f"^argument: {message}"):
        refuse_impossible(resolved.config, resolved.provenance)
    refuse_impossible(load_config(overrides=["algorithm.loss=ppo_clip"]).config, training=capability != "losses")
    if capability == "teachers":
        with pytest.raises(ConfigError, match=r"distill\.base_url=endpoint: .*it can do model"):
            monkeypatch.setitem(base.CAPABILITIES, "local", replace(ABLE, teachers=frozenset({"model"})))
            refuse_impossible(load_config(overrides=["distill.base_url=http://x/v1"]).config)


def test_a_cap_on_the_rank_holds_for_every_role_and_pattern(monkeypatch):
    monkeypatch.setitem(base.CAPABILITIES, "local", replace(ABLE, max_lora_rank=32))
    for override, key in (
        ("lora.per_role={judge: {rank: 64}}", "lora.per_role.judge.rank"),
        ("lora.rank_pattern={q_proj: 64}", "lora.rank"),
    ):
        with pytest.raises(ConfigError, match=f"{key}=64: .*up to 32"):
            refuse_impossible(load_config(overrides=[override]).config)


def test_every_backend_that_a_config_can_name_has_a_row():
    assert set(Config.model_json_schema()["properties"]["backend"].get("enum", ["local"])) == set(CAPABILITIES)


def test_trainer_and_backend_refuse_before_a_model_loads(monkeypatch):
    monkeypatch.setitem(base.CAPABILITIES, "local", replace(ABLE, max_lora_rank=4))
    config = load_config(overrides=["model.path=./nowhere"])
    for start in (lambda: AgentTrainer(workflow_class=object, config=config), lambda: create_backend(config.config)):
        with pytest.raises(ConfigError, match=r"lora\.rank=8: .*up to 4"):
            start()


def test_what_only_training_asks_for_is_not_asked_of_evaluation():
    refuse_impossible(load_config(overrides=["rollout.top_p=0.9"]).config, training=False)


def test_a_loss_of_one_role_is_held_against_the_table_too(monkeypatch):
    monkeypatch.setitem(base.CAPABILITIES, "local", replace(ABLE, losses=frozenset({"ppo_clip"})))
    # Only what some backend does can be refused: other names are the user's own.
    monkeypatch.setattr(base, "_NAMED_LOSSES", frozenset(LOSSES))
    resolved = load_config(overrides=["algorithm.per_role={judge: {loss: gspo}}"])
    with pytest.raises(ConfigError, match=r"^argument: algorithm\.per_role\.judge\.loss=gspo: .*it can do ppo_clip"):
        refuse_impossible(resolved.config, resolved.provenance)
    refuse_impossible(resolved.config, training=False)


def test_a_loss_that_the_user_brought_is_for_no_table_to_refuse():
    config = load_config().config
    config.algorithm.loss = "my_own_loss"
    refuse_impossible(config)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("lora.target_modules=[q_proj,v_proj]", "lora.target_modules"),
        ("lora.target_modules=.*q_proj", "lora.target_modules"),
        ("lora.exclude_modules=[o_proj]", "lora.exclude_modules"),
        ("lora.rank_pattern={q_proj: 4}", "lora.rank_pattern"),
        ("lora.alpha_pattern={q_proj: 4}", "lora.alpha_pattern"),
        ("lora.dropout=0.1", "lora.dropout"),
        ("lora.adapter_path=somewhere", "lora.adapter_path"),
        ("lora.per_role={judge: {dropout: 0.1}}", "lora.per_role.judge.dropout"),
        ("lora.rank=0", "lora.rank"),
        ("model.device=cpu", "model.device"),
        ("model.dtype=float32", "model.dtype"),
        ("rollout.temperature=0.9", "rollout.temperature"),
        ("algorithm.entropy_coeff=0.1", "algorithm.entropy_coeff"),
        ("distill.teacher=default", "distill.teacher"),
    ],
)
def test_what_the_service_cannot_do_is_refused_before_anybody_is_asked(override, key):
    resolved = load_config(overrides=["backend=tinker", override])
    with pytest.raises(
        ConfigError, match=rf"^argument: {key.replace('.', '[.]')}=.*: the tinker backend cannot do this; "
    ):
        refuse_impossible(resolved.config, resolved.provenance)


@pytest.mark.parametrize(
    "override",
    [
        "lora.target_modules=all-linear",
        "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",
        "lora.target_modules=[gate_proj,up_proj,down_proj,lm_head]",
        "lora.train_mlp=false",
        "rollout.val_temperature=0.3",
        "algorithm.kl_beta=0.1",
        "distill.base_url=http://127.0.0.1:1/v1",
    ],
)
def test_what_the_service_can_do_passes(override):
    refuse_impossible(load_config(overrides=["backend=tinker", override]).config)
