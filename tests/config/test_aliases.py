"""Other tools' spellings mean here what they mean there, or are refused: none changes its meaning silently."""

import pytest

from rllm.config.aliases import ALIASES, HINTS, NO_EFFECT, ONLY, SPREAD
from rllm.config.load import leaves, load_config
from rllm.config.schema import Config
from rllm.errors import ConfigError

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))

# A whole recipe in verl's words, as such scripts are written.
RECIPE = [
    "algorithm.adv_estimator=grpo",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "algorithm.use_kl_in_reward=False",
    "algorithm.norm_adv_by_std_in_grpo=True",
    "data.train_batch_size=16",
    "data.val_batch_size=512",
    "data.max_prompt_length=2048",
    "data.max_response_length=1024",
    f"{MODEL}.path=Qwen/Qwen3-0.6B",
    f"{MODEL}.lora_rank=32",
    f"{MODEL}.lora_alpha=8",
    f"{MODEL}.target_modules=all-linear",
    f"{MODEL}.exclude_modules=null",
    f"{MODEL}.use_remove_padding=True",
    f"{MODEL}.enable_gradient_checkpointing=True",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.mode=async",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.gpu_memory_utilization=0.8",
    f"{ROLLOUT}.temperature=0.6",
    f"{ROLLOUT}.top_p=1.0",
    f"{ROLLOUT}.top_k=-1",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.val_kwargs.n=1",
    f"{ROLLOUT}.val_kwargs.temperature=0.7",
    f"{ROLLOUT}.load_format=safetensors",
    f"{ACTOR}.optim.lr=1e-5",
    f"{ACTOR}.loss_agg_mode=token-mean",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_mini_batch_size=64",
    f"{ACTOR}.use_kl_loss=False",
    f"{ACTOR}.kl_loss_coef=0.001",
    f"{ACTOR}.kl_loss_type=low_var_kl",
    f"{ACTOR}.clip_ratio=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.grad_clip=1.0",
    f"{ACTOR}.entropy_coeff=0",
    f"{ACTOR}.fsdp_config.param_offload=True",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "actor_rollout_ref.hybrid_engine=True",
    "rllm.workflow.use_workflow=True",
    "rllm.stepwise_advantage.enable=True",
    "rllm.stepwise_advantage.mode=per_step",
    "rllm.mask_truncated_samples=False",
    "trainer.critic_warmup=0",
    "trainer.logger=['console']",
    "trainer.project_name=solver-judge",
    "trainer.experiment_name=lora",
    "trainer.val_before_train=True",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=-1",
    "trainer.test_freq=10",
    "trainer.total_epochs=100",
    "trainer.total_training_steps=150",
    "trainer.default_local_dir=checkpoints",
]


def config(*overrides, **more):
    return load_config(overrides=overrides, **more).config


def test_a_whole_recipe_in_verls_words_is_taken_with_the_meaning_it_has_there():
    resolved = load_config(overrides=RECIPE)
    c = resolved.config
    assert (c.model.path, c.lora.rank, c.lora.alpha, c.lora.exclude_modules) == ("Qwen/Qwen3-0.6B", 32, 8, None)
    assert (c.rollout.n, c.rollout.n_val, c.rollout.temperature, c.rollout.val_temperature) == (4, 1, 0.6, 0.7)
    assert (c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high, c.algorithm.kl_beta) == (0.2, 0.28, 0.0)
    assert (c.trainer.total_steps, c.trainer.save_freq, c.trainer.test_freq) == (150, 0, 10)
    assert (c.optim.lr, c.algorithm.grpo_std, c.trainer.run_dir) == (1e-5, "sample", "checkpoints")
    assert any("trainer.n_gpus_per_node" in note and "no effect here: placement" in note for note in resolved.notes)


def test_lora_is_on_unless_the_rank_is_given_whatever_the_spelling():
    assert config(f"{MODEL}.lora_alpha=8").lora.rank == 8
    assert config(f"{MODEL}.lora_rank=0").lora.rank == 0


@pytest.mark.parametrize("order", [1, -1])
def test_a_key_for_one_clip_bound_wins_over_the_key_for_both_in_any_order(order):
    a = config(*["rllm.algorithm.eps_clip=0.1", "rllm.algorithm.eps_clip_high=0.3"][::order]).algorithm
    assert (a.clip_ratio_low, a.clip_ratio_high) == (0.1, 0.3)


def test_the_kl_switch_and_the_kl_weight_together_say_one_thing():
    off = config(f"{ACTOR}.use_kl_loss=False", f"{ACTOR}.kl_loss_coef=0.5")
    assert off.algorithm.kl_beta == 0
    for on, beta in ((["use_kl_loss=True"], 0.001), (["use_kl_loss=True", "kl_loss_coef=0.5"], 0.5)):
        assert config(*(f"{ACTOR}.{text}" for text in on)).algorithm.kl_beta == beta
    with pytest.raises(ConfigError, match="allowed are true and false"):
        config(f"{ACTOR}.use_kl_loss=perhaps")


def test_a_kl_switch_on_the_command_line_wins_over_a_weight_in_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("algorithm: {kl_beta: 0.1}\n")
    assert load_config([file], [f"{ACTOR}.use_kl_loss=False"]).config.algorithm.kl_beta == 0
    file.write_text(f"{ACTOR}.use_kl_loss: false\n")
    assert load_config([file], ["algorithm.kl_beta=0.1"]).config.algorithm.kl_beta == 0.1


@pytest.mark.parametrize(
    ("overrides", "weight"),
    [
        (["algorithm.use_kl_in_reward=True"], 0.001),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.05"], 0.05),
        (["algorithm.kl_ctrl.kl_coef=0.05", "algorithm.use_kl_in_reward=True"], 0.05),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_in_reward=0.2"], 0.2),
        (["algorithm.use_kl_in_reward=False", "algorithm.kl_ctrl.kl_coef=0.05"], 0.0),
        (["algorithm.kl_ctrl.kl_coef=0.05"], 0.0),
    ],
)
def test_the_kl_of_the_reward_is_on_where_verl_has_it_on(overrides, weight):
    assert config(*overrides).algorithm.kl_in_reward == weight
    assert config(*overrides).algorithm.kl_beta == 0


def test_the_update_is_set_in_verls_and_rllms_words_too():
    c = config(
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.optim.lr_warmup_steps=-1",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        f"{ACTOR}.optim.warmup_style=null",
        f"{ACTOR}.optim.min_lr_ratio=0.2",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_threshold=3.0",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.max_num_gen_batches=0",
        "rllm.compact_filtering.enable=True",
        "rllm.compact_filtering.mask_unknown=True",
        "rllm.compact_filtering.mask_error=True",
        "rllm.mask_truncated_samples=True",
    )
    a = c.algorithm
    assert (a.mini_batch_size, a.ppo_epochs, a.mask_truncated) == (4, 2, True)
    assert (a.rollout_correction.level, a.rollout_correction.cap) == ("sequence", 3.0)
    assert (a.rejection_sampling.enable, a.rejection_sampling.max_batches) == (True, 0)
    assert a.filter.enable and a.filter.unknown and a.filter.max_turns_exceeded and not a.filter.env_done
    assert (c.optim.warmup_steps, c.optim.warmup_ratio) == (None, 0.1)
    assert (c.optim.schedule, c.optim.min_lr_ratio) == ("cosine", 0.2)
    rllm_words = config("rllm.algorithm.warmup_steps=5", "rllm.algorithm.lr_schedule=linear").optim
    assert (rllm_words.warmup_steps, rllm_words.schedule) == (5, "linear")
    tis = config(
        "rllm.algorithm.rollout_correction.tis_mode=token", "rllm.algorithm.rollout_correction.tis_cap=5"
    ).algorithm
    assert (tis.rollout_correction.level, tis.rollout_correction.cap) == ("token", 5)


@pytest.mark.parametrize("prefix", ["", "rllm."])
def test_bypassing_the_trainers_logprobs_means_the_samplers(prefix):
    def chosen(value):
        return config(f"{prefix}algorithm.rollout_correction.bypass_mode={value}").algorithm.old_logprobs

    assert [chosen(value) for value in ("true", "false", "null")] == ["sampler", "auto", "auto"]


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("trainer.test_freq=-1", ("trainer", "test_freq", 0)),
        ("trainer.save_freq=-1", ("trainer", "save_freq", 0)),
        ("rllm.trainer.total_batches=-1", ("trainer", "total_steps", None)),
        ("rllm.algorithm.loss_agg_mode=null", ("algorithm", "loss_agg_mode", "token-mean")),
        ("rllm.algorithm.loss_fn=null", ("algorithm", "loss", "ppo_clip")),
        ("rllm.algorithm.eps_clip_high=null", ("algorithm", "clip_ratio_high", 0.2)),
        ("algorithm.norm_adv_by_std_in_grpo=False", ("algorithm", "grpo_std", "none")),
    ],
)
def test_other_tools_words_for_off_and_default_are_understood(override, found):
    section, name, value = found
    assert getattr(getattr(config(override), section), name) == value


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        (f"{ACTOR}.clip_ratio_c=10", "clip_ratio_c", 10),
        (f"{ACTOR}.entropy_coeff=0.01", "entropy_coeff", 0.01),
        (f"{ACTOR}.kl_loss_type=low_var_kl", "kl_estimator", "k3"),
        (f"{ACTOR}.kl_loss_type=low_var_kl+", "kl_estimator", "k3+"),
        (f"{ACTOR}.kl_loss_type=kl", "kl_estimator", "k1"),
        (f"{ACTOR}.kl_loss_type=mse", "kl_estimator", "k2"),
        (f"{ACTOR}.policy_loss.loss_mode=vanilla", "loss", "ppo_clip"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "loss", "gspo"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "loss_agg_mode", "seq-mean-token-sum-norm"),
        (f"{ACTOR}.loss_scale_factor=1024", "loss_scale_factor", 1024),
        ("algorithm.loss_agg_mode=sum-norm", "loss_agg_mode", "seq-mean-token-sum-norm"),
        ("algorithm.adv_estimator=reinforce++-baseline", "adv_estimator", "reinforce_plus_plus_baseline"),
        ("rllm.algorithm.adv_estimator=reinforce++", "adv_estimator", "reinforce_plus_plus"),
        ("rllm.algorithm.loss_fn=ppo", "loss", "ppo_clip"),
        ("rllm.algorithm.use_precomputed_advantage=True", "adv_estimator", "precomputed"),
        ("rllm.algorithm.use_precomputed_advantage=False", "adv_estimator", "grpo"),
    ],
)
def test_verls_words_for_the_algorithm_are_ours(override, field, value):
    assert getattr(config(override).algorithm, field) == value


def test_stepwise_advantages_need_their_switch_as_in_rllm():
    on, off, mode = ("rllm.stepwise_advantage." + text for text in ("enable=True", "enable=False", "mode=per_step"))
    assert config(on, mode).algorithm.stepwise == "per_step"
    assert config(mode, off).algorithm.stepwise == config(off, mode).algorithm.stepwise == "broadcast"
    assert config(on).algorithm.stepwise == "broadcast"
    with pytest.raises(ConfigError, match="allowed are true and false"):
        config("rllm.stepwise_advantage.enable=perhaps")


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("rllm.rejection_sample.multiplier=2", "1"),
        ("rllm.compact_filtering.mask_error=False", "true"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "null"),
        (f"{ROLLOUT}.top_k=20", "-1 | 0 | null"),
        (f"{MODEL}.lora.type=dora", "lora"),
    ],
)
def test_what_would_change_training_there_and_is_not_built_here_is_refused(override, allowed):
    with pytest.raises(ConfigError) as error:
        config(override)
    assert "not built yet" in str(error.value) and str(error.value).endswith(f"allowed: {allowed}")


def test_tables_do_not_overlap_and_every_hint_names_a_field():
    tables = [set(ALIASES), set(SPREAD), set(NO_EFFECT), set(ONLY)]
    fields = {key for key, _ in leaves(Config)}
    assert sum(map(len, tables)) == len(set().union(*tables)) and not fields & set().union(*tables)
    assert set(HINTS.values()) <= fields


def test_a_rank_that_vllm_cannot_serve_is_refused_where_the_script_names_vllm():
    script = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.lora_rank=1024"]
    with pytest.raises(
        ConfigError, match=r"lora.rank=1024: vLLM serves ranks up to 512 .*rollout.name=vllm; lower the rank"
    ):
        load_config(overrides=script)
    with pytest.raises(ConfigError, match=r"lora.per_role.judge.rank=600: vLLM serves"):
        load_config(overrides=[script[0], "lora.per_role.judge.rank=600"])
    assert load_config(overrides=script[1:]).config.lora.rank == 1024
    assert load_config(overrides=[script[0], "lora.rank=512"]).config.lora.rank == 512


def test_a_verl_script_without_a_rank_is_told_which_default_applies():
    def told(*overrides):
        return any("verl's default is 0, full fine-tuning" in note for note in load_config(overrides=overrides).notes)

    assert told("actor_rollout_ref.actor.optim.lr=1e-4")
    assert not told("optim.lr=1e-4")
    assert not told("actor_rollout_ref.model.lora_rank=8")
    full = load_config(overrides=["actor_rollout_ref.model.lora_rank=0"])
    assert full.config.lora.rank == 0 and full.config.lora.adapters() == {}


@pytest.mark.parametrize(
    "typed, also, field",
    [
        (f"{ACTOR}.use_kl_loss=false", "algorithm.kl_beta=0.1", "algorithm.kl_beta"),
        ("rllm.stepwise_advantage.enable=false", "algorithm.stepwise=per_step", "algorithm.stepwise"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.grpo_std=sample", "algorithm.grpo_std"),
    ],
)
def test_two_spellings_that_disagree_are_told_as_they_were_given(typed, also, field):
    with pytest.raises(ConfigError) as error:
        load_config(overrides=[typed, also])
    assert str(error.value) == f"argument: {typed} and {also} both set {field}, differently; give one"
