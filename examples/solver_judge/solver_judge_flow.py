"""Solver-judge: several solvers try a countdown problem at once, a judge picks one of their answers, each role is rewarded.

    rllm train examples/solver_judge/solver_judge_flow.py

An ordinary async function against an OpenAI client. Knows nothing of training.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache

from openai import AsyncOpenAI

import rllm
from rllm.data.countdown import countdown
from rllm.rewards.countdown import countdown_reward, last_answer

NO_SOLUTION = "none"


def _n_solutions() -> int:
    """How many solvers try each problem: the environment variable N_SOLUTIONS, default 2."""
    text = os.environ.get("N_SOLUTIONS", "2")
    if not text.isdecimal() or int(text) < 1:
        raise rllm.UserError(f"N_SOLUTIONS={text!r}; give a whole number of at least 1")
    return int(text)


N_SOLUTIONS = _n_solutions()

# What this example trains with unless the command line says otherwise.
DEFAULTS = {
    "model.path": "default",
    "lora.rank": 8,
    "lora.alpha": 8,
    "lora.target_modules": "all-linear",
    "data.train_batch_size": 16,
    "data.max_prompt_length": 256,
    "data.max_response_length": 160,
    "rollout.n": 4,
    "optim.lr": 3e-3,
    "trainer.total_steps": 18,
}


@cache
def _client() -> AsyncOpenAI:
    """One client for the process: making one costs tens of milliseconds, pointing it elsewhere nothing."""
    return AsyncOpenAI(api_key="unused", base_url="http://unused", max_retries=0, timeout=600)


def solver_prompt(question: str) -> str:
    return f"{question} Output the final answer within <answer>...</answer>."


def judge_prompt(question: str, solutions: list[str]) -> str:
    listed = "\n".join(f"Solution {i}: {solution}" for i, solution in enumerate(solutions, 1))
    return f"{question}\n{listed}\nCheck each solution. Output the index of the right one within <answer>...</answer>."


def parse_solution(text: str) -> str:
    """The expression a solver answered with, or `NO_SOLUTION`."""
    return last_answer(text) or NO_SOLUTION


def parse_choice(text: str, n: int) -> int | None:
    """The judge's index as 0..n-1. An index outside 1..n, or none at all, selects nothing."""
    answer = last_answer(text)
    if answer is None or not answer.isascii() or not answer.isdigit() or len(answer) > 4:
        return None
    return int(answer) - 1 if 1 <= int(answer) <= n else None


async def _ask(client: AsyncOpenAI, model: str, prompt: str) -> tuple[str, str]:
    """(call id, text) of one question to the model."""
    response = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}])
    return response.id, response.choices[0].message.content or ""


@rllm.rollout(name="solver_judge")
async def solver_judge(task: rllm.Task, config: rllm.AgentConfig) -> rllm.Episode:
    """Several solvers at once, then the judge. A task may say how many in its metadata (``n_solutions``)."""
    client = _client().with_options(base_url=config.base_url)
    question = task.metadata["question"]
    n = int(task.metadata.get("n_solutions", N_SOLUTIONS))
    attempts = await asyncio.gather(
        *(_ask(client, config.model_for("solver"), solver_prompt(question)) for _ in range(n))
    )
    solutions = [parse_solution(text) for _, text in attempts]
    solvers = [
        rllm.Trajectory(name="solver", steps=[rllm.Step(id=call, action=solution)], output=solution)
        for (call, _), solution in zip(attempts, solutions, strict=True)
    ]
    call, text = await _ask(client, config.model_for("judge"), judge_prompt(question, solutions))
    choice = parse_choice(text, n)
    chosen = None if choice is None else solutions[choice]
    judge = rllm.Trajectory(name="judge", steps=[rllm.Step(id=call, action=chosen)], output=chosen)
    return rllm.Episode(trajectories=[*solvers, judge])


@rllm.evaluator
def solver_judge_evaluator(task: rllm.Task, episode: rllm.Episode) -> rllm.EvalOutput:
    """A solver gets the reward of its own answer, the judge that of the answer it selected."""
    solver_rewards = []
    judge_reward = 0.0
    for trajectory in episode.trajectories:
        trajectory.reward = countdown_reward(trajectory.output, task.metadata["nums"], task.metadata["target"])
        if trajectory.name == "solver":
            solver_rewards.append(trajectory.reward)
        else:
            judge_reward = trajectory.reward
    return rllm.EvalOutput(
        reward=judge_reward,
        is_correct=judge_reward > 0,
        signals=[
            rllm.Signal("solver_acc", sum(solver_rewards) / len(solver_rewards)),
            rllm.Signal("judge_acc", judge_reward),
        ],
    )


class SolverJudgeWorkflow(rllm.Workflow):
    """The same as a class, for those who prefer it: the model is called in process and rewards are set here."""

    def __init__(self, rollout_engine, n_solutions: int = N_SOLUTIONS, **kwargs):
        super().__init__(rollout_engine, **kwargs)
        self.n_solutions = n_solutions

    async def _call(self, name: str, prompt: str) -> rllm.Trajectory:
        messages = [{"role": "user", "content": prompt}]
        output = await self.rollout_engine.get_model_response(messages, role=name)
        return rllm.Trajectory(name=name, steps=[rllm.Step.from_model_output(output, messages)], output=output.content)

    async def run(self, task: dict, uid: str, **kwargs) -> rllm.Episode:
        prompt = solver_prompt(task["question"])
        solvers = await asyncio.gather(*(self._call("solver", prompt) for _ in range(self.n_solutions)))
        rewards = []
        for solver in solvers:
            solver.output = solver.steps[0].action = parse_solution(solver.output)
            solver.reward = countdown_reward(solver.output, task["nums"], task["target"])
            rewards.append(solver.reward)
        judge = await self._call("judge", judge_prompt(task["question"], [s.output for s in solvers]))
        choice = parse_choice(judge.output, len(solvers))
        judge.output = judge.steps[0].action = None if choice is None else solvers[choice].output
        judge.reward = judge_reward = 0.0 if choice is None else rewards[choice]
        metrics = {"solver_acc": sum(rewards) / len(rewards), "judge_acc": judge_reward}
        return rllm.Episode(id=uid, trajectories=[*solvers, judge], is_correct=judge_reward > 0, metrics=metrics)


def train_dataset(config: rllm.Config) -> rllm.Dataset:
    return countdown("train", n=1024, seed=config.trainer.seed)


def val_dataset(config: rllm.Config) -> rllm.Dataset:
    """256 held-out problems, the same for every seed."""
    return countdown("val", n=256, seed=0)
