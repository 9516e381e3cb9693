"""Whole config trees of verl and rLLM: every key has a place here, and the keys that could change what is trained are never passed over."""

from collections import Counter
from pathlib import Path

import pytest

from rllm.config.aliases import ALIASES, NO_EFFECT, ONLY, SPREAD
from rllm.config.fate import MEGATRON_LORA, fate, foreign_keys
from rllm.config.foreign import TREE_NO_EFFECT, TREE_ONLY
from rllm.config.load import leaves, load_config
from rllm.config.schema import Config
from rllm.errors import ConfigError

HERE = Path(__file__).parent
OWN = {key for key, _ in leaves(Config)}
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))


def keys_of(name):
    return (HERE / name).read_text().split()


@pytest.mark.parametrize(("name", "least"), [("verl_0_9_1_keys.txt", 890), ("rllm_keys.txt", 100)])
def test_every_key_of_the_tree_sets_fields_or_has_a_reason(name, least):
    keys = keys_of(name)
    assert len(keys) >= least
    for key in keys:
        found = fate(key)
        assert key in OWN or found is not None, f"{key} is unknown"
        if key not in OWN:
            assert found is not None and (set(found.fields) <= OWN if found.fields else found.reason), key


def test_keys_that_no_tool_has_stay_unknown():
    for key in ("actor_rollout_ref.actor.ppo_mini_batch", f"{MODEL}.lora_rnak", "rllm.algoritm.kl_beta", "critics.x"):
        assert fate(key) is None and key not in OWN
        with pytest.raises(ConfigError, match="unknown key"):
            load_config(overrides=[f"{key}=1"])


def test_no_entry_is_there_twice_or_hides_a_field_or_belongs_to_nobody():
    tables = [ALIASES, SPREAD, ONLY, TREE_ONLY, NO_EFFECT, TREE_NO_EFFECT]
    times = Counter(key for table in (*tables, OWN) for key in table)
    assert [key for key, count in times.items() if count > 1] == []
    assert set(foreign_keys()) <= set(times)


def test_the_longest_group_that_holds_a_key_says_its_reason():
    found, other = fate(f"{ACTOR}.fsdp_config.model_dtype"), fate(f"{ACTOR}.fsdp_config.param_offload")
    assert found is not None and "model.dtype" in found.reason
    assert other is not None and "placement" in other.reason


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("custom_reward_function.path=my_reward.py", "write the function with @rllm.evaluator; allowed: null"),
        ("reward.reward_model.enable=True", "rewards come from the evaluator"),
        ("distillation.enabled=True", "distill.teacher or distill.base_url"),
        ("data.custom_cls.path=x.py", "give AgentTrainer(train_dataset=...)"),
        (f"{MODEL}.custom_chat_template=x", "the chat template is the one in model.path"),
        (f"{MODEL}.override_config={{num_hidden_layers:2}}", "config.json"),
        (f"{ROLLOUT}.do_sample=False", "greedy samples"),
        (f"{ACTOR}.optim.optimizer=Muon", "the optimizer is AdamW; allowed: AdamW | null"),
        (f"{MODEL}.lora.lora_B_init_method=xavier", "B starts as zero"),
        ("algorithm.use_pf_ppo=True", "not reweighted"),
        (f"{ACTOR}.optim.zero_indexed_step=False", "steps of the schedule count from 0"),
        ("algorithm.rollout_correction.capp=3", "unknown key 'algorithm.rollout_correction.capp'; did you mean"),
        ("rllm.rejection_sample.enabel=True", "unknown key 'rllm.rejection_sample.enabel'; did you mean"),
        ("algorithm.filter_groups.metrik=acc", "unknown key 'algorithm.filter_groups.metrik'; did you mean"),
        ("rllm.workflow.workflow_args.gamma=0.9", "not discounted"),
    ],
)
def test_what_would_change_what_is_trained_is_refused_with_the_reason(override, says):
    with pytest.raises(ConfigError) as error:
        load_config(overrides=[override])
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        (f"{ACTOR}.optim.betas=[0.8,0.95]", "optim.beta1", 0.8),
        (f"{ACTOR}.optim.betas=[0.8,0.99]", "optim.beta2", 0.99),
        (f"{ACTOR}.optim.clip_grad=0.5", "optim.grad_clip", 0.5),
        (f"{MODEL}.lora.dropout=0.1", "lora.dropout", 0.1),
        ("data.val_max_samples=32", "data.val_size", 32),
        ("data.val_max_samples=-1", "data.val_size", None),
        ("rllm.rejection_sample.filter_uniform_groups=False", "algorithm.zero_std", "keep"),
        ("rllm.rejection_sample.filter_uniform_groups=True", "algorithm.zero_std", "drop"),
        ("training.group_size=16", "rollout.n", 16),
        ("trainer.project_name=mine", "trainer.project_name", "mine"),
        ("rllm.trainer.project_name=mine", "trainer.project_name", "mine"),
        ("algorithm.rollout_correction.bypass_mode=True", "algorithm.old_logprobs", "sampler"),
        ("model.train_unembed=true", "lora.train_unembed", True),
    ],
)
def test_keys_that_mean_one_of_our_fields_set_it(override, field, value):
    section, name = field.split(".")
    assert getattr(getattr(load_config(overrides=[override]).config, section), name) == value


def test_betas_that_are_no_pair_are_refused():
    with pytest.raises(ConfigError, match=r"1 values; expected 2: optim\.beta1, optim\.beta2"):
        load_config(overrides=[f"{ACTOR}.optim.betas=[0.9]"])


def test_in_a_whole_tree_the_untouched_megatron_keys_do_not_fight_the_flat_ones():
    lora = {"rank": 0, "alpha": 32, "target_modules": MEGATRON_LORA[f"{MODEL}.lora.target_modules"][1]}
    tree = {
        "actor_rollout_ref": {"model": {"lora_rank": 8, "lora_alpha": 4, "target_modules": "all-linear", "lora": lora}}
    }
    found = load_config(base=tree).config.lora
    assert (found.rank, found.alpha, found.target_modules) == (8, 4, "all-linear")
    lora["rank"] = 16
    with pytest.raises(ConfigError, match=r"both set lora\.rank, differently"):
        load_config(base=tree)
    assert load_config(base={"actor_rollout_ref": {"model": {"lora": {"rank": 16}}}}).config.lora.rank == 16


def test_a_whole_tree_gives_one_note_and_not_hundreds():
    tree = {"critic": {f"key{i}": i for i in range(300)}, "trainer": {"nnodes": 1}}
    notes = load_config(base=tree).notes
    assert notes == ["301 keys of the given config, e.g. critic.key0, have no effect here (docs/verl_keys.md says why)"]


def test_epochs_that_are_asked_for_win_over_an_examples_own_steps():
    example = {"trainer.total_steps": 18}
    resolved = load_config(overrides=["trainer.total_epochs=3"], defaults=example)
    assert (resolved.config.trainer.total_steps, resolved.config.trainer.total_epochs) == (None, 3)
    assert resolved.notes == ["trainer.total_epochs=3: the example's own trainer.total_steps=18 is left out"]
    both = ["trainer.total_epochs=3", "trainer.total_training_steps=5"]
    assert load_config(overrides=both, defaults=example).config.trainer.total_steps == 5
    assert load_config(defaults=example).config.trainer.total_steps == 18


def test_one_number_for_both_betas_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.betas=0\.9: expected a list of 2: optim\.beta1, optim\.beta2"):
        load_config(overrides=[f"{ACTOR}.optim.betas=0.9"])


def test_verls_weight_of_the_kl_in_the_reward_is_told_by_its_own_name():
    on, coefficient = "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef"
    with pytest.raises(ConfigError, match=r"^argument: algorithm\.kl_ctrl\.kl_coef='abc': allowed: number$"):
        load_config(overrides=[on, f"{coefficient}=abc"])
    with pytest.raises(ConfigError, match=r"kl_in_reward=0\.2 and algorithm\.kl_ctrl\.kl_coef=0\.3 both set"):
        load_config(overrides=[on, "algorithm.kl_in_reward=0.2", f"{coefficient}=0.3"])
    assert load_config(overrides=[on, f"{coefficient}=0.3"]).config.algorithm.kl_in_reward == 0.3


def test_the_beta_of_dro_counts_where_one_role_alone_has_that_loss():
    key = f"{ACTOR}.policy_loss.dro_beta=0.3"
    role = load_config(overrides=[key, "algorithm.per_role={judge: {loss: dro}}"]).config.algorithm
    assert role.loss_options == {"beta": 0.3}
    assert load_config(overrides=[key]).config.algorithm.loss_options == {}


@pytest.mark.parametrize("form", ["algorithm.per_role={judge: %s}", "algorithm.per_role.judge.adv_estimator=%s"])
def test_a_role_may_be_given_what_verl_calls_an_estimator_or_a_loss(form):
    roles = load_config(
        overrides=[form % "reinforce++", "algorithm.per_role.solver.loss=vanilla"]
    ).config.algorithm.per_role
    assert roles["judge"].adv_estimator == "reinforce_plus_plus" and roles["solver"].loss == "ppo_clip"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("algorithm.loss=vanila", "ppo_clip"),
        ("algorithm.adv_estimator=GRPO", "grpo"),
        ("algorithm.per_role.a.loss=PPO-clip", "ppo_clip"),
    ],
)
def test_what_is_suggested_is_a_name_that_can_be_given(given, meant):
    with pytest.raises(ConfigError, match=rf"unknown \(did you mean '{meant}'\?\); available are"):
        load_config(overrides=[given])
