"""Settings of the update, the filters and the end of a run that contradict each other are refused; those that do nothing are noted."""

import re

import pytest

from rllm.config.load import load_config
from rllm.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.reference=none", "algorithm.kl_beta=0.1"],
            "algorithm.reference=none with algorithm.kl_beta=0.1: a KL needs a reference policy; set it to base or initial_adapter",
        ),
        (["algorithm.reference=none", "algorithm.kl_in_reward=0.1"], "with algorithm.kl_in_reward=0.1: a KL needs"),
        (
            ["algorithm.reference=initial_adapter", "lora.rank=0"],
            "full fine-tuning has no adapter; base is the weights",
        ),
        (["algorithm.reference=start"], "base | initial_adapter | none"),
        (
            ["algorithm.rollout_correction.level=token", "algorithm.old_logprobs=sampler"],
            "the trainer's are needed; set algorithm.old_logprobs to auto or trainer",
        ),
        (
            ["algorithm.rollout_correction.level=token", "algorithm.rollout_correction.floor=0.5"],
            "leave floor out, or set algorithm.rollout_correction.mode=mask",
        ),
        (
            ["algorithm.rollout_correction={level: token, mode: mask, cap: 2, floor: 3}"],
            "keeps weights from 3 (floor) to 2 (cap): none",
        ),
        (
            ["algorithm.rollout_correction={level: token, mode: mask, cap: 0.5}"],
            "keeps weights from 2 (floor) to 0.5 (cap): none",
        ),
        (
            ["algorithm.kl_in_reward=0.1", "algorithm.stepwise=per_step"],
            "set algorithm.stepwise=broadcast, or algorithm.kl_in_reward=0",
        ),
        (["algorithm.overlong_buffer=8", "algorithm.stepwise=per_step"], "each step is compared by its own"),
        (
            ["algorithm.kl_in_reward=0.1", "algorithm.adv_estimator=precomputed"],
            "no advantage is made from the reward; use algorithm.kl_beta",
        ),
        (
            ["algorithm.overlong_buffer=8", "algorithm.adv_estimator=precomputed"],
            "no advantage is made from the reward; set it to 0",
        ),
        (
            ["algorithm.rejection_sampling.enable=true", "algorithm.adv_estimator=precomputed"],
            "no advantage is made from the reward, and it throws groups",
        ),
        (
            ["algorithm.rejection_sampling.enable=true", "algorithm.stepwise=per_step"],
            "it keeps tasks by the rewards of whole trajectories",
        ),
        (
            ["data.max_response_length=64", "model.max_model_len=64"],
            "data.max_response_length=64: prompt and completion have 64 tokens together",
        ),
        (["algorithm.rollout_correction.cap=0"], "greater than 0"),
        (["algorithm.rollout_correction.level=tokens"], "none | token | sequence | geometric"),
        (
            ["algorithm.overlong_buffer=600"],
            "algorithm.overlong_buffer=600: completions have at most 512 tokens (rollout.max_tokens or data.max_response_length)",
        ),
        (["algorithm.overlong_buffer=-1"], "greater than or equal to 0"),
        (
            ["algorithm.rejection_sampling.enable=true", "algorithm.zero_std=keep"],
            "algorithm.zero_std=keep with algorithm.rejection_sampling.enable=true: .*set algorithm.zero_std=drop",
        ),
        (
            ["algorithm.rejection_sampling.enable=true", "algorithm.adv_estimator=reinforce", "rollout.n=1"],
            "rollout.n=1 with algorithm.rejection_sampling.enable=true: one reward never differs",
        ),
        (["trainer.early_stop.metric=val/x/acc"], "nothing is validated during training; set trainer.test_freq"),
        (
            ["trainer.early_stop.patience=2"],
            "trainer.early_stop.patience does nothing without trainer.early_stop.metric",
        ),
        (["trainer.early_stop.target=0.5"], "trainer.early_stop.target does nothing without"),
        (["trainer.early_stop={metric: a, patience: 0}"], "greater than 0"),
        (["trainer.early_stop.mode=best"], "max | min"),
        (
            ["trainer.overlap=true", "algorithm.ppo_epochs=2"],
            "trainer.overlap=true with algorithm.ppo_epochs=2: it makes several",
        ),
        (
            ["trainer.overlap=true", "data.train_batch_size=8", "algorithm.mini_batch_size=4"],
            "trainer.overlap=true with algorithm.mini_batch_size=4: it makes several",
        ),
        (
            ["trainer.overlap=true", "algorithm.adv_estimator=reinforce_plus_plus_baseline"],
            "trainer.overlap=true with algorithm.adv_estimator=reinforce_plus_plus_baseline: .*all rewards of the step",
        ),
        (
            ["trainer.overlap=true", "algorithm.stepwise=per_step"],
            "trainer.overlap=true with algorithm.stepwise=per_step",
        ),
        (
            ["trainer.overlap=true", "algorithm.old_logprobs=trainer"],
            "trainer.overlap=true with algorithm.old_logprobs=trainer",
        ),
        (
            ["trainer.overlap=true", "algorithm.kl_in_reward=0.1"],
            "trainer.overlap=true with algorithm.kl_in_reward=0.1: .*kl_beta",
        ),
        (["trainer.overlap=true", "distill.teacher=default"], "trainer.overlap=true with distill=on"),
        (
            ["trainer.overlap=true", "algorithm.rejection_sampling.enable=true"],
            "trainer.overlap=true with algorithm.rejection_sampling.enable=true",
        ),
        (["algorithm.ppo_epochs=0"], "greater than 0"),
        (["algorithm.mini_batch_size=0"], "greater than 0"),
        (["algorithm.mini_batch_size=2.5"], "valid integer"),
        (["algorithm.old_logprobs=both"], "auto | sampler | trainer"),
        (["algorithm.filter.error=true"], "unknown key 'algorithm.filter.error'"),
        (["algorithm.filter.env_dne=true"], "did you mean 'algorithm.filter.env_done'?"),
        (["optim.schedule=cosin"], "constant | linear | cosine"),
        (["optim.warmup_ratio=1.5"], "less than or equal to 1"),
        (["optim.warmup_steps=-3"], "greater than or equal to 0"),
        (
            ["lora.rank=0", "lora.adapter_path=/a"],
            "lora.adapter_path=/a with lora.rank=0: full fine-tuning has no adapter",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_start_with_the_fix(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(overrides=overrides)
    assert re.search(message if ".*" in message else re.escape(message), str(error.value)), str(error.value)
    assert str(error.value).startswith("argument: ")


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["algorithm.ppo_epochs=2"], "a forward pass: algorithm.ppo_epochs=2 trains each token more than once"),
        (["algorithm.mini_batch_size=4"], "a forward pass: algorithm.mini_batch_size=4 makes several optimizer steps"),
        (["algorithm.old_logprobs=trainer"], "a forward pass: algorithm.old_logprobs=trainer"),
        (["algorithm.rollout_correction.level=token"], "a forward pass: algorithm.rollout_correction weighs by them"),
        (["algorithm.mini_batch_size=64"], "is more than the 16 tasks of a step: each step is one mini-batch"),
        (["algorithm.reference=initial_adapter"], "there is no KL, so no reference policy is asked"),
        (["algorithm.filter.env_done=true"], "nothing is filtered, as algorithm.filter.enable is false"),
        (["algorithm.rollout_correction.cap=5"], "algorithm.rollout_correction.cap has no effect: level is none"),
        (["optim.min_lr_ratio=0.1"], "has no effect with optim.schedule=constant"),
        (["optim.warmup_steps=20", "trainer.total_steps=10"], "the 10 steps of the run are all warm-up"),
    ],
)
def test_what_costs_a_pass_or_does_nothing_is_noted_once(overrides, note):
    notes = load_config(overrides=overrides).notes
    assert sum(note in line for line in notes) == 1 == len(notes), notes


def test_a_plain_run_has_no_note_and_makes_no_extra_pass():
    assert load_config().notes == []
    assert load_config(overrides=["algorithm.ppo_epochs=2", "algorithm.old_logprobs=sampler"]).notes == []


def test_a_kl_weight_is_taken_with_each_reference():
    for reference in ("base", "initial_adapter"):
        config = load_config(overrides=["algorithm.kl_beta=0.1", f"algorithm.reference={reference}"]).config
        assert (config.algorithm.kl_beta, config.algorithm.reference) == (0.1, reference)
    full = load_config(overrides=["lora.rank=0", "algorithm.kl_in_reward=0.1"]).config
    assert full.algorithm.kl_in_reward == 0.1


def test_a_limit_that_no_completion_comes_to_is_refused():
    short = ["data.max_prompt_length=100", "data.max_response_length=60"]
    with pytest.raises(ConfigError, match=r"rollout\.max_tokens=160: prompt and completion have 160 tokens together"):
        load_config(overrides=[*short, "rollout.max_tokens=160"])
    with pytest.raises(ConfigError, match=r"rollout\.max_tokens=64: prompt and completion have 64 tokens"):
        load_config(overrides=[*short, "rollout.max_tokens=64", "model.max_model_len=64"])
    load_config(overrides=[*short, "rollout.max_tokens=159"])
    load_config(overrides=[*short, "rollout.max_tokens=1000"], training=False)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (
            ["algorithm.loss=reinforce", "algorithm.clip_ratio_high=0.3"],
            "clip_ratio_high=0.3 has no effect: algorithm.loss=rein",
        ),
        (
            ["algorithm.loss=dro", "algorithm.clip_ratio_c=0"],
            "clip_ratio_c=0.0 has no effect: algorithm.loss=dro has no dual clip",
        ),
        (["algorithm.loss=cispo", "algorithm.clip_ratio_c=5"], "clip_ratio_c=5.0 has no effect"),
        (["algorithm.loss_scale_factor=64"], "loss_scale_factor=64.0 has no effect: loss_agg_mode is token-mean"),
        (["algorithm.adv_estimator=rloo", "algorithm.grpo_std=none"], "grpo_std=none has no effect"),
        (["algorithm.adv_estimator=reinforce", "algorithm.zero_std=keep"], "zero_std=keep has no effect"),
        (["algorithm.kl_estimator=k2"], "kl_estimator=k2 has no effect: algorithm.kl_beta is 0"),
        (["algorithm.overlong_penalty=2"], "overlong_penalty=2.0 has no effect: algorithm.overlong_buffer is 0"),
        (["algorithm.rejection_sampling.max_batches=3"], "rejection_sampling.max_batches has no effect"),
        (
            ["optim.warmup_steps=2", "optim.warmup_ratio=0.5"],
            "optim.warmup_ratio=0.5 has no effect: optim.warmup_steps=2 wins",
        ),
        (["trainer.total_steps=5", "trainer.test_freq=9"], "trainer.test_freq=9 has no effect: the run has 5 steps"),
    ],
)
def test_a_setting_that_nothing_reads_is_noted(overrides, note):
    assert any(note in said for said in load_config(overrides=overrides).notes)


def test_settings_that_are_read_are_not_noted():
    for overrides in (
        ["algorithm.loss=cispo", "algorithm.clip_ratio_high=0.3"],
        ["algorithm.per_role={judge: {loss: ppo_clip}}", "algorithm.loss=reinforce", "algorithm.clip_ratio_high=0.3"],
        ["algorithm.adv_estimator=rloo", "algorithm.per_role={judge: grpo}", "algorithm.grpo_std=none"],
        ["algorithm.kl_beta=0.1", "algorithm.kl_estimator=k2"],
        ["algorithm.overlong_buffer=4", "algorithm.overlong_penalty=2"],
        ["trainer.total_steps=5", "trainer.test_freq=5", "trainer.save_freq=2"],
    ):
        assert not any("has no effect" in said for said in load_config(overrides=overrides).notes), overrides
