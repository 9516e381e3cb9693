"""Which rows make which optimizer step, and which log-probabilities they carry, with a real model."""

import math

import pytest
import torch

from rllm.algorithms.datums import build_datums
from rllm.algorithms.grouping import group_by_role
from rllm.backends.base import BASE, INITIAL_ADAPTER, AdamParams, Datum, LossSpec
from rllm.backends.local.backend import LocalBackend
from rllm.collect import Collected
from rllm.config.check_training import why_trainer_logprobs
from rllm.config.schema import Config
from rllm.errors import DataError, RunError
from rllm.types import Step, Trajectory
from rllm.update import PolicyUpdate, adam_params

PPO = LossSpec("ppo_clip")
TASKS, EACH = 6, 4


@pytest.fixture
def update_of():
    """``update_of(algorithm={...})`` -> an update over the default model on CPU, whose calls are in `calls`."""
    made = []

    def _make(**sections):
        base = {"lora": {"rank": 4, "alpha": 8}, "model": {"device": "cpu", "dtype": "float32"}, "optim": {"lr": 1e-2}}
        for name, values in sections.items():
            base[name] = base.get(name, {}) | values
        config = Config.model_validate(base)
        backend = Recorded(config)
        made.append(backend.backend)
        return PolicyUpdate(backend, config, PPO, total=10)  # pyright: ignore[reportArgumentType]

    yield _make
    for backend in made:
        backend.close()


class Recorded:
    """A local backend that keeps what it was asked: the rows of every optimizer step, and every log-probability pass."""

    def __init__(self, config):
        self.backend = LocalBackend.create(config)
        self.steps: list[list[Datum]] = []
        self.passes: list[tuple[str | None, int]] = []
        self.gradients = []
        self.losses = iter(())

    def forward_backward(self, data, loss):
        self.steps.append(list(data))
        metrics = self.backend.forward_backward(data, loss)
        return metrics | {"loss": next(self.losses, metrics["loss"])}

    def logprobs(self, data, adapter=None, trained_only=False):
        assert trained_only
        self.passes.append((adapter, len(data)))
        return self.backend.logprobs(data, adapter, trained_only)

    def optim_step(self, params):
        self.gradients.append([p.grad.clone() for p in self.backend.learner.trainable() if p.grad is not None])
        return self.backend.optim_step(params)

    def discard_gradients(self):
        self.backend.discard_gradients()


def sampled(update, seed=0, off=0.0, roles=("solver",), per_trajectory=1):
    """Random trajectories as `collect` gives them, with the log-probabilities of the policy that `update` has now; `off` moves them."""
    generator = torch.Generator().manual_seed(seed)

    def integers(n):
        return torch.randint(5, 200, (n,), generator=generator).tolist()

    items = []
    for task in range(TASKS):
        for k in range(EACH):
            for role in roles:
                steps = []
                for _ in range(per_trajectory):
                    prompt, response = integers(6), integers(int(torch.randint(3, 9, (1,), generator=generator)))
                    row = Datum([*prompt, *response], [0] * 6 + [1] * len(response))
                    (values,) = update.backend.backend.logprobs([row], trained_only=True)
                    noise = torch.randn(len(response), generator=generator) * off
                    logprobs = [v + float(n) for v, n in zip(values[6:], noise, strict=True)]
                    steps.append(Step(prompt_ids=prompt, response_ids=response, logprobs=logprobs))
                items.append((f"task-{task}", Trajectory(name=role, steps=steps, reward=float(k % 2))))
    groups = group_by_role(items)
    found = Collected()
    for task in range(TASKS):
        found.units.append([group for group in groups if group.task_id == f"task-{task}"])
    found.account.generated = len(items)
    return found


def rows(found, groups=None):
    return build_datums(groups or found.groups, found.account, estimator="grpo")


def run(update, found, step=1):
    metrics = update.run(rows(found), found, found.account, step)
    found.account.check()
    return metrics


def task_of(found):
    return {
        s.id: number for number, unit in enumerate(found.units) for g in unit for t in g.trajectories for s in t.steps
    }


def key(row):
    return tuple(row.ids)


def test_one_optimizer_step_needs_no_pass_and_uses_the_samplers_logprobs(update_of):
    update = update_of()
    metrics = run(update, sampled(update))
    assert update.backend.passes == [] and len(update.backend.steps) == 1
    assert all(row.old_logprobs == [] == row.ref_logprobs == row.weights for row in update.backend.steps[0])
    assert metrics["train/optimizer_steps"] == 1 and "train/skipped_steps" not in metrics


def test_mini_batches_hold_whole_tasks_and_every_row_once_an_epoch_in_an_order_of_its_own(update_of):
    update = update_of(algorithm={"mini_batch_size": 4, "ppo_epochs": 3})
    found = sampled(update, roles=("solver", "judge"), per_trajectory=2)
    metrics = run(update, found)
    steps, tasks = update.backend.steps, task_of(found)
    assert metrics["train/optimizer_steps"] == len(steps) == 3 * 2
    orders = []
    for epoch in (steps[:2], steps[2:4], steps[4:]):
        sets = [{tasks[row.call] for row in batch} for batch in epoch]
        assert [len(s) for s in sets] == [4, 2] and sets[0] | sets[1] == set(range(TASKS))
        everything = [key(row) for batch in epoch for row in batch]
        assert len(everything) == len(set(everything)) == TASKS * EACH * 2 * 2
        orders.append(sets[0])
    assert any(order != orders[0] for order in orders)
    again = update_of(algorithm={"mini_batch_size": 4, "ppo_epochs": 3})
    run(again, sampled(again, roles=("solver", "judge"), per_trajectory=2))
    assert [[key(row) for row in batch] for batch in again.backend.steps] == [
        [key(row) for row in batch] for batch in steps
    ]


def test_the_gradients_of_mini_batches_add_up_to_that_of_the_whole_step(update_of):
    whole, parts = update_of(optim={"lr": 1e-30}), update_of(optim={"lr": 1e-30}, algorithm={"mini_batch_size": 2})
    run(whole, sampled(whole))
    run(parts, sampled(parts))
    tokens = [sum(row.n_trained for row in batch) for batch in parts.backend.steps]
    assert len(tokens) == 3
    for i, expected in enumerate(whole.backend.gradients[0]):
        # token-mean divides by the tokens of the mini-batch
        total = sum(n / sum(tokens) * g[i] for n, g in zip(tokens, parts.backend.gradients, strict=True))
        assert (total - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-9
    assert max(g.abs().max() for g in whole.backend.gradients[0]) > 1e-4


def test_several_optimizer_steps_take_the_ratio_to_the_trainers_logprobs_from_before_the_first(update_of):
    update = update_of(algorithm={"mini_batch_size": 2, "ppo_epochs": 2})
    found = sampled(update, off=0.3)
    data = rows(found)
    before = {key(row): update.backend.backend.logprobs([row], trained_only=True)[0] for row in data}
    update.run(data, found, found.account, 1)
    assert sum(n for _, n in update.backend.passes) == len(data)
    for batch in update.backend.steps:
        for row in batch:
            assert row.old_logprobs == pytest.approx(before[key(row)], abs=1e-5)
            assert row.old_logprobs != pytest.approx(row.logprobs, abs=1e-2)
    after = update.backend.backend.logprobs([data[0]], trained_only=True)[0]
    assert after != pytest.approx(before[key(data[0])], abs=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({"old_logprobs": "trainer"}, 1),
        ({"old_logprobs": "sampler", "ppo_epochs": 3}, 0),
        ({"ppo_epochs": 3}, 1),
        ({"mini_batch_size": TASKS}, 0),
        ({"mini_batch_size": TASKS - 1}, 2),
        ({"kl_beta": 0.1}, 1),
        ({"kl_beta": 0.1, "ppo_epochs": 2}, 2),
        ({"kl_in_reward": 0.1}, 2),
        ({"kl_in_reward": 0.1, "kl_beta": 0.1, "ppo_epochs": 2}, 2),
        ({"kl_in_reward": 0.1, "old_logprobs": "sampler"}, 1),
        ({"rollout_correction": {"level": "token"}}, 1),
    ],
)
def test_a_pass_is_made_only_where_the_settings_need_one_and_never_twice(update_of, algorithm, passes):
    update = update_of(algorithm=algorithm)
    found = sampled(update)
    groups, _ = update.with_kl_in_reward(found, 1)
    update.run(rows(found, groups), found, found.account, 1)
    assert len(update.backend.passes) == passes
    assert all(bool(row.ref_logprobs) == ("kl_beta" in algorithm) for row in update.backend.steps[0])


@pytest.mark.parametrize("mini_batch_size", [None, 2])
@pytest.mark.parametrize("rank", [4, 0])
def test_the_kl_of_a_policy_that_was_never_trained_is_exactly_zero(update_of, mini_batch_size, rank):
    algorithm = {"kl_beta": 0.1, "mini_batch_size": mini_batch_size, "old_logprobs": "trainer"}
    update = update_of(algorithm=algorithm, lora={"rank": rank})
    found = sampled(update)
    update.run(rows(found), found, found.account, 1)
    seen = [row for batch in update.backend.steps for row in batch]
    assert len(seen) == TASKS * EACH and all(row.ref_logprobs == row.old_logprobs for row in seen)
    assert all(any(row.ref_logprobs) for row in seen)


def test_the_reference_after_training_equals_a_float64_reference(update_of, tmp_path):
    """KL(policy || base) over the sampled tokens, from transformers and PEFT in float64."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from rllm.backends.local.loading import DEFAULT_MODEL

    update = update_of(algorithm={"kl_beta": 0.1, "old_logprobs": "trainer"})
    for step in (1, 2):
        run(update, sampled(update, seed=step), step)
    folder = update.backend.backend.export_adapter(tmp_path / "adapter")["default"]
    update.backend.steps.clear()
    found = sampled(update, seed=3)
    update.run(rows(found), found, found.account, 3)
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float64).eval()

    def logprobs(policy, row):
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([row.ids])).logits[0].double()
        picked = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(row.ids[1:])[:, None])[:, 0]
        return picked[torch.tensor(row.mask[1:], dtype=torch.bool)]

    data = update.backend.steps[0]
    base = [logprobs(model, row) for row in data]
    tuned_model = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False).double()
    tuned = [logprobs(tuned_model, row) for row in data]
    d = torch.cat(tuned) - torch.cat(base)
    expected = {"k1": d.mean().item(), "k3": (torch.expm1(-d) + d).mean().item()}
    trained = [[bool(m) for m in row.mask] for row in data]
    own = torch.cat([torch.tensor(r.old_logprobs, dtype=torch.float64)[t] for r, t in zip(data, trained, strict=True)])
    ref = torch.cat([torch.tensor(r.ref_logprobs, dtype=torch.float64)[t] for r, t in zip(data, trained, strict=True)])
    found_d = own - ref
    assert found_d.mean().item() == pytest.approx(expected["k1"], abs=1e-5)
    assert (torch.expm1(-found_d) + found_d).mean().item() == pytest.approx(expected["k3"], abs=1e-5)
    assert expected["k3"] > 1e-3


def test_the_reference_can_be_the_adapter_that_training_started_from(update_of, tmp_path):
    first = update_of()
    run(first, sampled(first))
    folder = first.backend.backend.export_adapter(tmp_path / "adapter")["default"]
    update = update_of(
        algorithm={"kl_beta": 0.1, "reference": "initial_adapter", "old_logprobs": "trainer"},
        lora={"adapter_path": str(folder)},
    )
    found = sampled(update)
    update.run(rows(found), found, found.account, 1)
    (batch,) = update.backend.steps
    assert update.backend.passes[-1][0] == INITIAL_ADAPTER
    assert all(row.ref_logprobs == row.old_logprobs for row in batch)
    base = update.backend.backend.logprobs(batch, BASE, trained_only=True)
    assert all(row.ref_logprobs != values for row, values in zip(batch, base, strict=True))


def test_the_kl_in_the_reward_is_summed_over_a_trajectory_and_leaves_the_evaluators_reward_alone(update_of):
    beta = 0.3
    update = update_of(algorithm={"kl_in_reward": beta})
    for step in (1, 2):
        run(update, sampled(update, seed=step), step)
    found = sampled(update, seed=5, per_trajectory=2)
    uniform = found.units[0][0]
    for trajectory in uniform.trajectories:
        trajectory.reward = 1.0
    groups, metrics = update.with_kl_in_reward(found, 3)
    backend, per_token, shaped = update.backend.backend, [], []
    for before, after in zip(found.groups, groups, strict=True):
        for t, s in zip(before.trajectories, after.trajectories, strict=True):
            shaped.append(s.reward)
            assert s.steps is t.steps and t.reward in (0.0, 1.0)
            if before is uniform:
                assert s.reward == t.reward
                continue
            data = [Datum([*p.prompt_ids, *p.response_ids], [0] * 6 + [1] * len(p.response_ids)) for p in t.steps]
            own = torch.tensor([v for row in backend.logprobs(data, trained_only=True) for v in row])
            ref = torch.tensor([v for row in backend.logprobs(data, BASE, trained_only=True) for v in row])
            assert s.reward == pytest.approx(t.reward - beta * (own - ref).sum().item(), abs=1e-4)
            per_token.append(((own - ref).sum().item(), sum(d.n_trained for d in data)))
    assert metrics["critic/rewards/mean"] == pytest.approx(sum(shaped) / len(shaped))
    total, tokens = (sum(column) for column in zip(*per_token, strict=True))
    assert metrics["actor/kl_in_reward"] == pytest.approx(total / tokens, abs=1e-5)
    assert abs(total / tokens) > 1e-3
    data = rows(found, groups)
    assert found.account.dropped == {"zero_std": EACH}
    update.run(data, found, found.account, 3)
    found.account.check()


def test_a_fresh_adapter_has_no_kl_in_its_rewards(update_of):
    update = update_of(algorithm={"kl_in_reward": 0.5, "mini_batch_size": 2})
    found = sampled(update)
    groups, metrics = update.with_kl_in_reward(found, 1)
    assert metrics["actor/kl_in_reward"] == 0.0
    assert [t.reward for g in groups for t in g.trajectories] == [
        t.reward for g in found.groups for t in g.trajectories
    ]


def test_rollout_correction_weighs_by_trainer_over_sampler_and_says_how_far_they_are_apart(update_of):
    update = update_of(algorithm={"rollout_correction": {"level": "token", "cap": 1.2}})
    found = sampled(update, off=0.3)
    data = rows(found)
    trainer = update.backend.backend.logprobs(data, trained_only=True)
    metrics = update.run(data, found, found.account, 1)
    for row, values in zip(data, trainer, strict=True):
        expected = [
            min(math.exp(t - s), 1.2) if m else 0.0 for t, s, m in zip(values, row.logprobs, row.mask, strict=True)
        ]
        assert row.weights == pytest.approx(expected, abs=1e-5)
    assert 0 < metrics["rollout_correction/truncated"] < 1 and 0.5 < metrics["rollout_correction/ess"] < 1
    # Noise of 0.3 on the log-probabilities: the divergence is about 0.3^2 / 2.
    assert metrics["rollout_correction/kl_k3"] == pytest.approx(0.045, rel=0.5)


@pytest.mark.parametrize("mini_batch_size", [None, 2])
def test_rows_that_are_masked_whole_leave_the_update_and_are_counted(update_of, mini_batch_size):
    correction = {"level": "sequence", "mode": "mask", "cap": 1.5}
    update = update_of(algorithm={"rollout_correction": correction, "mini_batch_size": mini_batch_size})
    found = sampled(update)
    far = found.units[2][0].trajectories[1].steps[0]
    far.logprobs = [v - 1.0 for v in far.logprobs]
    metrics = run(update, found)
    trained = [row for batch in update.backend.steps for row in batch]
    assert len(trained) == TASKS * EACH - 1 and far.id not in {row.call for row in trained}
    assert found.account.dropped == {"off_policy": 1} and found.account.trained == TASKS * EACH - 1
    assert metrics["actor/tokens"] == sum(row.n_trained for row in trained)


def test_when_all_rows_are_masked_the_step_is_skipped(update_of):
    update = update_of(algorithm={"rollout_correction": {"level": "geometric", "mode": "mask", "cap": 1.5}})
    found = sampled(update)
    for unit in found.units:
        for trajectory in unit[0].trajectories:
            trajectory.steps[0].logprobs = [v - 2.0 for v in trajectory.steps[0].logprobs]
    metrics = run(update, found)
    assert metrics["train/skipped_steps"] == 1 and update.backend.steps == []
    assert found.account.dropped == {"off_policy": TASKS * EACH} and metrics["rollout_correction/masked"] == 1.0


def test_a_loss_that_is_no_number_changes_nothing_and_three_in_a_row_end_the_run(update_of):
    update = update_of()
    learner = update.backend.backend.learner
    before = [p.detach().clone() for p in learner.trainable()]
    update.backend.losses = iter([math.nan, math.inf, 0.1, math.nan, math.nan, math.nan])
    for _ in range(2):
        metrics = run(update, sampled(update))
        assert metrics["train/skipped_steps"] == 1 == metrics["train/nonfinite_steps"]
    assert all(torch.equal(p, b) for p, b in zip(learner.trainable(), before, strict=True))
    assert all(p.grad is None for p in learner.trainable())
    assert run(update, sampled(update))["train/optimizer_steps"] == 1
    run(update, sampled(update)), run(update, sampled(update))
    with pytest.raises(RunError, match=r"3 steps in a row .*loss nan.*lower optim\.lr \(now 0\.01\)"):
        run(update, sampled(update))


@pytest.mark.parametrize("epochs", [1, 2])
def test_what_no_finite_step_trained_is_counted_as_dropped(update_of, epochs):
    """One of three mini-batches fails; with a second pass over it, which does not, its trajectories are trained after all."""
    update = update_of(algorithm={"mini_batch_size": 2, "ppo_epochs": epochs})
    update.backend.losses = iter([0.1, math.nan, 0.1, 0.1, 0.1, 0.1])
    found = sampled(update)
    metrics = run(update, found)
    assert metrics["train/nonfinite_steps"] == 1 and metrics["train/optimizer_steps"] == 3 * epochs - 1
    lost = 2 * EACH if epochs == 1 else 0
    assert found.account.dropped["nonfinite"] == lost and found.account.trained == TASKS * EACH - lost


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        ({"loss": "reinforce"}, False),
        ({"loss": "cross_entropy"}, False),
        ({"loss": "reinforce", "per_role": {"judge": {"loss": "ppo_clip"}}}, True),
        ({"loss": "ppo_clip"}, True),
        ({"loss": "reinforce", "old_logprobs": "trainer"}, True),
    ],
)
def test_no_pass_is_made_for_losses_that_take_no_ratio(update_of, algorithm, passes):
    update = update_of(algorithm=algorithm | {"mini_batch_size": 2})
    run(update, sampled(update))
    assert bool(update.backend.passes) == passes == bool(why_trainer_logprobs(update.config))


def test_metrics_of_several_optimizer_steps_are_means_by_tokens_sums_and_largest(update_of):
    update = update_of(algorithm={"mini_batch_size": 4})
    found = sampled(update)
    numbers = iter([{"loss": 1.0, "tokens": 30.0, "ratio_max": 3.0}, {"loss": 4.0, "tokens": 10.0, "ratio_max": 2.0}])
    norms = iter([0.5, 1.5])
    update.backend.forward_backward = lambda data, loss: next(numbers)
    update.backend.optim_step = lambda params: {"grad_norm": next(norms), "lr": params.lr}
    metrics = run(update, found)
    assert metrics["actor/loss"] == pytest.approx((30 * 1.0 + 10 * 4.0) / 40)
    assert (metrics["actor/tokens"], metrics["actor/ratio_max"]) == (40.0, 3.0)
    assert metrics["actor/grad_norm"] == pytest.approx(0.75) and metrics["actor/grad_norm_max"] == 1.5


def test_two_steps_of_one_id_are_refused_where_rows_must_be_told_apart(update_of):
    update = update_of(algorithm={"mini_batch_size": 2})
    found = sampled(update)
    first, second = found.units[0][0].trajectories[:2]
    second.steps[0].id = first.steps[0].id
    with pytest.raises(DataError, match="two steps of this batch have the id"):
        run(update, found)


def test_the_rate_follows_the_training_steps():
    config = Config.model_validate({"optim": {"lr": 2.0, "schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.1}})
    rates = [adam_params(config, step, total=6).lr for step in range(1, 7)]
    assert rates == pytest.approx([0.002, 1.0, 2.0, 2 * 0.775, 2 * 0.55, 2 * 0.325])
    plain = Config.model_validate({"optim": {"lr": 0.5, "weight_decay": 0.1, "grad_clip": 0.3}})
    assert adam_params(plain, 5, 6) == AdamParams(0.5, 0.9, 0.95, 1e-8, 0.1, 0.3)
