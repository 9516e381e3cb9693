"""The arithmetic of distillation against sums written out in NumPy float64, and the estimator against the exact gradient of a KL."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.datums import build_datums
from rllm.algorithms.distillation import TokenAdvantages, kl_estimates, reverse_kl_advantages
from rllm.algorithms.grouping import Accounting
from rllm.types import Step, Trajectory, TrajectoryGroup

LOGPROBS = st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=40)


@given(LOGPROBS, st.floats(0.01, 10), st.floats(0, 1))
def test_advantages_are_the_discounted_sums_of_the_gaps(pairs, coef, gamma):
    student, teacher = (np.array(values, dtype=np.float64) for values in zip(*pairs, strict=True))
    n = len(student)
    later = np.triu(np.ones((n, n)))
    powers = np.where(later > 0, np.float64(gamma) ** np.maximum(np.arange(n)[None, :] - np.arange(n)[:, None], 0), 0.0)
    expected = coef * powers @ (teacher - student)
    found = reverse_kl_advantages(student.tolist(), teacher.tolist(), coef, gamma)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    alone = reverse_kl_advantages(student.tolist(), teacher.tolist(), coef, 0.0)
    np.testing.assert_allclose(alone, coef * (teacher - student), rtol=1e-12, atol=1e-12)


@given(LOGPROBS)
def test_estimates_are_the_formulas_and_k3_is_never_negative(pairs):
    student, teacher = (np.array(values, dtype=np.float64) for values in zip(*pairs, strict=True))
    k1, k3 = kl_estimates(student.tolist(), teacher.tolist())
    ratio = np.minimum(teacher - student, 20.0)
    assert k1 == pytest.approx((student - teacher).mean(), abs=1e-9)
    assert k3 == pytest.approx((np.expm1(ratio) + student - teacher).mean(), rel=1e-9, abs=1e-9)
    assert k3 >= -1e-9 or (teacher - student).max() > 20


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_mean_gradient_over_all_texts_is_that_of_the_kl(gamma):
    """A student of two tokens over a vocabulary of three, all of whose texts are summed with their probabilities. gamma 1: the gradient
    of KL(student || teacher) of the text; gamma 0: the sum of those of each next token, the texts that lead there held still."""
    rng = np.random.default_rng(3)
    first, second = rng.normal(size=3), rng.normal(size=(3, 3))
    t_first, t_second = _log_softmax(rng.normal(size=3)), _log_softmax(rng.normal(size=(3, 3)))

    def kl(first, second, held=None):
        p1, p2 = _log_softmax(first), _log_softmax(second)
        reach = np.exp(p1 if held is None else held)
        inner = (np.exp(p2) * (p2 - t_second)).sum(-1)
        return (np.exp(p1) * (p1 - t_first)).sum() + (reach * inner).sum()

    held = None if gamma else _log_softmax(first)
    expected_first = _numeric(lambda x: kl(x, second, held), first)
    expected_second = _numeric(lambda x: kl(first, x, held), second)
    gradient_first, gradient_second = np.zeros(3), np.zeros((3, 3))
    p1, p2 = _log_softmax(first), _log_softmax(second)
    for a, b in itertools.product(range(3), range(3)):
        student, teacher = [p1[a], p2[a, b]], [t_first[a], t_second[a, b]]
        one, two = reverse_kl_advantages(student, teacher, 1.0, gamma)
        weight = np.exp(sum(student))
        gradient_first += weight * one * (np.eye(3)[a] - np.exp(p1))
        gradient_second[a] += weight * two * (np.eye(3)[b] - np.exp(p2[a]))
    np.testing.assert_allclose(-gradient_first, expected_first, atol=1e-7)
    np.testing.assert_allclose(-gradient_second, expected_second, atol=1e-7)


def _log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _numeric(f, x, eps=1e-5):
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += eps
        down[i] -= eps
        gradient[i] = (f(up) - f(down)) / (2 * eps)
    return gradient


def trajectory(role, reward, *lengths):
    """Steps whose prompts go on from each other, so that all are one row; the second has a token of a tool between."""
    steps, ids = [], [1, 2]
    for k, n in enumerate(lengths):
        response = list(range(10 * k + 3, 10 * k + 3 + n))
        steps.append(Step(prompt_ids=list(ids), response_ids=response, logprobs=[-1.0] * n))
        ids = [*ids, *response, 99]
    return Trajectory(name=role, reward=reward, steps=steps)


def taught(*trajectories, value=0.25):
    return {id(s): [value * (i + 1) for i in range(len(s.response_ids))] for t in trajectories for s in t.steps}


def test_equal_rewards_and_single_samples_are_trained_on_what_the_teacher_says():
    for mode, n in ((True, 2), (False, 2), (True, 1), (False, 1)):
        group = TrajectoryGroup("t", "solver", [trajectory("solver", 1.0, 2, 1) for _ in range(n)])
        account = Accounting(generated=n)
        extra = TokenAdvantages(taught(*group.trajectories), replace=mode)
        rows = build_datums([group], account, estimator="grpo", token_advantages=extra)
        assert [row.advantages for row in rows] == [[0, 0, 0.25, 0.5, 0, 0.25]] * n
        assert [row.mask for row in rows] == [[0, 0, 1, 1, 0, 1]] * n
        assert (account.trained, account.dropped.total(), account.untrained_steps) == (n, 0, 0)
        account.check()


def test_added_to_the_advantage_of_the_reward_or_in_its_place():
    good, bad = trajectory("solver", 1.0, 2), trajectory("solver", 0.0, 2)
    group = TrajectoryGroup("t", "solver", [good, bad])
    for replace, expected in ((True, [[0.25, 0.5]] * 2), (False, [[0.75, 1.0], [-0.25, 0.0]])):
        extra = TokenAdvantages(taught(good, bad), replace)
        rows = build_datums([group], Accounting(generated=2), estimator="dr_grpo", token_advantages=extra)
        assert [row.advantages[2:] for row in rows] == expected
        assert [t.steps[0].advantage for t in (good, bad)] == expected


def test_roles_that_are_not_taught_keep_their_rewards():
    solvers = [trajectory("solver", 1.0, 1), trajectory("solver", 0.0, 1)]
    judges = [trajectory("judge", 1.0, 1), trajectory("judge", 0.0, 1)]
    groups = [TrajectoryGroup("t", "solver", solvers), TrajectoryGroup("t", "judge", judges)]
    extra = TokenAdvantages(taught(*solvers), replace=True)
    rows = build_datums(groups, Accounting(generated=4), estimator="dr_grpo", token_advantages=extra)
    assert [(row.role, row.advantages[-1]) for row in rows] == [
        ("solver", 0.25),
        ("solver", 0.25),
        ("judge", 0.5),
        ("judge", -0.5),
    ]


def test_per_step_rewards_and_precomputed_advantages_are_added_to():
    one, two = trajectory("solver", 0.0, 1, 1), trajectory("solver", 0.0, 1, 1)
    one.steps[0].reward, two.steps[0].reward = 1.0, 0.0
    group = TrajectoryGroup("t", "solver", [one, two])
    extra = TokenAdvantages(taught(one, two))
    rows = build_datums(
        [group], Accounting(generated=2), estimator="dr_grpo", stepwise="per_step", gamma=0.0, token_advantages=extra
    )
    # the second steps have equal returns, so only the teacher speaks of them
    assert [row.advantages for row in rows] == [[0, 0, 0.75, 0, 0.25], [0, 0, -0.25, 0, 0.25]]
    for t in (one, two):
        t.steps[0].advantage, t.steps[1].advantage = [2.0], 3.0
    rows = build_datums([group], Accounting(generated=2), estimator="precomputed", token_advantages=extra)
    assert [row.advantages for row in rows] == [[0, 0, 2.25, 0, 3.25]] * 2
