"""Every estimator and loss trains in the whole loop, for one role too; what a user registers is what is called."""

import json

import pytest
import torch
from solver_judge_flow import solver_judge, solver_judge_evaluator

import rllm
from rllm.algorithms.advantages import ESTIMATORS
from rllm.algorithms.losses import LOSSES
from rllm.config import names
from rllm.data.countdown import countdown
from rllm.errors import ConfigError, DataError

CONFIG = {
    "data": {"train_batch_size": 2, "max_prompt_length": 200, "max_response_length": 48},
    "rollout": {"n": 4},
    "lora": {"rank": 4, "alpha": 8},
    "optim": {"lr": 0.01},
}


@rllm.rollout(name="solver")
async def with_advantages(task, config):
    """The solver-judge flow, saying itself how good each token was"""
    episode = await solver_judge.fn(task, config)
    for trajectory in episode.trajectories:
        for step in trajectory.steps:
            step.advantage = 0.5
    return episode


def train(tmp_path, flow=solver_judge, steps=1, **algorithm):
    config = CONFIG | {
        "algorithm": algorithm,
        "trainer": {"total_steps": steps, "logger": "console", "run_dir": str(tmp_path)},
    }
    result = rllm.AgentTrainer(
        agent_flow=flow, evaluator=solver_judge_evaluator, config=config, train_dataset=countdown("train", 4)
    ).train()
    lines = (tmp_path / "latest" / "metrics.jsonl").read_text().splitlines()
    return result, [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"adv_estimator": "rloo", "loss": "importance_sampling", "loss_agg_mode": "seq-mean-token-mean"},
        {"adv_estimator": "opo", "loss": "cispo", "loss_agg_mode": "seq-mean-token-sum"},
        {"adv_estimator": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum-norm"},
        {"adv_estimator": "reinforce++-baseline", "loss": "dro", "loss_options": {"beta": 0.1}},
        {"adv_estimator": "reinforce++", "loss": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
        {"adv_estimator": "prpo", "loss": "reinforce", "entropy_coeff": 0.01},
        {"stepwise": "per_step", "per_role": {"judge": {"adv_estimator": "reinforce", "loss": "reinforce"}}},
    ],
    ids=lambda algorithm: "-".join(map(str, algorithm.values())),
)
def test_every_algorithm_trains_and_its_first_step_is_on_policy(tmp_path, algorithm):
    result, (metrics,) = train(tmp_path, **algorithm)
    assert result["accounting"]["trained"] > 0 and metrics["actor/grad_norm"] > 0
    if algorithm.get("loss") != "reinforce":
        assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-3) and metrics["actor/ess"] > 0.999
    assert abs(metrics["actor/ppo_kl"]) < 1e-4 and metrics["actor/entropy"] > 0


def test_a_role_without_a_baseline_trains_where_the_others_groups_are_dropped(tmp_path):
    result, _ = train(tmp_path, zero_std="drop", per_role={"judge": "reinforce", "solver": "reinforce"})
    assert result["accounting"]["dropped"] == {} and result["accounting"]["trained"] == 2 * 4 * 3


def test_settings_of_a_role_that_does_not_exist_stop_the_run_at_its_first_step(tmp_path):
    with pytest.raises(
        ConfigError, match=r"algorithm\.per_role: no trajectory has the role 'jugde'.*did you mean 'judge'"
    ):
        train(tmp_path, per_role={"jugde": "reinforce"})


def test_precomputed_advantages_are_those_of_the_flow_and_missing_ones_stop_the_run(tmp_path):
    result, (metrics,) = train(tmp_path, flow=with_advantages, adv_estimator="precomputed")
    assert result["accounting"]["trained"] == 2 * 4 * 3
    assert metrics["actor/loss"] == pytest.approx(-0.5, abs=1e-3)  # ratio 1, every token 0.5
    with pytest.raises(DataError, match=r"Step\.advantage is None; algorithm\.adv_estimator=precomputed"):
        train(tmp_path, adv_estimator="precomputed")


@pytest.fixture
def clean_registry():
    registries = (names.ESTIMATORS, names.LOSSES, ESTIMATORS, LOSSES)
    kept = [dict(registry) for registry in registries]
    yield
    for registry, before in zip(registries, kept, strict=True):
        registry.clear()
        registry.update(before)


def test_a_registered_estimator_and_loss_are_what_training_calls(tmp_path, clean_registry):
    calls = {"estimator": [], "loss": 0}

    @rllm.register_advantage("all_one")
    def all_one(groups, std):
        calls["estimator"].append((len(groups), std))
        return [[1.0] * len(g.rewards) for g in groups]

    @rllm.register_loss("squared")
    def squared(spec, tokens):
        calls["loss"] += 1
        assert torch.equal(tokens.advantages, torch.ones_like(tokens.advantages))
        return spec.options["weight"] * tokens.logprobs.square(), {"seen": torch.full_like(tokens.old, 3.0)}

    result, metrics = train(
        tmp_path, steps=2, adv_estimator="all_one", loss="squared", loss_options={"weight": 2.0}, grpo_std="none"
    )
    assert calls["estimator"] == [(2, "none")] * 4 and calls["loss"] >= 2  # two tasks for each of two roles, twice
    assert [m["actor/seen"] for m in metrics] == [3.0, 3.0] and result["accounting"]["trained"] == 48
