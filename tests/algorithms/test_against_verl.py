"""On 1,000 random ragged batches our advantages, losses, aggregations and KL terms are what verl 0.9.1's own functions gave.

`tests/reference/make_verl_reference.py` made the answers and draws the inputs. Where our convention differs, the difference is what is
asserted.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rllm.algorithms.advantages import RewardGroup, estimate
from rllm.algorithms.losses import Tokens, kl_terms, token_loss, token_weights
from rllm.algorithms.spec import LossSpec

REFERENCE = Path(__file__).parents[1] / "reference"


def _make_verl_reference():
    spec = importlib.util.spec_from_file_location("make_verl_reference", REFERENCE / "make_verl_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_verl_reference"] = module
    spec.loader.exec_module(module)
    return module


made = _make_verl_reference()
BATCHES = list(made.batches())
OUTPUTS = np.load(made.OUTPUTS)


def ours(name, batch, std="sample"):
    """(advantage of every row in the batch's order, its group's size, its group's sample std) [rows] each"""
    members = [np.flatnonzero(batch.groups == g) for g in np.unique(batch.groups)]
    lengths = batch.mask.sum(1)
    groups = [RewardGroup(batch.rewards[m].tolist(), lengths[m].tolist()) for m in members]
    result, sizes, stds = (np.zeros(len(batch.groups)) for _ in range(3))
    for m, values in zip(members, estimate(name, groups, std), strict=True):
        result[m], sizes[m] = values, len(m)
        stds[m] = np.std(batch.rewards[m], ddof=1) if len(m) > 1 else 0.0
    return result, sizes, stds


def all_ours(name, std="sample"):
    return tuple(np.concatenate(parts) for parts in zip(*(ours(name, batch, std) for batch in BATCHES), strict=True))


REWARDS = np.concatenate([batch.rewards for batch in BATCHES])


def close(found, expected, rtol=2e-6):
    """float32 rounding of what was stored, relative to the size of the numbers around"""
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def test_grpo_is_verls_but_for_the_epsilon_that_verl_adds_to_the_standard_deviation():
    found, sizes, stds = all_ours("grpo")
    theirs = OUTPUTS["advantages/grpo"]
    compared = (sizes > 1) & (stds > 1e-6)
    assert compared.sum() > 5000
    np.testing.assert_allclose(
        found[compared] * (stds / (stds + 1e-6))[compared], theirs[compared], rtol=1e-5, atol=1e-6
    )
    uniform = (sizes > 1) & ~compared
    assert uniform.sum() > 500 and not found[uniform].any() and np.abs(theirs[uniform]).max() < 1e-6


@pytest.mark.parametrize(
    ("name", "std", "theirs"),
    [
        ("dr_grpo", "sample", "grpo_no_std"),
        ("rloo", "sample", "rloo"),
        ("opo", "sample", "opo"),
        ("grpo", "none", "grpo_no_std"),
    ],
)
def test_estimators_without_a_standard_deviation_are_verls(name, std, theirs):
    found, sizes, _ = all_ours(name, std)
    close(found[sizes > 1], OUTPUTS[f"advantages/{theirs}"][sizes > 1])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
def test_a_group_of_one_has_advantage_0_here_and_its_raw_reward_in_verl(name):
    found, sizes, _ = all_ours(name)
    alone = sizes == 1
    theirs = OUTPUTS["advantages/grpo_no_std" if name == "dr_grpo" else f"advantages/{name}"]
    assert alone.sum() > 300 and not found[alone].any()
    np.testing.assert_allclose(theirs[alone], REWARDS[alone], rtol=1e-5)


def batchwise(name, wanted):
    """(ours, verl's) over the batches that are `wanted` and whose whitened values have some spread"""
    pairs, start = [], 0
    for batch in BATCHES:
        stop = start + len(batch.groups)
        theirs = OUTPUTS[f"advantages/{name}"][start:stop]
        start = stop
        if wanted(batch) and np.abs(theirs).max() > 1e-2:
            pairs.append((ours(name, batch)[0], theirs))
    return pairs


def test_reinforce_plus_plus_is_verls_without_a_discount():
    pairs = batchwise("reinforce_plus_plus", lambda batch: np.std(batch.rewards) > 0.1)
    assert len(pairs) > 500
    for found, theirs in pairs:  # verl adds 1e-8 to the variance
        np.testing.assert_allclose(found, theirs, rtol=5e-6, atol=2e-6)


def test_reinforce_plus_plus_baseline_is_verls_where_every_group_has_two():
    def wanted(batch):
        return np.unique(batch.groups, return_counts=True)[1].min() > 1 and np.std(batch.rewards) > 0.3

    pairs = batchwise("reinforce_plus_plus_baseline", wanted)
    assert len(pairs) > 200
    for found, theirs in pairs:
        np.testing.assert_allclose(found, theirs, rtol=5e-5, atol=2e-5)


def tokens_of(batch, logprobs):
    at = torch.tensor(batch.loss_mask)
    rows = torch.arange(len(batch.groups))[:, None].expand(at.shape)[at]
    _, rows = torch.unique_consecutive(rows, return_inverse=True)
    return at, Tokens(logprobs[at], torch.tensor(batch.old)[at], torch.tensor(batch.advantages)[at], rows)


def test_losses_and_gradients_under_every_aggregation_are_verls():
    """Every aggregation is one weight a token, so one gradient of the token losses serves all."""
    found = np.zeros_like(OUTPUTS["losses"], dtype=np.float64)
    for b, batch in enumerate(BATCHES):
        logprobs = torch.tensor(batch.logprobs, requires_grad=True)
        at, tokens = tokens_of(batch, logprobs)
        counts = batch.loss_mask.sum(1)
        for i, name in enumerate(made.LOSSES):
            spec = LossSpec(name, batch.clip_low, batch.clip_high, batch.clip_c, options={"beta": batch.beta})
            if name == "gspo":
                spec = LossSpec(name, batch.clip_low, batch.clip_high)  # verl's gspo has no dual clip
            loss, _ = token_loss(spec, tokens)
            if batch.weights is not None:
                loss = loss * torch.tensor(batch.weights)[at]
            (gradient,) = torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)
            probed = (gradient * torch.tensor(batch.probe))[at].numpy()
            for j, mode in enumerate(made.AGGREGATIONS):
                row_weights = token_weights(LossSpec(aggregation=mode, norm=batch.norm), counts.tolist())
                weights = np.repeat(row_weights, counts)
                found[b, i, j] = (weights * loss.detach().numpy()).sum(), (weights * probed).sum()
    for i, name in enumerate(made.LOSSES):
        # Sums of terms of either sign: what rounding leaves is relative to the terms.
        np.testing.assert_allclose(found[:, i], OUTPUTS["losses"][:, i], rtol=3e-6, atol=1e-5, err_msg=name)


def test_kl_terms_and_their_gradients_are_verls():
    found = np.zeros_like(OUTPUTS["kl"], dtype=np.float64)
    for b, batch in enumerate(BATCHES):
        mask, ref, probe = torch.tensor(batch.mask), torch.tensor(batch.ref), torch.tensor(batch.probe)
        for i, name in enumerate(made.KL):
            logprobs = torch.tensor(batch.logprobs, requires_grad=True)
            total = (kl_terms(logprobs, ref, name) * mask).sum()
            (gradient,) = torch.autograd.grad(total, logprobs)
            found[b, i] = total.item(), (gradient * probe).sum().item()
    np.testing.assert_allclose(found, OUTPUTS["kl"], rtol=3e-6, atol=1e-5)


def test_k3_is_not_cut_off_at_10_as_it_is_in_verl():
    far = torch.tensor([-3.0], dtype=torch.float64)
    assert kl_terms(far, torch.zeros(1, dtype=torch.float64), "k3").item() == pytest.approx(np.exp(3.0) - 1 - 3.0)
