"""A run ends when its metric has no new best for long enough, or is good enough."""

import math

import pytest

from rllm.config.schema import EarlyStopConfig
from rllm.early_stop import EarlyStop
from rllm.errors import ConfigError


def course(values, **settings):
    """(steps that were the best so far, step after which the run ends or None, reason)."""
    stop = EarlyStop(EarlyStopConfig(metric="val/x/acc", **settings))
    best = []
    for step, value in enumerate(values, 1):
        if stop.see(step, {"val/x/acc": value}):
            best.append(step)
        if stop.reason:
            return best, step, stop.reason
    return best, None, stop.reason


def test_it_waits_for_patience_validations_without_a_new_best():
    best, end, reason = course([0.1, 0.3, 0.2, 0.3, 0.4, 0.4, 0.1, 0.2], patience=3)
    assert (best, end) == ([1, 2, 5], 8)
    assert reason == "val/x/acc has no new best in 3 validations; the best is 0.4 after step 5"


def test_less_can_be_better_and_small_gains_can_be_none():
    assert course([3.0, 2.0, 2.5, 1.0], mode="min", patience=2)[:2] == ([1, 2, 4], None)
    assert course([0.50, 0.52, 0.54, 0.56], min_delta=0.05, patience=2)[:2] == ([1], 3)


@pytest.mark.parametrize(("mode", "values"), [("max", [0.5, 0.9, 0.1]), ("min", [0.99, 0.9, 1.0])])
def test_a_target_ends_the_run_at_once(mode, values):
    best, end, reason = course(values, mode=mode, target=0.9)
    assert (best, end) == ([1, 2], 2) and "the target 0.9 is reached" in reason


def test_a_value_that_is_no_number_is_never_the_best():
    best, end, reason = course([math.nan, math.nan], patience=2)
    assert (best, end) == ([], 2) and "none was finite" in reason


def test_a_name_that_no_validation_gives_is_told_with_those_there_are():
    stop = EarlyStop(EarlyStopConfig(metric="val/x/accc"))
    with pytest.raises(
        ConfigError, match=r"metric=val/x/accc: .*did you mean 'val/x/acc'\?\); there are val/x/acc, val/x/b"
    ):
        stop.check_name({"val/x/b": 0.0, "val/x/acc": 1.0})


def test_without_a_metric_nothing_ever_ends():
    stop = EarlyStop(EarlyStopConfig())
    assert not any(stop.see(step, {}) for step in range(10)) and not stop.reason
