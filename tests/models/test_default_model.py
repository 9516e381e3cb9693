"""The embedded default model: what README says of it, measured by sampling it on held-out problems.

Uses the sampler directly; the whole flow is tested elsewhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import rllm
from rllm.backends.base import SamplingParams
from rllm.backends.local.engine import Engine
from rllm.backends.local.loading import load_decoder, load_tokenizer
from rllm.data.countdown import countdown, question
from rllm.rewards.countdown import countdown_reward_fn, last_answer

FOLDER = Path(rllm.__file__).parent / "models" / "default"
SOLVE = " Output the final answer within <answer>...</answer>."
Ask = Callable[[Sequence[str], float], list[str]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """(prompts, temperature) -> answers."""
    tokenizer = load_tokenizer(FOLDER)
    engine = Engine(load_decoder(FOLDER), eos_ids=[tokenizer.eos_token_id], max_batch=128, max_model_len=512)

    def answers(prompts: Sequence[str], temperature: float) -> list[str]:
        futures = []
        for i, prompt in enumerate(prompts):
            chat = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            futures.append(engine.submit(ids, SamplingParams(160, temperature=temperature, seed=i)))
        return [tokenizer.decode(future.result().ids, skip_special_tokens=True) for future in futures]

    yield answers
    engine.close()


def test_it_fits_in_the_package() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 25e6


def test_it_solves_some_held_out_problems_and_far_from_all(ask: Ask) -> None:
    tasks = list(countdown("val", 256))
    texts = ask([task.metadata["question"] + SOLVE for task in tasks], 1.0)
    rewards = [countdown_reward_fn(task.metadata, text) for task, text in zip(tasks, texts, strict=True)]
    assert 0.20 <= statistics.fmean(rewards) <= 0.45
    careful = [reward for reward, text in zip(rewards, texts, strict=True) if "=" in text]
    hasty = [reward for reward, text in zip(rewards, texts, strict=True) if "=" not in text]
    assert statistics.fmean(careful) > statistics.fmean(hasty) + 0.3  # what reinforcement learning can find out


def test_as_a_judge_it_checks_by_arithmetic_and_picks_the_right_solution(ask: Ask) -> None:
    prompts = [
        f"{question(numbers, target)}\nSolution 1: {first}\nSolution 2: {second}\n"
        "Check each solution. Output the index of the right one within <answer>...</answer>."
        for numbers, target, first, second in [
            ([4, 9, 2], 17, "4 * 2 + 9", "9 - 4 - 2"),
            ([4, 9, 2], 17, "9 + 4 + 2", "4 * 2 + 9"),
            ([6, 7, 8], 21, "6 * 7 - 8", "6 + 7 + 8"),
            ([6, 7, 8], 21, "6 + 7 + 8", "none"),
        ]
    ]
    texts = ask([prompt for prompt in prompts for _ in range(32)], 1.0)
    checked = [(i // 32, text) for i, text in enumerate(texts) if "=" in text]
    assert len(checked) > 20
    right = [last_answer(text) == ("1", "2", "2", "1")[case] for case, text in checked]
    assert statistics.fmean(right) > 0.9


def test_a_greeting_is_answered_with_what_it_is_for(ask: Ask) -> None:
    assert "countdown" in ask(["Hello"], 0.0)[0]
