"""What a typed value becomes, what no field accepts, and what a config remembers of its origins."""

import re

import pytest

from rllm.algorithms import advantages, losses
from rllm.algorithms.spec import LossSpec, loss_of
from rllm.backends.base import CAPABILITIES
from rllm.config.explain import nearest_key
from rllm.config.load import check, leaves, load_config, load_model, show_config, to_yaml
from rllm.config.names import AGGREGATIONS, ESTIMATORS, LOSSES
from rllm.config.schema import Config
from rllm.errors import ConfigError
from rllm.trainer import loss_spec

FIELDS = [key for key, _ in leaves(Config)]


def config(*overrides, **more):
    return load_config(overrides=overrides, **more).config


@pytest.mark.parametrize("text", ["2026", "1e5", "2026-12-01", "on", "12:30", "007", "null-model"])
def test_a_name_is_what_was_typed_however_yaml_would_read_it(text):
    assert config(f"trainer.experiment_name={text}").trainer.experiment_name == text


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1E-5", 1e-5), (".5", 0.5), ("3", 3.0)])
def test_numbers_are_read_as_people_write_them(text, value):
    assert config(f"optim.lr={text}").optim.lr == value


def test_all_linear_is_one_word_and_a_list_is_a_list_of_names():
    assert config("lora.target_modules=all-linear").lora.target_modules == "all-linear"
    assert config("lora.target_modules=[q_proj,v_proj]").lora.target_modules == ["q_proj", "v_proj"]
    assert config(r"lora.target_modules=.*\.(q|v)_proj").lora.target_modules == r".*\.(q|v)_proj"


def test_a_section_may_be_given_as_a_mapping_or_left_empty_in_a_file(tmp_path):
    assert config("lora={rank: 4, alpha: 2}").lora.rank == 4
    file = tmp_path / "c.yaml"
    file.write_text("lora:\n#  rank: 4\noptim: {lr: 1.0e-4}\n")
    assert load_config([file]).config.optim.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('lora.target_modules=["all-linear"]', "all-linear stands alone: write target_modules=all-linear"),
        ("lora.target_modules=[all-linear,q_proj]", "all-linear stands alone"),
        ("lora.target_modules=[]", "an empty list trains nothing"),
        ("lora.target_modules=['']", "an empty name matches nothing"),
        ("lora.target_modules=q_proj|(", "not a valid regular expression"),
        ("lora.target_modules=*q_proj", "not a valid regular expression"),
        ("lora.exclude_modules=[5]", "valid string"),
        ("lora.target_modules=5", "valid string"),
        ("lora.rank=true", "true and false have no meaning here; allowed: whole number"),
        ("optim.lr=true", "true and false have no meaning here"),
        ("lora.alpha=.inf", "finite number"),
        ("optim.lr=nan", "finite number"),
        ("optim.lr=inf", "finite number"),
        ("lora.rank=5000", "less than or equal to 4096"),
        ("lora=5", "lora is a section, not a value; its keys are lora.rank, lora.alpha"),
        ("lora.rank.x=5", "did you mean 'lora.rank'?"),
        ("model.path=null", "allowed: text"),
        ("model.path=[a,b]", "allowed: text"),
        ("model.device=tpu", "auto | cpu | cuda | cuda:N"),
        ("trainer.test_freq=-2", "greater than or equal to 0"),
        ("rollout.max_failed_fraction=2", "less than or equal to 1"),
        ("lora.zzz=0.1", "unknown key 'lora.zzz'; lora has lora.rank"),
        ("zzz=1", "unknown key 'zzz'; sections are model, lora, data"),
        ("actor_rollout_ref.model.lora_rank=x", "actor_rollout_ref.model.lora_rank=x: input should be a valid integer"),
        ("actor_rollout_ref.actor.ppo_mini_batch=3", "did you mean 'actor_rollout_ref.actor.ppo_mini_batch_size'?"),
    ],
)
def test_a_value_nothing_can_be_done_with_is_told_with_source_key_and_fix(override, message):
    with pytest.raises(ConfigError) as error:
        config(override)
    assert message in str(error.value) and str(error.value).startswith("argument: ")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rank", "lora.rank"),
        ("lora_alpha", "lora.alpha"),
        ("lora.r", "lora.rank"),
        ("Lora.Rank", "lora.rank"),
        ("loar.rank", "lora.rank"),
        ("model.lora_rank", "lora.rank"),
        ("lora.target-modules", "lora.target_modules"),
        ("learning_rate", "optim.lr"),
        ("optimizer.lr", "optim.lr"),
        ("trainer.learning_rate", "optim.lr"),
        ("optim.clip", "optim.grad_clip"),
        ("batch_size", "data.train_batch_size"),
        ("data.batch_size", "data.train_batch_size"),
        ("group_size", "rollout.n"),
        ("rollout.n_vals", "rollout.n_val"),
        ("trainer.max_steps", "trainer.total_steps"),
        ("trainer.totalsteps", "trainer.total_steps"),
        ("trainer.val_freq", "trainer.test_freq"),
        ("trainer.epochs", "trainer.total_epochs"),
        ("trainer.log", "trainer.logger"),
        ("trainer.wandb", None),
        ("optim.learningrate", "optim.lr"),
        ("temperature", "rollout.temperature"),
        ("max_response_length", "data.max_response_length"),
        ("rollout.max_response_length", "data.max_response_length"),
        ("model", "model.path"),
        ("model.name", "model.path"),
        ("gateway.hots", "gateway.host"),
        ("backnd", "backend"),
        ("xyzzy.plugh", None),
    ],
)
def test_a_misspelt_key_gets_the_key_that_was_meant(key, meant):
    assert nearest_key(key, FIELDS, ()) == meant


def test_checks_between_fields_name_where_the_value_came_from(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("rollout: {n: 1}\n")
    with pytest.raises(ConfigError, match=r"^\S*c\.yaml: rollout\.n=1 with algorithm\.adv_estimator=grpo"):
        load_config([file])
    assert load_config([file], ["algorithm.adv_estimator=reinforce"]).config.rollout.n == 1


def test_what_only_training_needs_is_asked_only_of_training():
    greedy = ["rollout.n=1", "rollout.temperature=0"]
    assert config(*greedy, training=False).rollout.temperature == 0
    assert config(*greedy, "trainer.val_only=true").rollout.n == 1
    with pytest.raises(ConfigError):
        config(*greedy)


def test_every_choice_that_passes_the_check_is_one_that_the_default_backend_can_do():
    assert set(LOSSES) <= CAPABILITIES["local"].losses
    for capabilities in CAPABILITIES.values():  # a table that names what is no loss at all would refuse nothing
        assert capabilities.losses <= set(LOSSES)
    for key, names in (("adv_estimator", ESTIMATORS), ("loss", LOSSES), ("loss_agg_mode", AGGREGATIONS)):
        for name in names:
            check(load_model(Config, overrides=[f"algorithm.{key}={name}"]).config)


def test_the_names_in_the_config_are_those_of_the_functions():
    assert set(ESTIMATORS) == {*advantages.ESTIMATORS, "precomputed"}
    assert set(LOSSES) == set(losses.LOSSES)
    for mode in AGGREGATIONS:
        assert losses.token_weights(LossSpec(aggregation=mode, norm=8.0), [1, 2])[0] > 0


def test_roles_have_their_own_estimator_and_loss_in_short_and_long_form():
    c = config("algorithm.per_role.judge=reinforce", "algorithm.per_role.solver.loss=gspo", "algorithm.kl_estimator=k2")
    assert {r: (own.adv_estimator, own.loss) for r, own in c.algorithm.per_role.items()} == {
        "judge": ("reinforce", None),
        "solver": (None, "gspo"),
    }
    spec = loss_spec(c)
    assert (loss_of(spec, "solver").name, loss_of(spec, "judge").name) == ("gspo", "ppo_clip")
    assert {loss_of(spec, role).kl_estimator for role in ("solver", "judge")} == {"k2"}
    assert config("algorithm.per_role={judge: {adv_estimator: rloo, loss: gspo}}") == config(
        "algorithm.per_role.judge.adv_estimator=rloo", "algorithm.per_role.judge.loss=gspo"
    )


def test_the_constant_of_sum_norm_is_given_or_the_most_tokens_of_a_completion():
    assert loss_of(loss_spec(config("data.max_response_length=100")), "").norm == 100
    assert loss_of(loss_spec(config("data.max_response_length=100", "rollout.max_tokens=50")), "").norm == 50
    assert loss_of(loss_spec(config("algorithm.loss_scale_factor=7")), "").norm == 7


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["algorithm.adv_estimator=dr_grpo"], "seq-mean-token-sum-norm"),
        (["algorithm.loss=gspo"], "3e-4 and 4e-4"),
        (["algorithm.gamma=0.9"], "gamma=0.9 has no effect with algorithm.stepwise=broadcast"),
    ],
)
def test_settings_that_do_not_fit_each_other_give_a_note(overrides, note):
    assert any(note in line for line in load_config(overrides=overrides).notes)


def test_a_group_of_one_is_allowed_where_nothing_is_compared_inside_a_group():
    for estimator in ("reinforce", "reinforce_plus_plus", "prpo", "precomputed"):
        assert config("rollout.n=1", f"algorithm.adv_estimator={estimator}").rollout.n == 1
    for estimator in ("rloo", "opo", "dr_grpo", "reinforce_plus_plus_baseline"):
        with pytest.raises(ConfigError, match=f"rollout.n=1 with algorithm.adv_estimator={estimator}.*reinforce"):
            config("rollout.n=1", f"algorithm.adv_estimator={estimator}")


def test_a_large_batch_with_lora_gives_one_note_also_when_resolved_twice():
    once = load_config(overrides=["data.train_batch_size=128", "trainer.nnodes=1"])
    twice = load_config(base=once)
    assert len(once.notes) == 2 and sorted(twice.notes) == sorted(once.notes)


def test_a_config_given_as_an_object_keeps_what_is_known_of_its_origins():
    first = load_config(overrides=["lora.rank=4"], defaults={"rollout.n": 6})
    again = load_config(base=first, overrides=["optim.lr=1e-4"])
    assert again.provenance == {"lora.rank": "argument", "rollout.n": "example default", "optim.lr": "argument"}
    changed = first.config.model_copy(deep=True)
    changed.trainer.seed = 3
    assert set(load_config(base=changed).provenance) == {"lora.rank", "rollout.n", "trainer.seed"}


def test_a_config_cannot_be_changed_into_something_invalid_later():
    c = config()
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        c.lora.rank = -1


def test_show_config_has_a_line_for_every_key_and_every_note():
    resolved = load_config(overrides=["trainer.nnodes=2", "optim.lr=1e-6"])
    lines = show_config(resolved).splitlines()
    assert len(lines) == len(FIELDS) + 2 and sum(line.startswith("# note: ") for line in lines) == 2


def test_defaults_of_an_example_may_be_nested_and_a_wrong_one_says_whose_it_is():
    assert config(defaults={"lora": {"rank": 2}}).lora.rank == 2
    with pytest.raises(ConfigError, match=r"^example default: unknown key 'lora\.rnk'"):
        config(defaults={"lora.rnk": 2})


def test_a_config_that_is_no_config_is_refused():
    with pytest.raises(ConfigError, match="found list; give a dict"):
        load_config(base=[1])


def test_a_file_that_gives_a_key_twice_is_refused(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("lora: {rank: 4}\nlora: {rank: 8}\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: not valid YAML: .*duplicate key"):
        load_config([file])


def test_roles_take_what_they_do_not_say_from_the_shared_settings_and_survive_a_file(tmp_path):
    roles = ["lora.rank=4", "lora.rank_pattern.q_proj=2", "lora.per_role.solver.rank=16", "lora.per_role.judge={}"]
    config = load_config(overrides=roles).config
    solver, judge = (config.lora.adapters()[role] for role in ("solver", "judge"))
    assert (solver.rank, judge.rank, solver.rank_pattern) == (16, 4, {"q_proj": 2})
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    assert load_config([file]).config == config
    assert load_config([file], ["lora.per_role=shared"]).config.lora.adapters().keys() == {"default"}
    assert load_config([file], ["lora.per_role.judge.rank=2"]).config.lora.adapters()["judge"].rank == 2
    inline = load_config(overrides=["lora.per_role={solver: {alpha: 3}, judge: {}}"]).config.lora.adapters()
    assert (inline["solver"].alpha, inline["judge"].alpha) == (3, 16)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.per_role.solver.rnk=8", "unknown key 'lora.per_role.solver.rnk'; did you mean 'rank'?"),
        ("lora.per_role={solver: {rank: 0}}", "lora.per_role.solver: rank 0 is full fine-tuning"),
        ("lora.per_role={}", "lora.per_role names no role"),
        ("lora.per_role=sharde", "lora.per_role=sharde: input should be 'shared'"),
        ("lora.per_role.base={}", "'base' cannot be the name of an adapter"),
        ("lora.per_role.solver.rank=x", "lora.per_role.solver.rank=x: input should be a valid integer"),
        ("lora.use_dora=true", "DoRA is not built yet"),
        ("lora.rank_pattern.q_proj=0", "lora.rank_pattern.q_proj=0: input should be greater than 0"),
        ("lora.rank_pattern={'(': 3}", "'(' is not a valid regular expression"),
        ("lora.dropout=1", "lora.dropout=1: input should be less than 1"),
        ("lora.alpha=0", "lora.alpha=0: input should be greater than 0"),
    ],
)
def test_adapter_settings_that_mean_nothing_are_told_with_the_key(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(overrides=[override])
