"""The same rows give the same loss, metrics, gradients and weights through a Tinker server as in the local backend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tinker_client import near, rows, settings, tinker_backend
from tinker_server import Served

from rllm.algorithms.losses import LOSSES, register_loss
from rllm.backends.base import AdamParams, LossSpec
from rllm.backends.local.backend import LocalBackend
from rllm.config.names import AGGREGATIONS
from rllm.errors import RunError

ADAM = AdamParams(lr=1e-3, beta1=0.8, beta2=0.9, eps=1e-7, weight_decay=0.1, grad_clip=0.5)
# Of the largest gradient, in float32: the two add up the same terms in another order.
ROUNDING = 5e-5
OPTIONS = {"dro": {"beta": 0.3}}


class Pair:
    """A local backend and a tinker backend that begin with the same adapter. `gradients` of both after a forward_backward."""

    def __init__(self, local: LocalBackend, tinker: Any, served: Served):
        self.local, self.tinker, self.served = local, tinker, served

    def runs(self) -> dict[str, Any]:
        self.tinker._open()
        return {name: self.served.service.runs[client.model_id] for name, client in self.tinker.training.items()}

    def compare_gradients(self, rel: float) -> None:
        for name, run in self.runs().items():
            ours = [p.grad for p in self.local.adapters[name].parameters()]
            theirs = [p.grad for p in run.learner.trainable()]
            assert [g is None for g in ours] == [g is None for g in theirs]
            size = max((float(g.abs().max()) for g in ours if g is not None), default=0.0)
            for a, b in zip(ours, theirs, strict=True):
                if a is not None and b is not None:
                    assert float((a - b).abs().max()) <= rel * size, name

    def compare_weights(self, atol: float) -> None:
        for name, run in self.runs().items():
            mine = list(self.local.adapters[name].parameters())
            for a, b in zip(mine, run.learner.trainable(), strict=True):
                assert float((a - b).abs().max()) <= atol, name

    def forget(self) -> None:
        self.local.discard_gradients()
        for run in self.runs().values():
            run.learner.discard_gradients()
        self.tinker._with_gradient = set()


@pytest.fixture(scope="module")
def pair(served: Served) -> Iterator[Pair]:
    """Stepped once, so that the adapter has an effect and A a gradient."""
    with pytest.MonkeyPatch.context() as patch:
        tinker = tinker_backend(patch, served.url)
        local = LocalBackend.create(settings())
        made = Pair(local, tinker, served)
        data = rows()
        for backend in (local, tinker):
            backend.forward_backward(data, LossSpec("cross_entropy"))
            backend.optim_step(replace(ADAM, lr=1e-2))
            backend.publish()
        yield made
        tinker.close()
        local.close()


def compare(pair: Pair, data: Any, spec: Any, rel: float = ROUNDING) -> dict[str, float]:
    ours, theirs = (backend.forward_backward(data, spec) for backend in (pair.local, pair.tinker))
    assert set(ours) - set(theirs) <= {"entropy"}
    for name, value in theirs.items():
        assert value == pytest.approx(ours[name], rel=1e-4, abs=2e-5), name
    pair.compare_gradients(rel)
    pair.forget()
    return theirs


def test_a_fresh_adapter_and_its_first_step_are_the_local_ones(pair: Pair) -> None:
    pair.compare_weights(2e-4)  # after a step of 1e-2


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_and_aggregation_is_the_local_one(loss: str, aggregation: str, pair: Pair) -> None:
    spec = LossSpec(loss, 0.1, 0.15, 0.0, aggregation, 7.0, options=OPTIONS.get(loss, {}))
    data = near(rows(), pair.local.logprobs(rows()), 0.2)
    metrics = compare(pair, data, spec)
    if "clip_fraction" in metrics and loss != "gspo":
        assert 0 < metrics["clip_fraction"] < 1


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "dro", "reinforce"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k1+", "k3+"])
def test_a_kl_term_is_the_local_one(loss: str, kl: Any, pair: Pair) -> None:
    data = near(rows(), pair.local.logprobs(rows()), 0.2)
    for row, values in zip(data, pair.local.logprobs(data, "base", trained_only=True), strict=True):
        row.ref_logprobs = values
    compare(pair, data, LossSpec(loss, kl_beta=0.3, kl_estimator=kl))


@pytest.mark.parametrize("loss", ["ppo_clip", "dro", "gspo", "reinforce"])
def test_weights_of_tokens_and_old_logprobs_are_used_as_locally(loss: str, pair: Pair) -> None:
    data = near(rows(), pair.local.logprobs(rows()), 0.2)
    for row in data:
        row.old_logprobs = [v + 0.05 * m for v, m in zip(row.logprobs, row.mask, strict=True)]
        row.weights = [0.5 * m * (1 + i % 3) for i, m in enumerate(row.mask)]
    compare(pair, data, LossSpec(loss, aggregation="seq-mean-token-mean"))


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_after_a_step_the_dual_clip_is_the_local_one(loss: str, pair: Pair) -> None:
    data = near(rows(), pair.local.logprobs(rows()), 1.0)
    pair.tinker._steps_since_publish = 1
    try:
        metrics = compare(pair, data, LossSpec(loss, clip_c=1.05))
    finally:
        pair.tinker._steps_since_publish = 0
    assert metrics["clip_fraction_dual"] > 0


def test_losses_of_roles_add_up_and_weigh_as_locally(pair: Pair) -> None:
    data = near(rows(("solver", "judge")), pair.local.logprobs(rows()), 0.2)
    kinds = {"solver": LossSpec("ppo_clip", clip_c=0.0), "judge": LossSpec("cispo"), "": LossSpec("reinforce")}
    compare(pair, data, kinds)


def test_a_loss_of_the_users_own_trains_too(pair: Pair) -> None:
    @register_loss("squared_gap")
    def squared_gap(spec: Any, tokens: Any) -> Any:
        """(logp - old)^2"""
        return (tokens.logprobs - tokens.old).square() * tokens.advantages, {}

    try:  # its gradient is a difference of log-probabilities, so rounding shows more
        compare(pair, near(rows(), pair.local.logprobs(rows()), 0.5), LossSpec("squared_gap"), rel=3e-4)
    finally:
        LOSSES.pop("squared_gap")
        from rllm.config.names import LOSSES as KNOWN

        KNOWN.pop("squared_gap")


def test_a_fault_in_a_loss_of_the_users_own_is_told_as_such(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: Any, tokens: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setitem(LOSSES, "broken", broken)
    fresh = tinker_backend(
        monkeypatch, pair.served.url
    )  # the SDK takes no more requests for a run of which one failed here
    with pytest.raises(RunError, match=r"^algorithm\.loss=broken: the loss failed: ValueError: no such thing$"):
        fresh.forward_backward(rows(), LossSpec("broken"))
    with pytest.raises(RunError, match="poisoned"):
        fresh.train_step(rows(), LossSpec("reinforce"), ADAM)
    fresh.close()


def test_log_probabilities_of_policy_base_and_start_are_the_local_ones(pair: Pair) -> None:
    data = rows()
    for adapter in (None, "base", "initial"):
        for trained_only in (False, True):
            ours, theirs = (b.logprobs(data, adapter, trained_only) for b in (pair.local, pair.tinker))
            for a, b in zip(ours, theirs, strict=True):
                assert b == pytest.approx(a, abs=1e-4)


def test_optimizer_steps_are_the_local_ones_pipelined_or_not(pair: Pair) -> None:
    data = near(rows(), pair.local.logprobs(rows()), 0.1)
    spec = LossSpec("ppo_clip")
    told = pair.tinker.train_step(data, spec, ADAM)
    ours = pair.local.forward_backward(data, spec) | pair.local.optim_step(ADAM)
    assert told["grad_norm"] == pytest.approx(ours["grad_norm"], rel=3e-4) and told["loss"] == pytest.approx(
        ours["loss"], abs=1e-5
    )
    pair.compare_weights(3e-4)  # Adam makes a step of 1e-3 of any gradient, so of rounding too where there is none
    for backend in (pair.local, pair.tinker):
        backend.publish()
    assert pair.tinker.policy_version == pair.local.policy_version == 2


def test_a_second_optimizer_step_on_the_same_samples_is_the_local_one(pair: Pair) -> None:
    data = near(rows(), pair.local.logprobs(rows()), 1.0)
    spec = LossSpec("ppo_clip", clip_c=1.05)
    for backend in (pair.local, pair.tinker):
        backend.forward_backward(data, replace(spec, clip_c=0.0))
        backend.optim_step(replace(ADAM, lr=1e-5))
    metrics = compare(pair, data, spec, rel=3e-4)
    assert metrics["clip_fraction_dual"] > 0
    for backend in (pair.local, pair.tinker):
        backend.publish()


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_next_step_is_as_ever(pair: Pair) -> None:
    run = pair.runs()["default"]
    before = [p.detach().clone() for p in run.learner.trainable()]
    data = rows()
    for row in data:
        row.advantages = [1e38 * m for m in row.mask]
        row.logprobs = [-40.0 * m for m in row.mask]
    told = pair.tinker.train_step(data, LossSpec("importance_sampling"), ADAM)
    assert not math.isfinite(told["grad_norm"])
    assert all(bool((a == b).all()) for a, b in zip(before, run.learner.trainable(), strict=True))
    told = pair.tinker.train_step(near(rows(), pair.local.logprobs(rows()), 0.1), LossSpec("cispo"), ADAM)
    assert math.isfinite(told["grad_norm"]) and told["grad_norm"] > 0


def test_gradients_cannot_be_dropped_and_that_is_told(pair: Pair) -> None:
    pair.tinker.discard_gradients()
    pair.tinker.forward_backward(rows(), LossSpec("reinforce"))
    with pytest.raises(RunError, match="cannot discard gradients"):
        pair.tinker.discard_gradients()
    pair.forget()
