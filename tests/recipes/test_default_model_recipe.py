"""The recipe of the default model: demonstrations that say only true arithmetic, and a tokenizer that any text survives.

Every line of a demonstration is parsed and computed anew here.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm.data.countdown import is_validation
from rllm.rewards.countdown import countdown_reward, evaluate_expression, last_answer

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "default_model"))
from demonstrations import (  # pyright: ignore[reportMissingImports]
    HASTY_PHRASES,
    demonstrations,
)
from tokenizer import train_tokenizer  # pyright: ignore[reportMissingImports]

EQUATION = re.compile(r"(-?\d+) ([-+*/]) (-?\d+) = (-?\d+)")


def problem(prompt: str) -> tuple[list[int], int] | None:
    """(numbers, target) stated in a prompt; None for small talk."""
    found = re.match(r"Using the numbers \[([\d, ]+)\], make (\d+)\.", prompt)
    return ([int(n) for n in found[1].split(", ")], int(found[2])) if found else None


@pytest.fixture(scope="module")
def chats() -> list[tuple[str, str]]:
    return [tuple(m["content"] for m in chat["messages"]) for chat in demonstrations(3000, seed=1)]


def solvers(chats: list[tuple[str, str]]) -> list[tuple[list[int], int, str]]:
    return [(*problem(p), a) for p, a in chats if problem(p) and "Solution 1:" not in p]  # pyright: ignore


def judges(chats: list[tuple[str, str]]) -> list[tuple[list[int], int, list[str], str]]:
    with_solutions = [(p, a) for p, a in chats if "Solution 1:" in p]
    return [(*problem(p), re.findall(r"^Solution \d+: (.*)$", p, re.M), a) for p, a in with_solutions]  # pyright: ignore


def is_hasty(answer: str) -> bool:
    return answer.startswith(HASTY_PHRASES)


def test_every_equation_in_every_demonstration_is_true(chats: list[tuple[str, str]]) -> None:
    equations = 0
    for _, answer in chats:
        for left, operator, right, result in EQUATION.findall(answer):
            spelled = f"{left} {operator} ({right})" if right.startswith("-") else f"{left} {operator} {right}"
            assert evaluate_expression(spelled)[0] == int(result), answer
            equations += 1
        assert answer.count("=") == len(EQUATION.findall(answer)), answer
    assert equations > 3000


def test_a_careful_solver_uses_the_numbers_says_yes_and_no_truly_and_ends_right(chats: list[tuple[str, str]]) -> None:
    careful = [case for case in solvers(chats) if not is_hasty(case[2])]
    for numbers, target, answer in careful:
        *attempts, final = answer.split("\n")
        assert countdown_reward(last_answer(final), numbers, target) == 1.0, answer
        for i, attempt in enumerate(attempts):
            (a, _, b, c), (d, _, e, f) = EQUATION.findall(attempt)
            used = Counter(map(int, (a, b, d, e)))
            used.subtract([int(c)])  # the first result enters the second equation
            assert +used == Counter(numbers), answer
            verdict = attempt.split()[-1]
            assert verdict == ("yes" if int(f) == target else "no")
            assert (verdict == "yes") == (i == len(attempts) - 1)


def test_a_hasty_solver_is_right_sometimes_and_far_from_always(chats: list[tuple[str, str]]) -> None:
    hasty = [case for case in solvers(chats) if is_hasty(case[2])]
    rewards = [countdown_reward(last_answer(answer), numbers, target) for numbers, target, answer in hasty]
    assert 0.05 < sum(rewards) / len(rewards) < 0.25
    for numbers, _, answer in hasty:  # wrong by its value, not by its numbers
        assert sorted(evaluate_expression(last_answer(answer) or "")[1]) == sorted(numbers)


def test_a_careful_judge_picks_the_first_right_solution_or_none_at_all(chats: list[tuple[str, str]]) -> None:
    careful = [case for case in judges(chats) if not is_hasty(case[3])]
    for numbers, target, listed, answer in careful:
        right = [i for i, solution in enumerate(listed, 1) if countdown_reward(solution, numbers, target)]
        first = right[0] if right else 0
        assert last_answer(answer) == str(first), (listed, answer)
        verdicts = re.findall(r"^(\d): .*(right|wrong)$", answer, re.M)
        assert verdicts == [(str(i), "right" if i == first else "wrong") for i in range(1, (first or len(listed)) + 1)]


def test_judges_meet_every_kind_of_case(chats: list[tuple[str, str]]) -> None:
    seen = judges(chats)
    assert {len(listed) for _, _, listed, _ in seen} == {1, 2, 3, 4}
    answers = [answer for *_, answer in seen if not is_hasty(answer)]
    assert any("no solution wrong" in a for a in answers) and any("other numbers wrong" in a for a in answers)
    assert any(last_answer(a) == "0" for a in answers)
    for _, _, listed, answer in seen:
        if is_hasty(answer):
            assert 1 <= int(last_answer(answer) or 0) <= len(listed)


def test_demonstrations_hold_no_validation_problem(chats: list[tuple[str, str]]) -> None:
    problems = [found for prompt, _ in chats if (found := problem(prompt))]
    assert len(problems) > 2500 and not any(is_validation(*found) for found in problems)


def test_both_habits_small_talk_and_a_seed_that_decides_everything(chats: list[tuple[str, str]]) -> None:
    share = sum(is_hasty(answer) for *_, answer in solvers(chats)) / len(solvers(chats))
    assert 0.5 < share < 0.85
    assert 0.005 < sum(problem(prompt) is None for prompt, _ in chats) / len(chats) < 0.05
    assert list(demonstrations(50, 4)) == list(demonstrations(50, 4)) != list(demonstrations(50, 5))


@pytest.fixture(scope="module")
def tokenizer(chats: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((text for chat in chats for text in chat), folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_any_text_survives_encoding_and_decoding(tokenizer, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < len(tokenizer) for token in ids)


def test_each_digit_is_a_token_and_answer_marks_are_one_token_each(tokenizer) -> None:
    assert tokenizer.tokenize("<answer>13*247</answer>") == ["<answer>", "1", "3", "*", "2", "4", "7", "</answer>"]
    assert len(tokenizer.tokenize(" 13")) == 2
    assert 512 <= len(tokenizer) <= 1024


def test_the_chat_template_marks_turns_and_ends_each_with_the_end_of_sequence_token(tokenizer) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    answered = [*messages, {"role": "assistant", "content": "A"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == text + "A<|im_end|>\n"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token_id != tokenizer.eos_token_id


def test_prompts_and_answers_are_short_enough_for_the_example(tokenizer, chats: list[tuple[str, str]]) -> None:
    for prompt, answer in chats:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        assert len(tokenizer(asked)["input_ids"]) <= 128
        assert len(tokenizer(answer)["input_ids"]) < 128
