"""Our config as overrides of verl's, and what is refused before anything starts."""

import json
import math

import pytest

from rllm.backends.base import refuse_impossible
from rllm.backends.verl.render import (
    ACTOR,
    LOAD_FORMAT,
    MERGE,
    MODEL,
    ROLLOUT,
    hydra_value,
    parameters_of,
    positions_of,
    render,
)
from rllm.config.load import load_config
from rllm.errors import ConfigError


def resolved(*overrides):
    return load_config(overrides=["backend=verl", *overrides])


def rendered(*overrides, parameters=0.6e9):
    return render(resolved(*overrides).config, "/models/m", 7, "/runs/r", parameters)


def test_lora_settings_go_under_the_names_that_the_fsdp_engine_reads():
    values = rendered(
        "lora.rank=32", "lora.alpha=64", "lora.target_modules=[q_proj,v_proj]", "lora.exclude_modules=.*5.*"
    ).values
    assert values[f"{MODEL}.lora_rank"] == 32
    assert values[f"{MODEL}.lora_alpha"] == 64
    assert values[f"{MODEL}.target_modules"] == ["q_proj", "v_proj"]
    assert values[f"{MODEL}.exclude_modules"] == ".*5.*"
    assert f"{MODEL}.lora.rank" not in values


def test_an_initial_adapter_is_given_together_with_its_rank(tmp_path):
    values = rendered(f"lora.adapter_path={tmp_path}").values
    assert values[f"{MODEL}.lora_adapter_path"] == str(tmp_path)
    assert values[f"{MODEL}.lora_rank"] == 8


def test_without_flash_attention_the_slower_way_is_taken_and_told_unless_the_user_says_how():
    attention = f"{MODEL}.override_config.attn_implementation"
    config = resolved().config
    with_it = render(config, "/m", 7, "/r", 1e9)
    assert with_it.values[f"{MODEL}.use_remove_padding"] is True and f"+{attention}" not in with_it.values
    without = render(config, "/m", 7, "/r", 1e9, flash_attention=False)
    assert without.values[f"{MODEL}.use_remove_padding"] is False and without.values[f"+{attention}"] == "sdpa"
    assert any("FlashAttention is not installed" in note for note in without.notes)
    own = resolved(f"verl.+{attention}=eager").config
    assert render(own, "/m", 7, "/r", 1e9, flash_attention=False).values[f"+{attention}"] == "eager"


def test_sequences_are_no_longer_than_the_model_has_positions(tmp_path):
    limits = ("data.max_prompt_length=900", "data.max_response_length=300")
    longest = f"{ROLLOUT}.max_model_len"
    for positions, expected in ((None, 1200), (4096, 1200), (1024, 1024)):
        assert render(resolved(*limits).config, "/m", 7, "/r", positions=positions).values[longest] == expected
    own = resolved(*limits, "model.max_model_len=1100", "model.path=small").config
    assert render(own, "/m", 7, "/r", positions=1100).values[longest] == 1100
    with pytest.raises(ConfigError, match=r"model.max_model_len=1100: small can do at most 1024 tokens"):
        render(own, "/m", 7, "/r", positions=1024)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 1024}}))
    assert positions_of(tmp_path) == 1024
    assert positions_of(tmp_path / "none") is None


def test_full_fine_tuning_renders_no_adapter():
    assert not any("lora" in key for key in rendered("lora.rank=0").values)


@pytest.mark.parametrize(
    ("parameters", "merged"), [(0.6e9, True), (8e9, True), (14e9, False), (math.inf, False), (None, True)]
)
def test_small_dense_models_are_merged_by_default_and_the_reason_is_told(parameters, merged):
    done = rendered(parameters=parameters)
    assert done.values[MERGE] is merged
    assert len(done.notes) == 1 and f"{MERGE}={'true' if merged else 'false'}" in done.notes[0]


def test_adapter_mode_sets_what_it_needs_and_tells_the_rank_that_vllm_reserves():
    done = rendered(f"{MERGE}=false", "lora.rank=24")
    assert done.values[MERGE] is False
    assert done.values[LOAD_FORMAT] == "safetensors"
    assert done.values[f"{ROLLOUT}.layered_summon"] is True
    assert done.values[f"{ROLLOUT}.enforce_eager"] is False
    assert "reserves rank 32 for rank 24" in done.notes[0]


def test_dummy_weights_are_refused_in_adapter_mode():
    with pytest.raises(ConfigError, match="vLLM must load the base itself"):
        rendered(f"{MERGE}=false", f"{LOAD_FORMAT}=dummy")


def test_verls_own_keys_pass_through_untouched_and_win():
    found = resolved(
        "trainer.nnodes=4", f"{ROLLOUT}.gpu_memory_utilization=0.8", f"{ROLLOUT}.tensor_model_parallel_size=4"
    )
    assert found.config.verl == {
        "trainer.nnodes": 4,
        f"{ROLLOUT}.gpu_memory_utilization": 0.8,
        f"{ROLLOUT}.tensor_model_parallel_size": 4,
    }
    assert not any("no effect" in note for note in found.notes)
    values = render(found.config, "/m", 7, "/r").values
    assert (values["trainer.nnodes"], values[f"{ROLLOUT}.tensor_model_parallel_size"]) == (4, 4)


def test_a_config_file_may_nest_verls_keys_under_verl(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("backend: verl\nverl: {trainer: {nnodes: 3}}\n")
    assert load_config([file]).config.verl == {"trainer.nnodes": 3}


def test_keys_with_a_name_of_ours_reach_verl_through_it():
    found = resolved("actor_rollout_ref.actor.optim.lr=3e-5", f"{ROLLOUT}.n=6")
    assert found.config.verl == {}
    values = render(found.config, "/m", 7, "/r").values
    assert (values["actor_rollout_ref.actor.optim.lr"], values[f"{ROLLOUT}.n"]) == (3e-5, 6)


def test_megatrons_spelling_of_the_rank_reaches_fsdp_under_its_own():
    values = rendered(f"{MODEL}.lora.rank=4").values
    assert values[f"{MODEL}.lora_rank"] == 4
    assert f"{MODEL}.lora.rank" not in values


def test_a_misspelt_key_of_ours_is_still_an_error():
    with pytest.raises(ConfigError, match=r"trainer\.total_steps"):
        resolved("trainer.total_stepz=3")


@pytest.mark.parametrize(("more", "training"), [([], True), (["trainer.val_only=true"], True), ([], False)])
def test_without_the_verl_backend_its_keys_are_refused_by_name(more, training):
    found = load_config(overrides=["verl.trainer.nnodes=2", *more])
    with pytest.raises(ConfigError, match="add backend=verl"):
        refuse_impossible(found.config, found.provenance, training=training)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("lora.rank=513", "ranks go up to 512"),
        ("lora.alpha=7.5", "whole numbers"),
        ("lora.rank_pattern={q_proj: 4}", "lora.rank_pattern"),
        ("lora.dropout=0.1", "lora.dropout"),
        ("lora.per_role={solver: {}, judge: {}}", "one adapter"),
        ("optim.schedule=linear", "constant and cosine"),
        ("algorithm.loss=dro", "cispo, gspo, ppo_clip"),
        ("algorithm.kl_in_reward=0.01", "algorithm.kl_beta"),
        ("algorithm.rejection_sampling.enable=true", "as it is sampled"),
        ("algorithm.rollout_correction.level=token", "rollout correction"),
        ("algorithm.old_logprobs=sampler", "proof of each publish"),
        ("algorithm.per_role={judge: {loss: gspo}}", "share one loss"),
        ("trainer.early_stop.metric=val/x/y trainer.test_freq=1", "last step"),
        ("model.device=cpu", "it can do auto, cuda"),
        ("trainer.v1.trainer_mode=colocate_async", "in turn"),
        ("trainer.v1.sampler.sync_refill_failed_groups=true", "rows itself"),
        (f"{ROLLOUT}.calculate_log_probs=false", "proof of each publish"),
        (f"{ACTOR}.strategy=megatron", "FSDP2"),
        ("model_engine=megatron", "FSDP"),
        ("actor_rollout_ref.hybrid_engine=false", "in turn"),
        (f"{ACTOR}.checkpoint.async_save=true", "for certain"),
        ("gateway.port=8080", "free port"),
        ("algorithm.clip_ratio_c=5 algorithm.loss=gspo", "no dual clip"),
        (f"{MERGE}=maybe", "true and false"),
        ("trainer.nnodes=0", ">= 1"),
        ("trainer.n_gpus_per_node=two", ">= 1"),
        (f"{ROLLOUT}.agent.num_workers=0", ">= 1"),
        (f"{ROLLOUT}.gpu_memory_utilization=1.5", "from 0.01 to 1"),
        (f"{ROLLOUT}.tensor_model_parallel_size=3 trainer.n_gpus_per_node=4", "4 GPUs"),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=100", "2560 tokens"),
        # what is rllm's own on verl too has the fate that it has here
        ("critic.enable=true", "no critic"),
        ("reward.reward_model.enable=true", "evaluator"),
        ("data.train_max_samples=2", "smaller data.train_files"),
        ("data.custom_cls.path=x.py", "read by rllm"),
        ("algorithm.use_pf_ppo=true", "not reweighted"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "allowed: null"),
        (f"{ROLLOUT}.top_k=20", "not built yet"),
        (f"{ROLLOUT}.do_sample=false", "greedy"),
        (f"{ROLLOUT}.agent.agent_loop_config_path=x.yaml", "@rllm.rollout"),
        # what has a name here must not be said to verl alone
        (f"verl.{ROLLOUT}.n=6", "rollout.n"),
        ("verl.data.train_batch_size=4", "both must agree"),
        ("verl.data.gen_batch_size=4", "data.train_batch_size"),
        ("verl.trainer.critic_warmup=4", "no critic"),
    ],
)
def test_what_verl_cannot_do_is_an_error_that_names_the_key(override, told):
    with pytest.raises(ConfigError) as caught:  # checked below
        found = resolved(*override.split(" ")) if "{" not in override else resolved(override)
        refuse_impossible(found.config, found.provenance)
    assert told in str(caught.value)
    assert override.partition("=")[0].split(".")[-1] in str(caught.value)


def test_verls_keys_that_say_what_is_done_anyway_are_taken():
    values = rendered(f"{ROLLOUT}.calculate_log_probs=true", "trainer.use_v1=true", f"{ROLLOUT}.mode=async").values
    assert (values[f"{ROLLOUT}.calculate_log_probs"], values["trainer.use_v1"]) == (True, True)


@pytest.mark.parametrize(
    "override",
    ["trainer.critic_warmup=5", "data.gen_batch_size=4", "data.filter_overlong_prompts=true", "trainer.resume_mode=auto",
     f"{ROLLOUT}.val_kwargs.top_p=0.7", f"{ROLLOUT}.multi_turn.enable=true", f"{MODEL}.lora.dtype=bf16"],
)  # fmt: skip
def test_what_rllm_does_itself_is_noted_and_does_not_reach_verl(override):
    found = resolved(override)
    key = override.partition("=")[0]
    assert found.config.verl == {}
    assert any(key in note and "no effect" in note for note in found.notes)


def test_a_warm_up_of_no_steps_wins_over_a_ratio():
    values = rendered("optim.warmup_steps=0", "optim.warmup_ratio=0.5").values
    assert values[f"{ACTOR}.optim.lr_warmup_steps_ratio"] == 0.0
    assert rendered("optim.warmup_ratio=0.5").values[f"{ACTOR}.optim.lr_warmup_steps_ratio"] == 0.5


def test_a_merge_that_is_left_open_is_chosen():
    assert rendered(f"{MERGE}=null").values[MERGE] is True
    assert rendered(f"{MERGE}=null", parameters=14e9).values[MERGE] is False


def test_dummy_weights_are_refused_too_where_adapters_are_chosen_for_the_size():
    with pytest.raises(ConfigError, match="vLLM must load the base itself"):
        rendered(f"{LOAD_FORMAT}=dummy", parameters=14e9)
    assert rendered(f"{LOAD_FORMAT}=dummy").values[LOAD_FORMAT] == "dummy"  # merged weights replace them


def test_full_fine_tuning_saves_its_last_step_as_a_model():
    values = rendered("lora.rank=0").values
    assert values["trainer.save_freq"] == 7
    assert "hf_model" in values[f"{ACTOR}.checkpoint.save_contents"]
    assert rendered().values["trainer.save_freq"] == -1


def test_the_size_of_a_model_is_read_from_its_config(tmp_path):
    about = {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert parameters_of(tmp_path) == pytest.approx(596e6, rel=0.01)  # Qwen3-0.6B
    (tmp_path / "config.json").write_text(json.dumps(about | {"num_experts": 64}))
    assert parameters_of(tmp_path) == math.inf
    assert parameters_of(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-5, "1e-05"),
        ([1, "a"], "[1,'a']"),
        ({"eps": 1e-8}, "{eps:1e-08}"),
        ("it's", r"'it\'s'"),
        (r"a\.b", r"'a\.b'"),
    ],
)
def test_values_in_hydras_grammar(value, text):
    assert hydra_value(value) == text
