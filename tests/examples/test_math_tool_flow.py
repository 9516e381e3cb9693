"""The math tool example: turns of model and tool, what each way of ending is worth, and chats that teach what they claim to."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import math_tool_flow as flow
import pytest

import rllm
from rllm.config.schema import Config
from rllm.gateway.server import Gateway
from rllm.rollouts.runner import EpisodeRequest, EpisodeRunner
from rllm.tools import parse_tool_calls
from rllm.types import Episode, Task, TerminationReason

FOLDER = Path(__file__).parents[2] / "examples" / "math_tool"
TASK = Task(id="t", metadata={"expression": "12 * 34 + 5", "value": 413})


def load(name: str) -> ModuleType:
    """A module of the example under a name of its own: both examples have a make_model.py."""
    spec = importlib.util.spec_from_file_location(f"math_tool_{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(code: str) -> str:
    return load("make_model").tool_call(code)


Play = Callable[[list[str]], Episode]


@pytest.fixture
def play(gateway: Gateway, backend: Any) -> Play:
    """The flow with a model that says these texts, one a turn."""

    def play(says: list[str]) -> Episode:
        backend.answer = lambda text: says[text.count("<|im_start|>assistant") - 1]
        config = Config.model_validate({"rollout": {"reward_workers": 0, "max_tokens": 200}})
        runner = EpisodeRunner(gateway, flow=flow.math_tool, evaluator=flow.math_evaluator, config=config)
        try:
            [episode] = runner.run([EpisodeRequest(TASK, "t:0")])
        finally:
            runner.close()
        assert not episode.failed, episode.error
        return episode

    return play


def test_the_result_of_the_tool_is_what_the_model_reads_next(play: Play, backend: Any) -> None:
    episode = play([call("12 * 34 + 5"), "<answer>413</answer>"])
    [trajectory] = episode.trajectories
    assert trajectory.metadata["tool_results"] == ["413"]
    assert (trajectory.reward, episode.is_correct, episode.termination_reason) == (
        1.0,
        True,
        TerminationReason.ENV_DONE,
    )
    assert episode.metrics == {"acc": 1.0, "used_tool": 1.0, "tool_errors": 0.0}
    first, second = trajectory.steps
    assert second.prompt_ids[: len(first.prompt_ids + first.response_ids)] == first.prompt_ids + first.response_ids
    assert "user\n413<|im_end|>" in backend.tokenizer.decode(second.prompt_ids)


def test_a_guess_is_one_turn_and_worth_nothing_unless_right(play: Play) -> None:
    episode = play(["I guess <answer>400</answer>"])
    assert (episode.trajectories[0].reward, len(episode.trajectories[0].steps)) == (0.0, 1)
    assert episode.metrics["used_tool"] == 0.0
    assert play(["<answer>413</answer>"]).trajectories[0].reward == 1.0


def test_a_call_that_cannot_be_read_is_answered_with_the_reason_and_the_turn_goes_on(play: Play) -> None:
    episode = play([call("12 * 34 + 5").replace('"}}', '"}'), call("12 * 34 + 5"), "<answer>413</answer>"])
    [wrong, right] = episode.trajectories[0].metadata["tool_results"]
    assert wrong.startswith("error: the tool call is not valid JSON") and right == "413"
    assert episode.trajectories[0].reward == 1.0 and episode.metrics["tool_errors"] == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '<tool_call>{"name": "shell", "arguments": {"code": "1"}}</tool_call>',
            "error: there is no tool called 'shell'",
        ),
        ('<tool_call>{"name": "python", "arguments": {}}</tool_call>', "error: wrong arguments for python: code"),
        ('<tool_call>{"name": "python", "arguments": {"code": "1/0"}}</tool_call>', "error: ZeroDivisionError"),
        (
            '<tool_call>{"name": "python", "arguments": {"code": "while 1: 0"}}</tool_call>',
            "error: the code did not end",
        ),
    ],
)
def test_every_other_fault_of_a_call_is_a_text_for_the_model_too(play: Play, text: str, says: str) -> None:
    episode = play([text, "<answer>1</answer>"])
    assert episode.trajectories[0].metadata["tool_results"][0].startswith(says)
    assert episode.trajectories[0].reward == 0.0


def test_running_out_of_turns_or_tokens_is_told_as_that_and_worth_nothing(play: Play) -> None:
    turns = play([call("1")] * flow.MAX_TURNS)
    assert turns.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert (len(turns.trajectories[0].steps), turns.trajectories[0].reward) == (flow.MAX_TURNS, 0.0)
    tokens = play(["x" * 500])
    assert tokens.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert len(tokens.trajectories[0].steps[0].response_ids) == 200, "never longer than allowed"


def test_no_problem_of_validation_is_in_training_or_in_the_chats_of_the_model() -> None:
    val = {task.id for task in flow.tasks("val", 128, 0)}
    assert len(val) == 128 and val.isdisjoint(task.id for task in flow.tasks("train", 512, 0))
    for row in load("make_model").chats(500, 0):
        assert not any(flow.prompt(problem) == row["messages"][0]["content"] for problem in val)
    assert all(eval(task.id) == task.metadata["value"] for task in flow.tasks("val", 32, 0))


def test_the_chats_hold_all_habits_and_their_good_calls_compute_what_was_asked() -> None:
    guesses = broken = good = 0
    for row in load("make_model").chats(400, 1):
        messages = row["messages"]
        expression = messages[0]["content"].removeprefix("Compute ").partition(". ")[0]
        for said, heard in zip(messages[1::2], messages[2::2], strict=False):
            [wanted] = parse_tool_calls(said["content"])
            if wanted.error:
                broken += 1
                assert heard["content"] == f"error: {wanted.error}"
            else:
                good += 1
                assert said["content"] == call(expression) and heard["content"] == str(eval(expression))
        guesses += "I guess" in messages[-1]["content"]
    assert min(guesses, broken, good) > 40


def test_the_flow_can_be_used_from_the_command_line() -> None:
    from rllm.cli.target import load_target

    found = load_target(str(FOLDER / "math_tool_flow.py"))
    assert found.flow is not None and found.evaluator is not None and found.train_dataset is not None
    resolved = rllm.load_config(defaults=found.defaults)
    assert len(found.train_dataset(resolved.config)) == 512
