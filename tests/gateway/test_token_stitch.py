"""Turns become rows as the reference cases say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rllm.algorithms.datums import rows_of
from rllm.types import Step, Trajectory

CASES = json.loads((Path(__file__).parents[1] / "reference" / "cases.json").read_text())
STITCH = [case for case in CASES if case["kind"] == "token_stitch"]


def stitch(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of recorded turns."""
    steps = [Step(prompt_ids=t["prompt"], response_ids=t["completion"], logprobs=t["logp"]) for t in turns]
    rows = rows_of(Trajectory(steps=steps), [1.0] * len(steps))
    return [{"tokens": row.ids, "mask": row.mask, "logp": row.logprobs} for row in rows]


def test_all_reference_cases_are_here() -> None:
    assert {case["id"] for case in STITCH} == {"stitch-prefix-ok", "stitch-empty-completion", "stitch-logp-misaligned"}


@pytest.mark.parametrize("case", STITCH, ids=lambda case: case["id"])
def test_turns_are_stitched_as_the_case_says(case: dict[str, Any]) -> None:
    turns, expected = case["input"]["turns"], case["expected"]
    if "error" in expected:
        with pytest.raises(ValueError, match="response ids but 1 logprobs"):
            stitch(turns)
    else:
        assert stitch(turns) == expected["segments"]


def test_a_turn_that_does_not_begin_with_the_one_before_starts_a_row_and_loses_nothing() -> None:
    turns = [
        {"prompt": [1, 2], "completion": [3, 4], "logp": [-0.1, -0.2]},
        {"prompt": [1, 2, 3, 9], "completion": [5], "logp": [-0.3]},
        {"prompt": [1, 2, 3, 9, 5, 6], "completion": [7], "logp": [-0.4]},
    ]
    assert stitch(turns) == [
        {"tokens": [1, 2, 3, 4], "mask": [0, 0, 1, 1], "logp": [0, 0, -0.1, -0.2]},
        {"tokens": [1, 2, 3, 9, 5, 6, 7], "mask": [0, 0, 0, 0, 1, 0, 1], "logp": [0, 0, 0, 0, -0.3, 0, -0.4]},
    ]
