"""Settings as verl and Hydra users type them: every form is taken with its meaning there, or explained in one line."""

import pytest
from omegaconf import OmegaConf

from rllm.config.load import load_config
from rllm.config.sources import HYDRA_OPTIONS, parse_override
from rllm.errors import ConfigError


def config(*overrides, **more):
    return load_config(overrides=overrides, **more).config


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_one_and_two_plus_signs_set_the_key(plus):
    assert config(f"{plus}lora.rank=4").lora.rank == 4
    assert config(f"{plus}actor_rollout_ref.model.lora_rank=4").lora.rank == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("+lora.rnak=8", "unknown key 'lora.rnak'; did you mean 'lora.rank'?"),
        ("+++lora.rank=8", "unknown key '+lora.rank'"),
        ("~trainer.logger", "keys cannot be removed; leave trainer.logger out for its default"),
        ("~lora.rank=8", "keys cannot be removed; leave lora.rank out"),
        ("actor@actor_rollout_ref.actor=megatron_actor", "config groups are not used here"),
        ("--lora.rank=8", "settings are written without dashes: lora.rank=8"),
        ("--verbose", "unknown option; settings are written key=value"),
        ("lora.rank", "expected key=value"),
        *((option, "an option of Hydra; ") for option in HYDRA_OPTIONS),
        ("--config-name=my_trainer", "a YAML file is given with --config FILE"),
        ("--cfg", "--show-config prints the resolved config"),
    ],
)
def test_a_form_without_meaning_here_is_explained_in_one_line(text, message):
    with pytest.raises(ConfigError) as error:
        config(text)
    assert (message in str(error.value) and text in str(error.value)) or "unknown key" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E-5", 1e-5),
        ("1.5e-05", 1.5e-5),
        ("2e3", 2000.0),
        (".5", 0.5),
        ("3", 3),
        ("-1", -1),
        ("null", None),
        ("", None),
        ("True", True),
        ("false", False),
        ("[a,b]", ["a", "b"]),
        ("['console','wandb']", ["console", "wandb"]),
        ("[1e-5, 2]", [1e-5, 2]),
        ("[]", []),
        ("{a:1}", {"a": 1}),
        ("{a: 1, b: {c: 1e-3}}", {"a": 1, "b": {"c": 1e-3}}),
        ("{solver:{rank:8,alpha:1e1},judge:{}}", {"solver": {"rank": 8, "alpha": 10.0}, "judge": {}}),
        ("{url:http://x}", {"url": "http://x"}),
        ("'8'", "8"),
        ('"a b"', "a b"),
        ("2026-12-01", "2026-12-01"),
        ("1e", "1e"),
        ("e5", "e5"),
        (r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
        ("*q_proj", "*q_proj"),
        ("a=b", "a=b"),
    ],
)
def test_a_value_is_read_as_omegaconf_and_hydra_read_it(text, value):
    found = parse_override(f"some.key={text}")[1]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["1e-5", "1.5", "3", "-2E+3", ".5", "on", "null", "[1e-5,a]", "007", "1_000", "0x10", "1e5x"]
)
def test_numbers_in_arguments_are_those_that_omegaconf_reads_in_files(text):
    expected = OmegaConf.to_container(OmegaConf.create(f"key: {text}"))
    assert parse_override(f"key={text}")[1] == expected["key"]  # type: ignore[index]


def test_roles_can_be_typed_without_spaces():
    adapters = config("lora.per_role={solver:{rank:16},judge:{}}").lora.adapters()
    assert (adapters["solver"].rank, adapters["judge"].rank) == (16, 8)


def test_an_interpolation_in_a_file_sees_the_final_value_whatever_its_source_and_spelling(tmp_path, monkeypatch):
    file = tmp_path / "c.yaml"
    file.write_text(
        "data: {train_batch_size: 16, val_size: '${data.train_batch_size}'}\n"
        "rollout: {n: 4, n_val: '${.n}', max_batch: '${actor_rollout_ref.rollout.n}'}\n"
        "trainer: {experiment_name: 'r${lora.rank}-${oc.env:WHO}', seed: '${optim.seed_of_mine}'}\n"
        "lora: {alpha: '${rollout.max_concurrency}'}\n"
        "optim: {lr: '${oc.env:LR,1e-4}'}\n".replace(", seed: '${optim.seed_of_mine}'", "")
    )
    monkeypatch.setenv("WHO", "me")
    monkeypatch.delenv("LR", raising=False)
    c = load_config([file], ["data.train_batch_size=8", "rollout.n=6", "actor_rollout_ref.model.lora_rank=2"]).config
    assert (c.data.val_size, c.rollout.n_val, c.rollout.max_batch) == (8, 6, 6)
    assert (c.trainer.experiment_name, c.lora.alpha, c.optim.lr) == ("r2-me", 128, 1e-4)
    assert load_config([file]).config.data.val_size == 16


def test_verls_own_kind_of_interpolations_work_in_its_spelling(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(
        "data: {max_prompt_length: 100, max_response_length: 28}\n"
        "actor_rollout_ref:\n"
        "  rollout: {prompt_length: '${data.max_prompt_length}', n: 4, name: '???'}\n"
        "  actor: {rollout_n: '${oc.select:actor_rollout_ref.rollout.n,1}'}\n"
        "trainer: {project_name: p, experiment_name: e, default_local_dir: 'out/${trainer.project_name}/${.experiment_name}'}\n"
    )
    c = load_config([file]).config
    assert (c.data.max_prompt_length, c.rollout.n, c.trainer.run_dir) == (100, 4, "out/p/e")


def test_an_argument_may_interpolate_too():
    assert config("trainer.experiment_name=rank-${lora.rank}", "lora.rank=4").trainer.experiment_name == "rank-4"
    assert config("trainer.experiment_name=${lora.rank}").trainer.experiment_name == "8"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${data.train_batchsize}", "there is no key 'data.train_batchsize'; did you mean 'data.train_batch_size'?"),
        ("${oc.env:SURELY_NOT_SET}", "SURELY_NOT_SET"),
        ("${now:%Y}", "now"),
        ("${data.train_batch_size", "data.val_size"),
    ],
)
def test_an_interpolation_that_leads_nowhere_is_one_line_with_key_and_reason(tmp_path, value, message):
    file = tmp_path / "c.yaml"
    file.write_text(f"data:\n  val_size: '{value}'\n")
    with pytest.raises(ConfigError) as error:
        load_config([file])
    assert message in str(error.value) and "c.yaml" in str(error.value) and "\n" not in str(error.value)


def test_interpolations_in_a_circle_are_refused(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("rollout: {n: '${rollout.n_val}', n_val: '${rollout.n}'}\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: rollout\.n="):
        load_config([file])


def test_a_value_left_open_in_a_file_must_be_given(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: '???'}\n")
    with pytest.raises(ConfigError, match=r"model\.path=\?\?\?: this value is still to be given: model\.path=VALUE"):
        load_config([file])
    assert load_config([file], ["model.path=default"]).config.model.path == "default"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora.rank: 4\nlora: {rank: 8}\n", r"c\.yaml: lora\.rank is given twice, .* as 4 and 8; give one"),
        (
            "defaults: [ppo_trainer, _self_]\nlora: {rank: 4}\n",
            r"c\.yaml: defaults: Hydra's lists .*ppo_trainer.* --config",
        ),
    ],
)
def test_a_file_that_says_two_things_or_names_others_is_an_error(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config([tmp_path / "c.yaml"])


def test_a_file_that_is_no_file_and_a_list_of_itself(tmp_path):
    with pytest.raises(ConfigError, match="is no file"):
        load_config([tmp_path])
    (tmp_path / "c.yaml").write_text("defaults: [_self_]\nlora.rank: 4\nlora: {rank: 4}\n")
    assert load_config([tmp_path / "c.yaml"]).config.lora.rank == 4
