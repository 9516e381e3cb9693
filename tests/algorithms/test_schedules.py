"""The learning rate follows transformers' schedules of the same names."""

import pytest
import torch
from transformers import get_scheduler

from rllm.algorithms.schedules import LEAST_WARMUP, rate_factor, warmup_length

TOTAL = 37


def transformers_rates(name, warmup, min_ratio):
    kinds = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine_with_min_lr"}
    specific = {"min_lr_rate": min_ratio} if name == "cosine" else {}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(kinds[name], optimizer, warmup, TOTAL, scheduler_specific_kwargs=specific)
    rates = []
    for _ in range(TOTAL):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 9])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1])
def test_the_rates_of_all_steps_are_those_of_transformers(name, warmup, min_ratio):
    ours = [rate_factor(i, TOTAL, schedule=name, warmup=warmup, min_ratio=min_ratio) for i in range(TOTAL)]
    theirs = transformers_rates(name, warmup, min_ratio)
    if name == "linear":  # theirs ends at 0: the same line, raised to the minimum
        theirs = theirs[:warmup] + [min_ratio + (1 - min_ratio) * rate for rate in theirs[warmup:]]
    if warmup:  # theirs begins with a step of rate 0
        assert theirs[0] == 0.0 and ours[0] == LEAST_WARMUP
        ours[0] = 0.0
    assert ours == pytest.approx(theirs, abs=1e-12)


def test_steps_and_shares_of_the_run_say_the_same():
    for done in range(TOTAL):
        by_share = rate_factor(done / TOTAL, 1.0, schedule="cosine", warmup=0.2, min_ratio=0.1)
        assert rate_factor(done, TOTAL, schedule="cosine", warmup=0.2 * TOTAL, min_ratio=0.1) == pytest.approx(by_share)


def test_past_the_end_the_rate_stays_at_its_last():
    assert rate_factor(2 * TOTAL, TOTAL, schedule="cosine", min_ratio=0.1) == pytest.approx(0.1)
    assert rate_factor(2 * TOTAL, TOTAL, schedule="linear") == 0.0


def test_a_warm_up_given_in_steps_wins_over_a_share():
    assert warmup_length(200, None, 0.1) == 20
    assert warmup_length(200, 5, 0.1) == 5
    assert warmup_length(200, 0, 0.1) == 0
