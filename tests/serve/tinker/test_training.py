"""The unmodified SDK trains over a real server: losses, gradients and steps are those of a float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from float64_model import Float64Model
from tinker_server import Served, datum

from rllm.serve.tinker import proto

TEXTS = [list(range(30, 52)), [4, 77, 301, 12, 12, 500, 639], list(range(600, 560, -3))]
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]


def rows_of(sdk: Any, loss: str, logprobs: list[np.ndarray] | None = None) -> list[Any]:
    """Rows of several lengths; ratios near 1, so that clipping bites at some tokens and not at others."""
    rng, rows = np.random.default_rng(5), []
    for i, text in enumerate(TEXTS):
        n = len(text) - 1
        if loss == "cross_entropy":
            rows.append(datum(sdk, text, weights=[round(w, 3) for w in rng.normal(size=n)]))
            continue
        advantages = rng.normal(size=n)
        advantages[: n // 3] = 0.0
        near = np.zeros(n) if logprobs is None else logprobs[i] + rng.normal(size=n) * 0.3
        near[: n // 3] = 0.0
        rows.append(datum(sdk, text, logprobs=near.tolist(), advantages=advantages.tolist()))
    return rows


def reference_terms(loss: str, lp: torch.Tensor, row: Any) -> torch.Tensor:
    """The loss of every token."""
    given = {key: torch.tensor(data.data, dtype=torch.float64) for key, data in row.loss_fn_inputs.items()}
    if loss == "cross_entropy":
        return -given["weights"] * lp
    q, a = given["logprobs"], given["advantages"]
    ratio = torch.exp(lp - q)
    if loss == "importance_sampling":
        return -ratio * a
    if loss == "ppo":
        return -torch.minimum(ratio * a, ratio.clip(0.8, 1.2) * a)
    if loss == "cispo":
        return -ratio.detach().clip(0.0, 4.0) * lp * a
    if loss == "dro":
        return -(lp * a - 0.025 * (lp - q) ** 2)
    told = (a != 0) | (q != 0)
    s = torch.exp((lp - q)[told].mean().detach()) * torch.exp(lp - lp.detach())
    return -torch.minimum(s * a, s.clip(0.8, 1.2) * a)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_float64(loss: str, sdk: Any, served: Served, training: Any) -> None:
    run = served.service.runs[training.model_id]
    first = training.forward(rows_of(sdk, "cross_entropy"), "cross_entropy").result(timeout=60)
    rows = rows_of(sdk, loss, [out["logprobs"].to_numpy() for out in first.loss_fn_outputs])
    got = training.forward_backward(rows, loss).result(timeout=60)
    reference = Float64Model(run)
    terms = []
    for text, row, out in zip(TEXTS, rows, got.loss_fn_outputs, strict=True):
        lp = reference.logprobs(text[:-1], torch.tensor(text[1:]))
        assert np.abs(out["logprobs"].to_numpy() - lp.detach().numpy()).max() < 1e-4
        terms.append(reference_terms(loss, lp, row))
    total = torch.cat(terms).sum()
    total.backward()
    # Terms of both signs cancel; what may be off is a share of what is added up.
    size = torch.cat(terms).abs().sum().item()
    assert got.metrics["loss:sum"] == pytest.approx(total.item(), abs=1e-5 * size)
    assert reference.gradient_gap(run) < 1e-5
    norm = torch.cat([m.grad.flatten() for pair in reference.matrices.values() for m in pair if m.grad is not None])
    step = training.optim_step(sdk.AdamParams(learning_rate=0.0)).result(timeout=60)
    assert step.metrics["unclipped_grad_l2:mean"] == pytest.approx(norm.norm().item(), rel=1e-5)


def custom(loss: str) -> Callable[..., Any]:
    def function(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        each = [reference_terms(loss, lp.double(), row).sum() for lp, row in zip(logprobs, data, strict=True)]
        return torch.stack(each).sum(), {"rows": float(len(data))}

    return function


@pytest.mark.parametrize("loss", LOSSES)
def test_a_built_in_loss_is_the_same_maths_given_as_a_custom_loss(
    loss: str, sdk: Any, served: Served, training: Any
) -> None:
    run = served.service.runs[training.model_id]
    rows = rows_of(sdk, loss, [np.full(len(text) - 1, -2.0) for text in TEXTS])
    built_in = training.forward_backward(rows, loss).result(timeout=60).metrics["loss:sum"]
    gradients = [p.grad.clone() for p in run.learner.trainable()]
    training.optim_step(sdk.AdamParams(learning_rate=0.0)).result(timeout=60)
    got = training.forward_backward_custom(rows, custom(loss)).result(timeout=60)
    assert got.metrics["loss:sum"] == pytest.approx(built_in, rel=1e-5)
    assert got.metrics["rows"] == 3.0
    for parameter, wanted in zip(run.learner.trainable(), gradients, strict=True):
        assert (parameter.grad - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_many_targets_at_a_position_dense_or_sparse_are_a_distribution(sdk: Any, served: Served, training: Any) -> None:
    run, ids = served.service.runs[training.model_id], [5, 6, 7, 8]
    targets = torch.zeros(4, 30, dtype=torch.int64)
    weights = torch.zeros(4, 30)
    targets[:, :2] = torch.tensor([[9, 10], [11, 12], [13, 14], [15, 16]])
    weights[:, :2] = torch.tensor([[0.25, 0.75], [1.0, -0.5], [0.0, 0.0], [0.125, 2.0]])
    sparse = sdk.Datum(
        model_input=sdk.ModelInput.from_ints(ids), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    plain = {"target_tokens": targets[:, :2].numpy(), "weights": weights[:, :2].numpy()}
    dense = sdk.Datum(model_input=sdk.ModelInput.from_ints(ids), loss_fn_inputs=plain)
    got = training.forward_backward([sparse], "cross_entropy").result(timeout=60)
    reference = Float64Model(run)
    loss = -(weights[:, :2] * reference.logprobs(ids, targets[:, :2])).sum()
    loss.backward()
    assert got.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert got.loss_fn_outputs[0]["logprobs"].shape == [4, 30]
    assert reference.gradient_gap(run) < 1e-5
    both = training.forward([dense, datum(sdk, ids, weights=[1.0] * 3)], "cross_entropy").result(timeout=60)
    assert [out["logprobs"].shape for out in both.loss_fn_outputs] == [[4, 2], [3]]
    assert np.allclose(
        both.loss_fn_outputs[0]["logprobs"].to_numpy().sum(), reference.logprobs(ids, targets[:, :2]).sum().item()
    )


def test_gradients_add_up_until_a_step_which_is_torchs_adamw(sdk: Any, served: Served, client: Any) -> None:
    training = client.create_lora_training_client("default", rank=3, seed=11, train_unembed=False).result(timeout=30)
    run = served.service.runs[training.model_id]
    reference = Float64Model(run)
    assert not any("lm_head" in name for name in reference.matrices)
    ours = [m for pair in reference.matrices.values() for m in pair]
    rows = rows_of(sdk, "cross_entropy")
    params = sdk.AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    optimizer = torch.optim.AdamW(ours, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(3):
        futures = [training.forward_backward([row], "cross_entropy") for row in rows]
        step = training.optim_step(params)
        [future.result(timeout=60) for future in futures]
        norm = step.result(timeout=60).metrics["unclipped_grad_l2:mean"]
        for text, row in zip(TEXTS, rows, strict=True):
            reference_terms(
                "cross_entropy", reference.logprobs(text[:-1], torch.tensor(text[1:])), row
            ).sum().backward()
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(ours, 0.5).item(), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    adapter = run.learner.adapters["run"]
    for name, pair in reference.matrices.items():
        for mine, theirs in zip(pair, adapter.matrices(name), strict=True):
            assert (mine - theirs.cpu()).abs().max() < 1e-4


def test_the_seed_decides_the_start_and_switches_what_is_trained(served: Served) -> None:
    def matrices(**lora: Any) -> dict[str, torch.Tensor]:
        adapter = served.service.runs[served.model(rank=2, **lora)].learner.adapters["run"]
        return {name: adapter.matrices(name)[0].detach().clone() for name in adapter.modules_adapted}

    one, same, other = matrices(seed=1), matrices(seed=1), matrices(seed=2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert "lm_head" in one and "lm_head" not in matrices(train_unembed=False)
    assert {name.rpartition(".")[2] for name in matrices(train_mlp=False, train_unembed=False)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert set(matrices(train_mlp=False, train_attn=False)) == {"lm_head"}
    assert torch.equal(
        matrices()["lm_head"], matrices()["lm_head"]
    )  # a script without a seed is the same run each time


def test_the_scale_is_alpha_over_rank(served: Served) -> None:
    for rank in (1, 4, 32):
        adapter = served.service.runs[served.model(rank=rank)].learner.adapters["run"]
        assert set(adapter.scales.values()) == {32 / rank}
    assert served.post("/get_info", {"model_id": served.model(rank=4)})["lora_alpha"] == 32.0


def train_body(model: str, seq: int | None, weight: float = 1.0, tokens: tuple[int, ...] = (5, 6, 7)) -> dict[str, Any]:
    inputs = {
        "target_tokens": {"data": list(tokens), "dtype": "int64"},
        "weights": {"data": [weight] * len(tokens), "dtype": "float32"},
    }
    data = [{"model_input": {"chunks": [{"tokens": list(tokens)}]}, "loss_fn_inputs": inputs}]
    body: dict[str, Any] = {"forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}, "model_id": model}
    return body if seq is None else {**body, "seq_id": seq}


def test_requests_are_done_in_the_order_of_their_numbers(served: Served) -> None:
    model = served.model()
    lr = {"model_id": model, "adam_params": {"learning_rate": 0.1}}
    third = served.post("/optim_step", {**lr, "seq_id": 3})
    second = served.post("/forward_backward", train_body(model, 2))
    assert not served.service.futures._all[third["request_id"]].done.is_set()
    served.post("/forward_backward", train_body(model, 1))
    assert served.result(third)["metrics"]["unclipped_grad_l2:mean"] > 0
    assert served.result(second)["metrics"]["loss:sum"] > 0


def test_a_request_sent_twice_is_done_once(served: Served) -> None:
    model = served.model()
    body = train_body(model, 1)
    first = served.post("/forward_backward", body)
    assert served.post("/forward_backward", body) == first
    changed = served.http.post("/forward_backward", json=train_body(model, 1, weight=2.0))
    assert changed.status_code == 400 and "used before" in changed.json()["error"]
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.0}}
    once = served.result(served.post("/optim_step", step))["metrics"]["unclipped_grad_l2:mean"]
    served.post("/forward_backward", train_body(model, 3))
    again = served.result(served.post("/optim_step", {**step, "seq_id": 4}))["metrics"]["unclipped_grad_l2:mean"]
    assert again == pytest.approx(once)


def test_a_refused_request_does_not_hold_up_those_after_it(served: Served) -> None:
    model = served.model()
    bad = served.http.post("/forward_backward", json=train_body(model, 1, tokens=(5, 640)))
    assert (bad.status_code, "token 640 is outside of the vocabulary of 640" in bad.json()["error"]) == (400, True)
    message = proto.ForwardBackwardRequest(model_id=model, seq_id=2, loss_fn="cross_entropy")
    message.data.add().model_input.add().image.data = b"png"
    kind = {"content-type": "application/x-protobuf"}
    assert served.http.post("/forward_backward", content=message.SerializeToString(), headers=kind).status_code == 400
    refused = {
        "/optim_step": {"adam_params": {"learning_rate": -1}},
        "/save_weights": {"path": "a/b"},
        "/save_weights_for_sampler": {"kind": "other"},
        "/load_weights": {"path": "x", "optimizer_config": {"type": "sgd"}},
        "/save_weights_external": {"path": "x", "age_encryption_recipients": ["age1"]},
        "/forward": {"forward_input": {"data": 3}},
    }
    for number, (path, body) in enumerate(refused.items(), start=3):
        assert served.http.post(path, json={"model_id": model, "seq_id": number, **body}).status_code == 400, path
    assert served.result(served.post("/forward_backward", train_body(model, 9)))["metrics"]["loss:sum"] > 0


def test_the_json_form_gets_its_result_as_json(served: Served) -> None:
    got = served.result(served.post("/forward_backward", train_body(served.model(), None)))
    assert got["loss_fn_outputs"][0]["logprobs"]["shape"] == [3]
    assert got["metrics"]["loss:sum"] == pytest.approx(-sum(got["loss_fn_outputs"][0]["logprobs"]["data"]), rel=1e-5)


def test_a_result_that_takes_long_is_asked_for_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.serve.tinker.futures.HOLD_S", 0.2)
    waiting = served.post("/forward_backward", train_body(served.model(), 2))
    answer = served.http.post("/retrieve_future", json={"request_id": waiting["request_id"]})
    assert (answer.status_code, answer.json()["type"]) == (408, "try_again")
    assert served.http.post("/retrieve_future", json={"request_id": "nothing"}).status_code == 410


def test_gradients_that_are_not_finite_change_nothing_and_are_told(served: Served) -> None:
    model = served.model()
    run = served.service.runs[model]
    before = [p.detach().clone() for p in run.learner.trainable()]
    served.result(served.post("/forward_backward", train_body(model, 1, weight=3e38)))
    told = served.result(served.post("/optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}))
    assert told["category"] == "user" and "no step was made" in told["error"]
    assert all(torch.equal(a, b) for a, b in zip(before, run.learner.trainable(), strict=True))
    served.post("/forward_backward", train_body(model, 3))
    assert "metrics" in served.result(served.post("/optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}}))


def test_a_failure_in_the_middle_fails_the_step_that_would_use_half_a_gradient(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served.model()
    learner = served.service.runs[model].learner

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(learner, "_score", broken)
        failed = served.result(served.post("/forward_backward", train_body(model, 1)))
    assert failed == {"error": "RuntimeError: out of memory", "category": "server"}
    step = {"model_id": model, "adam_params": {}}
    assert "out of memory" in served.result(served.post("/optim_step", {**step, "seq_id": 2}))["error"]
    served.post("/forward_backward", train_body(model, 3))
    assert "metrics" in served.result(served.post("/optim_step", {**step, "seq_id": 4}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"base_model": "Qwen/Qwen3-8B"}, "this server has 'default'"),
        ({"lora_config": {"rank": 0}}, "1 to 512"),
        ({"lora_config": {"rank": 4096}}, "1 to 512"),
        ({"lora_config": {"rank": 4, "train_mlp": False, "train_attn": False, "train_unembed": False}}, "nothing"),
        ({"lora_config": {"rank": 4, "alpha": 8}}, "lora_config.alpha: not known"),
        ({"optimizer_config": {"type": "dimuon"}}, "'dimuon' is not served here; there is adamw"),
        ({"session_id": "nobody"}, "no session 'nobody'"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(served: Served, change: dict[str, Any], told: str) -> None:
    body = {"session_id": served.session(), "model_seq_id": 0, "base_model": "default", **change}
    answer = served.http.post("/create_model", json=body)
    assert 400 <= answer.status_code < 500 and told in answer.json()["error"]


def test_a_client_of_ours_is_told_about_the_server_and_may_state_its_alpha(served: Served) -> None:
    about = served.post("/client/config", {"sdk_version": "test"})["rllm"]
    assert about["lora_alpha"] == served.service.alpha and "gspo" in about["losses"] and about["dtype"] == "float32"
    body = {"session_id": served.session(), "base_model": "default", "lora_config": {"rank": 4}}
    for number, (metadata, alpha) in enumerate(
        ((None, 32.0), ({"by": "us"}, 32.0), ({about["alpha_metadata"]: "6.5"}, 6.5))
    ):
        reply = served.post("/create_model", {**body, "model_seq_id": number, "user_metadata": metadata})
        assert served.service.runs[served.result(reply)["model_id"]].spec.alpha == alpha
    for wrong in ("0", "-1", "nan", "much", None):
        refused = {**body, "model_seq_id": 9, "user_metadata": {about["alpha_metadata"]: wrong}}
        answer = served.http.post("/create_model", json=refused)
        if wrong is None:  # says nothing
            assert answer.status_code == 200
        else:
            assert answer.status_code == 400 and "it must be a number above 0" in answer.json()["error"]
