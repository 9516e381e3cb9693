"""Whole runs on the default model: optimizer steps, rates, filters, gathered batches, the KL, and when a run ends."""

import json
import re

import pytest
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file
from test_trainer import lines, settings, train
from transformers import get_scheduler

import rllm
from rllm.data.countdown import countdown
from rllm.errors import ConfigError


async def ask(task, config, tokens=8):
    async with AsyncOpenAI(base_url=config.base_url, api_key="x") as client:
        return await client.chat.completions.create(
            model=config.model, messages=[{"role": "user", "content": task.instruction}], max_tokens=tokens
        )


@rllm.rollout(name="solver")
async def solver(task, config):
    await ask(task, config)


@rllm.evaluator
def by_chance(task, episode):
    return float(int(episode.id[-1]) % 2)


def run(tmp_path, flow=solver, evaluator=by_chance, **sections):
    result = train(tmp_path, flow, evaluator, **({"val": 0} | sections))
    folder = tmp_path / "runs" / "latest"
    return result, lines(folder / "metrics.jsonl"), folder


def test_mini_batches_and_epochs_make_their_optimizer_steps_and_publish_once_a_step(tmp_path):
    result, metrics, folder = run(
        tmp_path, data={"train_batch_size": 4}, algorithm={"mini_batch_size": 2, "ppo_epochs": 2}
    )
    assert [m["train/optimizer_steps"] for m in metrics] == [4, 4]
    assert [m["policy_version"] for m in metrics] == [1, 2]
    assert all(m["actor/grad_norm_max"] >= m["actor/grad_norm"] > 0 for m in metrics)
    assert result["accounting"]["trained"] == 2 * 4 * 4
    (note,) = json.loads((folder / "run.json").read_text())["notes"]
    assert "algorithm.ppo_epochs=2 trains each token more than once" in note


@pytest.mark.slow
def test_the_learning_rate_of_each_step_is_that_of_transformers_schedule(tmp_path):
    _, metrics, _ = run(
        tmp_path,
        optim={"lr": 0.01, "schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1},
        trainer={"total_steps": 5},
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = get_scheduler("cosine_with_min_lr", optimizer, 2, 5, scheduler_specific_kwargs={"min_lr_rate": 0.1})
    expected = []
    for _ in range(5):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert expected[0] == 0 < metrics[0]["actor/lr"] <= 1e-5
    assert [m["actor/lr"] for m in metrics[1:]] == pytest.approx(expected[1:])


def test_a_run_with_all_kinds_of_logprobs_goes_through_and_says_what_it_found(tmp_path):
    _, metrics, _ = run(
        tmp_path,
        algorithm={
            "kl_beta": 0.01,
            "kl_in_reward": 0.05,
            "reference": "initial_adapter",
            "mini_batch_size": 1,
            "rollout_correction": {"level": "token", "mode": "mask", "cap": 3.0},
        },
        optim={"lr": 0.01},
    )
    first, second = metrics
    assert first["actor/kl_in_reward"] == 0.0 != second["actor/kl_in_reward"]
    assert first["critic/rewards/mean"] == first["critic/score/mean"] == 0.5
    assert all(m["rollout_correction/ess"] == pytest.approx(1.0, abs=1e-4) for m in metrics)
    assert all(abs(m["rollout_correction/kl_k3"]) < 1e-6 for m in metrics)


@pytest.mark.parametrize("mini_batch_size", [None, 1])
@pytest.mark.parametrize("reference", ["base", "initial_adapter"])
def test_the_kl_to_the_reference_is_exactly_zero_until_the_first_step_and_then_is_not(
    tmp_path, reference, mini_batch_size
):
    _, (first, second), _ = run(
        tmp_path,
        algorithm={"kl_beta": 0.1, "reference": reference, "mini_batch_size": mini_batch_size},
        optim={"lr": 0.01},
    )
    if mini_batch_size is None:
        assert first["actor/kl_ref"] == 0.0 == first["actor/kl_ref_k1"]
    else:  # the second optimizer step already has a policy that moved
        assert first["train/optimizer_steps"] == 2 and first["actor/kl_ref"] > 0
    assert second["actor/kl_ref"] > 1e-5


@pytest.mark.parametrize("key", ["kl_beta", "kl_in_reward"])
@pytest.mark.slow
def test_full_finetuning_keeps_its_starting_weights_as_the_reference(tmp_path, key):
    run(tmp_path, lora={"rank": 0}, optim={"lr": 1e-4}, algorithm={key: 0.05}, trainer={"total_steps": 1})


@pytest.mark.parametrize(("cut_ones", "cut"), [(False, {}), (True, {"max_response_length_exceeded": 6})])
@pytest.mark.slow
def test_episodes_that_end_for_a_filtered_reason_are_not_trained(tmp_path, cut_ones, cut):
    """Every completion is cut at its 8 tokens; one episode of each task says that it ran out of turns."""

    @rllm.rollout(name="solver")
    async def sometimes_out_of_turns(task, config):
        response = await ask(task, config)
        trajectory = rllm.Trajectory(name="solver", steps=[rllm.Step(id=response.id)])
        episode = rllm.Episode(trajectories=[trajectory])
        if config.session_uid.rsplit("-", 1)[0].endswith("_3"):
            episode.termination_reason = rllm.TerminationReason.MAX_TURNS_EXCEEDED
        return episode

    result, metrics, _ = run(
        tmp_path,
        sometimes_out_of_turns,
        algorithm={"filter": {"enable": True, "max_response_length_exceeded": cut_ones}},
        trainer={"total_steps": 1},
    )
    assert result["accounting"]["dropped"] == {"max_turns_exceeded": 2} | cut
    assert result["accounting"]["trained"] == 6 - sum(cut.values())
    assert metrics[0]["samples/dropped/max_turns_exceeded"] == 2
    assert metrics[0]["critic/score/mean"] == 0.5
    if not cut_ones:
        assert metrics[0]["critic/score/kept"] == pytest.approx(1 / 3)


def test_when_all_completions_are_cut_off_nothing_is_trained_and_the_score_stays(tmp_path):
    @rllm.rollout(name="solver")
    async def short(task, config):
        await ask(task, config, tokens=1)

    result, metrics, _ = run(tmp_path, short, algorithm={"mask_truncated": True}, trainer={"total_steps": 1})
    assert result["accounting"]["dropped"] == {"truncated": 8} and metrics[0]["train/skipped_steps"] == 1
    assert metrics[0]["critic/score/mean"] == 0.5 and metrics[0]["policy_version"] == 0


def test_batches_are_gathered_with_fresh_samples_until_enough_tasks_have_a_signal(tmp_path):
    first = countdown("train", 8)[0].id

    @rllm.evaluator
    def only_one_task(task, episode):
        return float(int(episode.id[-1]) % 2) if task.id == first else 1.0

    result, (metrics,), folder = run(
        tmp_path,
        evaluator=only_one_task,
        tasks=list(countdown("train", 8))[:2],
        algorithm={"rejection_sampling": {"enable": True}},
        trainer={"total_steps": 1},
    )
    assert metrics["rejection_sampling/batches"] == 2 == metrics["rejection_sampling/tasks"]
    account = result["accounting"]
    assert (account["generated"], account["trained"], account["dropped"]) == (16, 8, {"zero_std": 8})
    episodes = [e for e in lines(folder / "episodes.jsonl") if e["id"].startswith(first)]
    answers = [e["trajectories"][0]["steps"][0]["response_ids"] for e in episodes]
    assert len(answers) == 8 and answers[:4] != answers[4:]


def scripted(values):
    """An evaluator whose validation metric `acc` takes `values` one validation after another (2 tasks each)."""
    seen = iter(value for value in values for _ in range(2))

    @rllm.evaluator
    def evaluate(task, episode):
        if task.metadata.get("split") == "val":
            return rllm.EvalOutput(0.0, signals=[rllm.Signal("acc", next(seen))])
        return float(int(episode.id[-1]) % 2)

    return evaluate


def tasks_of(split, n):
    return [rllm.Task(f"{split}-{i}", "Say a number.", {"split": split, "data_source": "x"}) for i in range(n)]


def stopping(tmp_path, values, steps=6, freq=1, **stop):
    trainer = {"total_steps": steps, "test_freq": freq, "early_stop": {"metric": "val/x/acc"} | stop}
    result = rllm.AgentTrainer(
        agent_flow=solver,
        evaluator=scripted(values),
        config=settings(tmp_path, trainer=trainer, optim={"lr": 0.01}),
        train_dataset=tasks_of("train", 4),
        val_dataset=tasks_of("val", 2),
    ).train()
    return result, tmp_path / "runs" / "latest"


def test_a_run_ends_without_a_new_best_and_keeps_the_best_adapter(tmp_path, capsys):
    # after step 1, before training (asked after step 1, with LoRA), after steps 2 to 4
    result, folder = stopping(tmp_path, [0.2, 0.1, 0.6, 0.5, 0.6], patience=2)
    assert result["steps"] == 4 and result["early_stop"] == {
        "metric": "val/x/acc",
        "best": 0.6,
        "best_step": 2,
        "stopped": "val/x/acc has no new best in 2 validations; the best is 0.6 after step 2",
        "kept": "adapter-best",
    }
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "stopped after step 4: val/x/acc has no new best" in told
    assert "adapter-best (val/x/acc 0.600 after step 2)" in told
    assert result["val"]["before"]["val/x/acc"] == 0.1 and result["val"]["after"]["val/x/acc"] == 0.6
    best, last = (load_file(folder / name / "adapter_model.safetensors") for name in ("adapter-best", "adapter"))
    assert any(not torch.equal(best[name], last[name]) for name in best)
    assert "- step: 2\n" in (folder / "adapter-best" / "README.md").read_text()
    assert not (folder / "adapter-best.new").exists()
    assert [m.get("val/x/acc") for m in lines(folder / "metrics.jsonl")] == [0.2, 0.6, 0.5, 0.6]


def test_a_target_ends_a_run_and_a_run_that_ends_by_itself_says_so(tmp_path):
    result, _ = stopping(tmp_path / "a", [0.2, 0.1, 0.95], target=0.9)
    assert result["steps"] == 2 and "the target 0.9 is reached" in result["early_stop"]["stopped"]
    result, _ = stopping(tmp_path / "b", [0.1, 0.2], steps=2, freq=2, patience=9)
    assert result["steps"] == 2 and result["early_stop"]["stopped"] is None and result["early_stop"]["best_step"] == 2


def test_a_metric_that_no_validation_gives_is_told_at_the_first_with_the_names_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"early_stop\.metric=val/x/ac: .*did you mean 'val/x/acc'.*val/x/pass@1"):
        stopping(tmp_path, [0.2, 0.1], metric="val/x/ac")
    assert (tmp_path / "runs" / "latest" / "adapter-at-stop").is_dir()


def test_early_stop_without_validation_tasks_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"there are no validation tasks; give val_dataset="):
        train(tmp_path, val=0, trainer={"test_freq": 1, "early_stop": {"metric": "val/x/acc"}})
    assert not (tmp_path / "runs").exists()


def test_early_stop_in_a_run_too_short_to_validate_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"test_freq=5: the run has 2 steps, so its first validation never comes"):
        train(tmp_path, trainer={"test_freq": 5, "early_stop": {"metric": "val/x/acc"}})
