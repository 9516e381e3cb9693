"""The section `distill`: what goes together, what is refused with the fix, and what has no effect."""

import pytest

from rllm.config.json_schema import config_schema
from rllm.config.load import load_config
from rllm.errors import ConfigError

URL = "distill.base_url=http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["distill.coef=2"], r"distill\.coef does nothing without a teacher; give distill\.teacher"),
        (["distill.model=big"], r"distill\.model does nothing without a teacher"),
        (
            ["distill.teacher=default", "distill.model=big"],
            r"distill\.model=big is about an endpoint.*distill\.base_url",
        ),
        (["distill.teacher=default", "distill.api_key_env=HOME"], r"distill\.api_key_env=HOME is about an endpoint"),
        ([URL, "distill.teacher=default"], r"both name a teacher; give one"),
        ([URL, "distill.adapter=x"], r"both name a teacher; give one"),
        ([URL, "distill.api_key_env=NO_SUCH_VARIABLE_1"], r"no such environment variable"),
        ([URL, "rollout.temperature=0.7"], r"without temperature.*set rollout\.temperature=1, or use distill\.teacher"),
        (["distill.base_url=localhost:8000"], r"it must begin with http:// or https://"),
        (["distill.teacher=default", "distill.coef=0"], r"distill\.coef=0: input should be greater than 0"),
        (["distill.teacher=default", "distill.gamma=1.5"], r"less than or equal to 1"),
        (["distill.teacher=default", "distill.mode=replace"], r"allowed: only \| add"),
        (["distill.teacher=default", "distill.roles=[]"], r"an empty list teaches nobody"),
        (["distill.teacher=default", "distill.timeout_s=0"], r"greater than 0"),
        (["distill.techer=default"], r"did you mean 'distill\.teacher'"),
        (["teacher=default"], r"did you mean 'distill\.teacher'"),
        (
            ["distill.teacher=default", "distill.mode=add", "algorithm.rejection_sampling.enable=true"],
            r"groups of equal rewards away, which a teacher can still teach",
        ),
        (["distill.teacher=default", "algorithm.kl_in_reward=0.1"], r"it changes rewards, and none is trained on"),
        (["distill.teacher=default", "algorithm.overlong_buffer=8"], r"set it to 0, or distill\.mode=add"),
        (
            ["distill.teacher=default", "algorithm.per_role={judge: reinforce}"],
            r"per_role\.judge\.adv_estimator=reinforce: the role is taught by the teacher alone",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_fix(overrides, says):
    with pytest.raises(ConfigError, match=says):
        load_config(overrides=overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["distill.teacher=default", "rollout.n=1"],
        ["distill.adapter=x", "rollout.temperature=0.7"],
        ["distill.teacher=default", "distill.mode=add", "algorithm.kl_in_reward=0.1", "algorithm.overlong_buffer=8"],
        ["distill.teacher=default", "distill.roles=[solver]", "algorithm.per_role={judge: reinforce}"],
        ["distill.teacher=default", "algorithm.per_role={judge: {loss: cispo}}"],
        [URL, "distill.api_key_env=PATH"],
    ],
)
def test_what_goes_together_is_taken(overrides):
    assert load_config(overrides=overrides).config.distill.enabled


def test_a_group_of_one_needs_a_teacher_that_replaces_the_reward():
    with pytest.raises(ConfigError, match="a group of one has nothing to compare with"):
        load_config(overrides=["distill.teacher=default", "distill.mode=add", "rollout.n=1"])


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["distill.adapter=x", "algorithm.adv_estimator=rloo"], "algorithm.adv_estimator=rloo has no effect with"),
        (["distill.adapter=x", "algorithm.zero_std=keep"], "algorithm.zero_std=keep has no effect with"),
        (["distill.adapter=x", "distill.timeout_s=3"], "distill.timeout_s has no effect without distill.base_url"),
        (["distill.teacher=default"], "there is nothing to learn"),
    ],
)
def test_what_has_no_effect_is_said(overrides, note):
    assert any(note in said for said in load_config(overrides=overrides).notes)
    quiet = load_config(overrides=["distill.adapter=x"]).notes
    assert not any("distill" in said for said in quiet)


def test_the_schema_for_editors_has_the_section():
    section = config_schema()["properties"]["distill"]
    assert section["additionalProperties"] is False and "teacher" in section["properties"]


VERL = "actor_rollout_ref.actor.policy_loss"
DAPO = "reward_model.overlong_buffer"


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        ([f"{VERL}.loss_mode=dro", f"{VERL}.dro_beta=0.2"], "loss_options", {"beta": 0.2}),
        ([f"{VERL}.dro_beta=0.2", "algorithm.loss=dro"], "loss_options", {"beta": 0.2}),
        ([f"{VERL}.dro_beta=0.2"], "loss_options", {}),
        ([f"{DAPO}.enable=True", f"{DAPO}.len=128"], "overlong_buffer", 128),
        ([f"{DAPO}.enable=False", f"{DAPO}.len=128"], "overlong_buffer", 0),
        ([f"{DAPO}.len=128"], "overlong_buffer", 0),
        ([f"{DAPO}.enable=True", f"{DAPO}.len=128", f"{DAPO}.penalty_factor=0.5"], "overlong_penalty", 0.5),
        (
            [f"+reward_model.reward_kwargs.overlong_buffer_cfg.{k}" for k in ("enable=True", "len=64", "log=False")],
            "overlong_buffer",
            64,
        ),
    ],
)
def test_verls_keys_of_single_losses_and_of_overlong_shaping(overrides, field, value):
    assert getattr(load_config(overrides=overrides).config.algorithm, field) == value


def test_a_buffer_without_length_or_a_switch_that_is_none():
    with pytest.raises(ConfigError, match=rf"{DAPO}\.enable=true: how long is the buffer\? Give {DAPO}\.len too"):
        load_config(overrides=[f"{DAPO}.enable=True"])
    with pytest.raises(ConfigError, match="allowed are true and false"):
        load_config(overrides=[f"{DAPO}.enable=maybe", f"{DAPO}.len=8"])


def test_settings_of_the_chat_template_in_every_spelling():
    expected = {"enable_thinking": False}
    for override in (
        "rollout.chat_template_kwargs.enable_thinking=false",
        "rollout.chat_template_kwargs={enable_thinking: false}",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "data.apply_chat_template_kwargs={enable_thinking: false}",
        "rllm.disable_thinking=True",
    ):
        assert load_config(overrides=[override]).config.rollout.chat_template_kwargs == expected, override
    assert load_config(overrides=["rllm.disable_thinking=False"]).config.rollout.chat_template_kwargs == {}
    assert load_config(overrides=["data.apply_chat_template_kwargs={}"]).config.rollout.chat_template_kwargs == {}
    for bad in ("tools", "tokenize", "not-a-name"):
        with pytest.raises(ConfigError, match=f"'{bad}' is no setting of a template's own"):
            load_config(overrides=[f"rollout.chat_template_kwargs={{{bad}: 1}}"])
