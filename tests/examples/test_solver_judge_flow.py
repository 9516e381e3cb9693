"""The solver-judge example: how answers are read, who is rewarded for what, and which call belongs to whom.

The endpoint here is a script, since what is tested is the flow's own bookkeeping and not a model.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from openai import AsyncOpenAI

import rllm
from rllm.types import ModelOutput

FOLDER = Path(__file__).parents[2] / "examples" / "solver_judge"


def load_flow() -> ModuleType:
    spec = importlib.util.spec_from_file_location("solver_judge_flow", FOLDER / "solver_judge_flow.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


flow = load_flow()
TASK = rllm.Task(
    id="t",
    instruction="q",
    metadata={"question": "Using the numbers [3, 5, 7], make 26.", "nums": [3, 5, 7], "target": 26},
)
RIGHT, WRONG = "3 * 7 + 5", "3 + 5 + 7"
CONFIG = rllm.AgentConfig(base_url="http://endpoint/v1", model="m")


def episode(solutions: list[str], chosen: str | None) -> rllm.Episode:
    solvers = [rllm.Trajectory(name="solver", output=solution) for solution in solutions]
    return rllm.Episode(trajectories=[*solvers, rllm.Trajectory(name="judge", output=chosen)])


def judged(solutions: list[str], chosen: str | None) -> tuple[list[float | None], rllm.EvalOutput]:
    attempt = episode(solutions, chosen)
    output = flow.solver_judge_evaluator.evaluate(TASK, attempt)
    return [trajectory.reward for trajectory in attempt.trajectories], output


def test_each_solver_is_rewarded_for_its_own_answer_and_the_judge_for_the_one_it_selected() -> None:
    rewards, output = judged([WRONG, RIGHT], RIGHT)
    assert rewards == [0.0, 1.0, 1.0]
    assert (output.reward, output.is_correct) == (1.0, True)
    assert {s.name: s.value for s in output.signals} == {"solver_acc": 0.5, "judge_acc": 1.0}


def test_a_judge_that_selects_the_wrong_answer_makes_the_episode_wrong() -> None:
    rewards, output = judged([WRONG, RIGHT], WRONG)
    assert rewards == [0.0, 1.0, 0.0]
    assert not output.is_correct
    assert {s.name: s.value for s in output.signals} == {"solver_acc": 0.5, "judge_acc": 0.0}


@pytest.mark.parametrize("chosen", [None, "", "none"])
def test_a_judge_that_selects_nothing_gets_nothing_even_if_every_solver_is_right(chosen: str | None) -> None:
    rewards, output = judged([RIGHT, RIGHT], chosen)
    assert rewards == [1.0, 1.0, 0.0] and not output.is_correct


@pytest.mark.parametrize("answer", ["0", "3", "-1", "", "none", "1.0", "1 or 2", "\u0661", "\u00b2", "9" * 5000, "0x1"])
def test_an_index_outside_1_to_n_selects_nothing(answer: str) -> None:
    assert flow.parse_choice(f"<answer>{answer}</answer>", 2) is None


def test_the_last_index_counts_and_the_first_solution_is_1() -> None:
    assert flow.parse_choice("1: right <answer>1</answer>", 2) == 0
    assert flow.parse_choice("<answer>1</answer> no <answer> 2 </answer>", 2) == 1
    assert flow.parse_choice("2", 2) is None


@pytest.mark.parametrize("text", ["I do not know", "<answer></answer>", "<answer>3 + 5", ""])
def test_a_solver_without_an_answer_shows_the_judge_none(text: str) -> None:
    assert flow.parse_solution(text) == flow.NO_SOLUTION == "none"


def test_the_judge_sees_the_problem_and_every_numbered_solution() -> None:
    prompt = flow.judge_prompt("Using the numbers [3, 5, 7], make 26.", [WRONG, "none", RIGHT])
    for part in ("make 26", f"Solution 1: {WRONG}\n", "Solution 2: none\n", f"Solution 3: {RIGHT}\n", "<answer>"):
        assert part in prompt


def scripted(monkeypatch: pytest.MonkeyPatch, solver_replies: list[str], judge_reply: str) -> dict[str, str]:
    """Point the flow at an endpoint that answers solvers in reverse order of their calls; returns {call id: reply}."""
    replies: dict[str, str] = {}
    asked = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        assert str(request.url) == "http://endpoint/v1/chat/completions"
        prompt = json.loads(request.content)["messages"][-1]["content"]
        if "Solution 1:" in prompt:
            call, text = "call-judge", judge_reply
        else:
            call, text = f"call-{asked}", solver_replies[asked]
            asked += 1
            await asyncio.sleep(0.02 * (len(solver_replies) - asked))
        replies[call] = text
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return httpx.Response(
            200, json={"id": call, "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    transport = httpx.MockTransport(answer)
    http = httpx.AsyncClient(transport=transport)
    client = AsyncOpenAI(api_key="k", base_url="http://unused", http_client=http)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(flow, "_client", lambda: client)
    return replies


def test_calls_that_finish_out_of_order_stay_with_their_own_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"Maybe <answer>{i} + 1</answer>" for i in range(4)]
    replies = scripted(monkeypatch, texts, "<answer>3</answer>")
    task = rllm.Task(id="t", metadata=TASK.metadata | {"n_solutions": 4})
    result = flow.solver_judge.run(task, CONFIG)
    assert [t.name for t in result.trajectories] == ["solver"] * 4 + ["judge"]
    for trajectory in result.trajectories[:4]:
        assert flow.parse_solution(replies[trajectory.steps[0].id]) == trajectory.output == trajectory.steps[0].action
    judge = result.trajectories[4]
    assert judge.steps[0].id == "call-judge"
    assert judge.output == result.trajectories[2].output


def test_flow_and_evaluator_agree_on_a_right_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [f"<answer>{WRONG}</answer>", f"<answer>{RIGHT}</answer>"], "2: right\n<answer>2</answer>")
    result = flow.solver_judge.run(TASK, CONFIG)
    output = flow.solver_judge_evaluator.evaluate(TASK, result)
    assert output.is_correct and [t.reward for t in result.trajectories] == [0.0, 1.0, 1.0]


class ScriptedEngine:
    """What a workflow calls the model through, answering from a list."""

    def __init__(self, replies: list[str]):
        self.replies = iter(replies)

    async def get_model_response(self, messages: list[dict], **sampling) -> ModelOutput:
        text = next(self.replies)
        return ModelOutput(text[:4], text, text, [1], [2], [-0.5], [0], "stop")


@pytest.mark.parametrize(("pick", "reward"), [("2", 1.0), ("1", 0.0), ("7", 0.0)])
def test_the_workflow_form_gives_the_same_rewards_as_flow_and_evaluator(pick: str, reward: float) -> None:
    engine = ScriptedEngine([f"<answer>{WRONG}</answer>", f"<answer>{RIGHT}</answer>", f"<answer>{pick}</answer>"])
    workflow = flow.SolverJudgeWorkflow(engine, n_solutions=2)
    result = asyncio.run(workflow.run(TASK.metadata, "t:0"))
    chosen = result.trajectories[-1].output
    rewards, output = judged([WRONG, RIGHT], chosen)
    assert [t.reward for t in result.trajectories] == rewards == [0.0, 1.0, reward]
    assert result.metrics == {s.name: s.value for s in output.signals}
    assert result.is_correct == output.is_correct


def test_the_number_of_solvers_comes_from_the_environment_and_nonsense_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("N_SOLUTIONS", "4")
    assert load_flow().N_SOLUTIONS == 4
    for text in ("0", "-1", "two", ""):
        monkeypatch.setenv("N_SOLUTIONS", text)
        with pytest.raises(rllm.UserError, match="whole number of at least 1"):
            load_flow()


def test_validation_problems_are_256_and_the_same_for_every_seed_and_none_is_trained_on() -> None:
    configs = [rllm.Config.model_validate({"trainer": {"seed": seed}}) for seed in (0, 7)]
    validation = [[task.id for task in flow.val_dataset(config)] for config in configs]
    assert validation[0] == validation[1] and len(validation[0]) == 256
    trained = {
        (tuple(sorted(t.metadata["nums"])), t.metadata["target"]) for c in configs for t in flow.train_dataset(c)
    }
    held_out = {(tuple(sorted(t.metadata["nums"])), t.metadata["target"]) for t in flow.val_dataset(configs[0])}
    assert not trained & held_out
