"""Every key maps, is explained or is refused; a mistake is one line that names source, key, value and the fix, before any model loads."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from rllm.config.aliases import ALIASES, NO_EFFECT, SPREAD
from rllm.config.load import leaves, load_config, reference, show_config, to_yaml
from rllm.config.schema import Config
from rllm.errors import ConfigError


def config(*overrides, **more):
    return load_config(overrides=overrides, **more).config


def test_the_three_lines_of_the_recipe_work_as_typed():
    lora = config(
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.model.target_modules=all-linear",
    ).lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 8, "all-linear")


def test_later_sources_win_and_provenance_says_where_each_value_came_from(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("optim:\n  lr: 1.0e-3\nlora: {rank: 4}\n")
    resolved = load_config([file], ["actor_rollout_ref.actor.optim.lr=1e-5"], defaults={"lora.rank": 2, "rollout.n": 6})
    c = resolved.config
    assert (c.optim.lr, c.lora.rank, c.rollout.n) == (1e-5, 4, 6)
    assert resolved.provenance["optim.lr"] == "argument (as actor_rollout_ref.actor.optim.lr)"
    assert resolved.provenance["lora.rank"] == str(file)
    text = show_config(resolved)
    assert "rollout.n=6" in text and "# example default" in text and "# default" in text


def test_dicts_configs_and_omegaconf_trees_are_all_taken():
    nested = {"lora": {"rank": 3}, "actor_rollout_ref": {"rollout": {"n": 5}}}
    for base in (nested, OmegaConf.create(nested), load_config(base=nested), load_config(base=nested).config):
        c = load_config(base=base).config
        assert (c.lora.rank, c.rollout.n) == (3, 5)


def test_what_is_written_reads_back_the_same(tmp_path):
    file = tmp_path / "c.yaml"
    resolved = load_config(overrides=["lora.target_modules=[q_proj,v_proj]", "optim.lr=1e-5"])
    file.write_text(to_yaml(resolved.config))
    assert load_config([file]).config == resolved.config


def test_verl_keys_without_effect_are_noted_once_with_the_reason():
    notes = load_config(
        overrides=[
            "trainer.nnodes=1",
            "actor_rollout_ref.actor.fsdp_config.param_offload=True",
            "trainer.nnodes=2",
            "critic.optim.lr=1",
        ]
    ).notes
    assert notes == [
        "trainer.nnodes, actor_rollout_ref.actor.fsdp_config.param_offload have no effect here: "
        "placement on several workers does not arise in one process",
        "critic.optim.lr has no effect here: no critic is trained with group-relative advantages",
    ]


def test_verl_forms_of_overrides_are_accepted_or_explained():
    assert config("+trainer.val_before_train=False").trainer.val_before_train is False
    with pytest.raises(ConfigError, match="keys cannot be removed"):
        config("~trainer.logger")


def test_one_key_that_sets_two_fields_sets_both():
    a = config("actor_rollout_ref.actor.clip_ratio=0.3").algorithm
    assert (a.clip_ratio_low, a.clip_ratio_high) == (0.3, 0.3)


def test_every_alias_names_a_field_that_exists_and_no_key_is_in_two_tables():
    known = {key for key, _ in leaves(Config)}
    assert set(ALIASES.values()) <= known and {f for fields in SPREAD.values() for f in fields} <= known
    assert not (known & set(ALIASES)) and not (set(ALIASES) & set(NO_EFFECT)) and not (known & set(NO_EFFECT))


def test_every_key_has_a_description():
    assert all(description for _, _, description in reference())


def test_two_spellings_with_different_values_are_an_error_naming_both():
    with pytest.raises(
        ConfigError, match=r"lora\.rank=4 and actor_rollout_ref\.model\.lora_rank=8 both set lora\.rank"
    ):
        config("lora.rank=4", "actor_rollout_ref.model.lora_rank=8")
    assert config("lora.rank=8", "actor_rollout_ref.model.lora_rank=8").lora.rank == 8


def test_a_learning_rate_for_full_finetuning_with_lora_gives_one_note_and_no_change():
    resolved = load_config(overrides=["optim.lr=1e-6"])
    assert resolved.config.optim.lr == 1e-6 and [n for n in resolved.notes if "10x" in n and "1e-05" in n]
    assert not load_config(overrides=["optim.lr=1e-6", "lora.rank=0"]).notes


MISTAKES = [
    ("lora.rnak=8", r"unknown key 'lora\.rnak'; did you mean 'lora\.rank'"),
    ("lora_rank=8", r"did you mean 'lora\.rank'"),
    ("actor_rollout_ref.model.lora_rnak=8", r"did you mean 'actor_rollout_ref\.model\.lora_rank'"),
    ("lr=3", r"did you mean 'optim\.lr'"),
    ("optim.learning_rate=1", r"unknown key 'optim\.learning_rate'"),
    ("trainer.loger=console", r"did you mean 'trainer\.logger'"),
    ("data.train_batchsize=4", r"did you mean 'data\.train_batch_size'"),
    ("rollout.temprature=1", r"did you mean 'rollout\.temperature'"),
    ("algorithm.adv_estimater=grpo", r"did you mean 'algorithm\.adv_estimator'"),
    ("model.pth=x", r"did you mean 'model\.path'"),
    ("gateway.prot=1", r"did you mean 'gateway\.port'"),
    ("lora.rank=-1", r"lora\.rank=-1: .*greater than or equal to 0"),
    ("lora.rank=1.5", r"lora\.rank=1\.5: .*whole number"),
    ("lora.rank=8x", r"lora\.rank=8x: .*whole number"),
    ("lora.rank=", r"lora\.rank=null"),
    ("actor_rollout_ref.model.lora_rank=-1", r"actor_rollout_ref\.model\.lora_rank=-1"),
    ("lora.alpha=0", r"lora\.alpha=0: .*greater than 0"),
    ("lora.alpha=big", r"lora\.alpha=big: .*number"),
    ("optim.lr=-1", r"optim\.lr=-1: .*greater than 0"),
    ("optim.lr=fast", r"optim\.lr=fast: .*number"),
    ("optim.beta1=1.5", r"optim\.beta1=1\.5: .*less than 1"),
    ("data.train_batch_size=0", r"data\.train_batch_size=0: .*greater than 0"),
    ("data.shuffle=perhaps", r"data\.shuffle=perhaps: .*true or false"),
    ("rollout.n=0", r"rollout\.n=0: .*greater than 0"),
    ("rollout.n=1", r"rollout\.n=1 with algorithm\.adv_estimator=grpo.*at least 2.*reinforce"),
    ("rollout.temperature=0", r"rollout\.temperature=0: greedy"),
    ("rollout.temperature=-1", r"rollout\.temperature=-1: .*greater than or equal to 0"),
    ("algorithm.adv_estimator=grop", r"did you mean 'grpo'"),
    ("algorithm.adv_estimator=gae", r"gae: it needs a critic.*available are grpo, dr_grpo"),
    ("algorithm.adv_estimator=remax", r"remax: it needs a greedy rollout more"),
    ("algorithm.adv_estimator=rlo", r"rlo: unknown \(did you mean 'rloo'\?\)"),
    ("algorithm.stepwise=per_turn", r"broadcast \| per_step"),
    ("algorithm.gamma=1.1", r"gamma=1\.1: .*less than or equal to 1"),
    ("algorithm.per_role={judge: grop}", r"per_role\.judge\.adv_estimator=grop: unknown \(did you mean 'grpo'"),
    ("algorithm.per_role.judge=gae", r"per_role\.judge\.adv_estimator=gae: it needs a critic"),
    ("algorithm.per_role.judge.los=gspo", r"unknown key 'algorithm\.per_role\.judge\.los'; did you mean 'loss'"),
    ("algorithm.per_role={judge: {loss: gpso}}", r"per_role\.judge\.loss=gpso: unknown \(did you mean 'gspo'"),
    ("algorithm.per_role={judge: {}}", r"per_role\.judge says nothing"),
    ("algorithm.per_role=judge", r"per_role=judge: .*mapping"),
    ("algorithm.grpo_std=pop", r"sample \| population \| none"),
    ("algorithm.loss=ppoclip", r"algorithm\.loss=ppoclip: unknown \(did you mean 'ppo_clip'"),
    ("algorithm.loss=clip_cov", r"algorithm\.loss=clip_cov: not built; available are ppo_clip"),
    ("algorithm.loss_agg_mode=seq-mean", r"loss_agg_mode=seq-mean: unknown .*available are token-mean"),
    ("algorithm.loss_scale_factor=0", r"greater than 0"),
    ("algorithm.loss_options={beta: 1}", r"loss_options\.beta: ppo_clip has no such option; it has none"),
    ("algorithm.clip_ratio_c=0.9", r"clip_ratio_c=0\.9: .*more than 1, or 0"),
    ("algorithm.kl_estimator=k4", r"kl_estimator=k4: .*k1 \| k2 \| k3"),
    ("algorithm.entropy_coeff=-1", r"greater than or equal to 0"),
    ("backend=tinkr", r"backend=tinkr: .*local"),
    ("model.dtype=fp16", r"auto \| float32 \| bfloat16"),
    ("gateway.port=70000", r"less than or equal to 65535"),
    ("trainer.logger=[mlflow]", r"mlflow: not built yet; available are console, tensorboard, wandb"),
    ("trainer.seed=-1", r"greater than or equal to 0"),
    ("trainer.total_steps=ten", r"trainer\.total_steps=ten"),
    ("foo", r"'foo': expected key=value"),
    ("=3", r"expected key=value"),
    ("~lora.rank", r"cannot be removed"),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_the_right_hint(override, message):
    with pytest.raises(ConfigError, match=message) as error:
        config(override)
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("lora:\n  rnak: 8\n")
    with pytest.raises(ConfigError, match=r"my\.yaml: unknown key 'lora\.rnak'; did you mean 'lora\.rank'"):
        load_config([file])
    file.write_text("lora: [")
    with pytest.raises(ConfigError, match=r"my\.yaml: not valid YAML"):
        load_config([file])
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"my\.yaml: found list"):
        load_config([file])
    with pytest.raises(ConfigError, match=r"'.*no\.yaml' does not exist"):
        load_config([tmp_path / "no.yaml"])


def test_loading_a_config_imports_no_torch():
    code = "import sys; from rllm.config.load import load_config; load_config(overrides=['lora.rank=4']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
