"""What goes wrong in a run costs what it must and no more: rewards, deadlines, long prompts, numbers that are not finite, odd batches."""

import asyncio
import time

import pytest
from safetensors.torch import load_file
from test_trainer import ask, flow_of, lines, train

import rllm
from rllm.errors import ConfigError, DataError, RunError
from rllm.evaluation import evaluate

ONE_STEP = {"total_steps": 1}


def by_turns(*rewards):
    """An evaluator that gives these rewards in turn."""
    given = iter(rewards * 100)
    return rllm.evaluator(lambda task, episode: next(given))


def metrics_of(tmp_path):
    return lines(tmp_path / "runs" / "latest" / "metrics.jsonl")


@pytest.mark.parametrize("batch", [1, 4, 6])
def test_six_tasks_of_four_episodes_train_in_batches_of_any_size_and_none_is_lost(tmp_path, batch):
    # BH-05, BH-49
    result = train(
        tmp_path,
        flow_of(ask),
        by_turns(0.0, 1.0, 0.5),
        tasks=6,
        val=0,
        data={"train_batch_size": batch},
        trainer={"total_steps": None, "total_epochs": 1},
    )
    assert result["steps"] == -(-6 // batch)
    account = result["accounting"]
    assert account["generated"] == 6 * 4
    assert account["generated"] == account["trained"] + sum(account["dropped"].values()) + sum(
        account["failed"].values()
    )


def test_fewer_tasks_than_a_batch_are_one_smaller_batch_on_every_run(tmp_path):
    # BH-46
    counts = []
    for name in ("a", "b"):
        trainer = {"total_steps": None, "total_epochs": 2, "experiment_name": name}
        result = train(
            tmp_path, flow_of(ask), by_turns(0.0, 1.0), tasks=3, val=0, data={"train_batch_size": 8}, trainer=trainer
        )
        order = [e["id"] for e in lines(tmp_path / "runs" / name / "episodes.jsonl")]
        counts.append((result["steps"], result["accounting"]["generated"], order))
    assert counts[0] == counts[1] and counts[0][:2] == (2, 2 * 3 * 4)


def test_a_group_of_one_under_grpo_is_refused_with_the_least_size_and_an_estimator_that_allows_it(tmp_path):
    # BH-05
    with pytest.raises(ConfigError, match=r"set rollout\.n to at least 2, or algorithm\.adv_estimator"):
        train(tmp_path, rollout={"n": 1})
    result = train(
        tmp_path,
        flow_of(ask),
        by_turns(0.0, 1.0),
        val=0,
        rollout={"n": 1},
        algorithm={"adv_estimator": "reinforce"},
        trainer=ONE_STEP,
    )
    assert result["accounting"]["trained"] == 2


def test_a_reward_that_raises_for_one_of_eight_trains_the_other_seven_and_keeps_its_traceback_once(tmp_path):
    # BH-31
    asked = []

    def evaluate(task, episode):
        asked.append(task.id)
        if len(asked) == 5:
            raise ValueError("no verdict on this one")
        return len(asked) % 2

    result = train(tmp_path, flow_of(ask), rllm.evaluator(evaluate), val=0, trainer=ONE_STEP)
    assert result["accounting"] == {"generated": 8, "trained": 7, "dropped": {}, "failed": {"error": 1}, "stale": 0}
    episodes = (tmp_path / "runs" / "latest" / "episodes.jsonl").read_text()
    assert episodes.count("ValueError: no verdict on this one") == 1 and episodes.count("Traceback") == 1
    (metrics,) = metrics_of(tmp_path)
    assert metrics["critic/score/mean"] == pytest.approx(3 / 7) or metrics["critic/score/mean"] == pytest.approx(4 / 7)


@pytest.mark.parametrize(("allowed", "stops"), [(0.5, False), (0.25, True), (0.0, True)])
def test_the_share_of_failures_that_a_run_goes_on_with_is_the_one_in_the_config(tmp_path, allowed, stops):
    # BH-31
    asked = []

    def evaluate(task, episode):
        asked.append(task.id)
        if len(asked) % 2:
            raise ValueError("every other one")
        return len(asked) % 4 == 0

    def run():
        return train(
            tmp_path,
            flow_of(ask),
            rllm.evaluator(evaluate),
            val=0,
            rollout={"n": 4, "max_failed_fraction": allowed},
            trainer=ONE_STEP,
        )

    if not stops:
        assert run()["accounting"]["failed"] == {"error": 4}
        return
    with pytest.raises(RunError, match=f"4 of 8 episodes failed, more than rollout.max_failed_fraction={allowed}") as e:
        run()
    assert "ValueError: every other one" in str(e.value) and "Traceback" in str(e.value)


def test_an_episode_that_sleeps_an_hour_is_ended_at_its_deadline_and_the_other_three_are_trained(tmp_path):
    # BH-34
    started = []

    async def sleepy(task, config):
        started.append(task.id)
        sleeps = len(started) == 2
        await ask(task, config)
        if sleeps:
            await asyncio.sleep(3600)

    clock = time.monotonic()
    result = train(
        tmp_path,
        flow_of(sleepy),
        by_turns(0.0, 1.0),
        val=0,
        data={"train_batch_size": 1},
        rollout={"episode_timeout_s": 2.0},
        trainer=ONE_STEP,
    )
    (metrics,) = metrics_of(tmp_path)
    assert metrics["timing_s/rollout"] < 10 and time.monotonic() - clock < 60
    assert result["accounting"]["failed"] == {"timeout": 1} and result["accounting"]["trained"] == 3


def test_a_prompt_that_does_not_fit_fails_alone_and_says_the_sizes(tmp_path):
    # BH-29
    tasks = [rllm.Task(id="short", instruction="2 + 3?"), rllm.Task(id="long", instruction="2 + 3? " * 400)]
    result = train(
        tmp_path, flow_of(ask), by_turns(0.0, 1.0), tasks=tasks, val=0, trainer=ONE_STEP, data={"train_batch_size": 2}
    )
    assert result["accounting"]["failed"] == {"error": 4} and result["accounting"]["trained"] == 4
    errors = {e["id"].split(":")[0]: e["error"] for e in lines(tmp_path / "runs" / "latest" / "episodes.jsonl")}
    assert errors["short"] is None
    assert "data.max_prompt_length" in errors["long"] and "200" in errors["long"]


def test_steps_with_numbers_that_are_not_finite_are_skipped_counted_and_three_in_a_row_stop_the_run(tmp_path):
    # BH-36
    with pytest.raises(RunError, match=r"3 steps in a row had a loss or gradient that is not finite"):
        train(
            tmp_path,
            flow_of(ask),
            by_turns(1e300, -1e300),
            val=0,
            algorithm={"adv_estimator": "reinforce"},
            trainer={"total_steps": 5},
        )
    run = tmp_path / "runs" / "latest"
    assert [metrics["train/skipped_steps"] for metrics in metrics_of(tmp_path)] == [1.0, 1.0]
    assert {metrics["policy_version"] for metrics in metrics_of(tmp_path)} == {0.0}
    for file in run.glob("**/*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


def test_one_step_that_is_not_finite_between_good_ones_costs_only_itself(tmp_path):
    # BH-36
    rewards = [0.0, 1.0] * 4 + [1e300, -1e300] * 4 + [1.0, 0.0] * 4
    result = train(
        tmp_path,
        flow_of(ask),
        by_turns(*rewards),
        val=0,
        algorithm={"adv_estimator": "reinforce"},
        trainer={"total_steps": 3},
    )
    assert [metrics.get("train/skipped_steps", 0.0) for metrics in metrics_of(tmp_path)] == [0.0, 1.0, 0.0]
    assert [metrics["policy_version"] for metrics in metrics_of(tmp_path)] == [1.0, 1.0, 2.0]
    adapter = load_file(tmp_path / "runs" / "latest" / "adapter" / "adapter_model.safetensors")
    assert result["steps"] == 3 and all(tensor.isfinite().all() for tensor in adapter.values())


def test_what_the_backend_cannot_do_leaves_no_run_folder(tmp_path):
    with pytest.raises(ConfigError, match="nf4"):
        train(tmp_path, model={"quantization": "nf4"})
    with pytest.raises(ConfigError, match=r"rollout\.top_p=0\.5"):
        train(tmp_path, rollout={"top_p": 0.5})
    assert not (tmp_path / "runs").exists()


def test_validation_alone_needs_tasks(tmp_path):
    with pytest.raises(DataError, match=r"trainer\.val_only=true: there are no validation tasks; give val_dataset="):
        train(tmp_path, flow_of(ask), by_turns(0.0), val=0, trainer={"val_only": True})


def test_inside_a_running_event_loop_a_thread_of_its_own_is_asked_for_and_is_enough(tmp_path):
    async def notebook():
        with pytest.raises(RunError, match=r"trainer\.train\(\) was called inside a running event loop.*to_thread"):
            train(tmp_path, val=0, trainer=ONE_STEP)
        with pytest.raises(RunError, match=r"^evaluate\(\) was called inside a running event loop"):
            evaluate(agent_flow=flow_of(ask), evaluator=by_turns(1.0))
        return await asyncio.to_thread(train, tmp_path, flow_of(ask), by_turns(0.0, 1.0), val=0, trainer=ONE_STEP)

    assert asyncio.run(notebook())["steps"] == 1
