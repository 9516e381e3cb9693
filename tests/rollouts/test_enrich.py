"""Which recorded call fills which step: by id and by tag, never by position."""

from __future__ import annotations

import pytest

from rllm.gateway.recorder import Call, Session
from rllm.rollouts.enrich import AttributionError, enrich
from rllm.types import Episode, ModelOutput, Step, Trajectory


def session_with(*calls: tuple[str, str | None], is_validation: bool = False) -> Session:
    """A session whose calls are (id, trajectory tag) in the order in which they began, recorded in the opposite order."""
    session = Session("s", is_validation=is_validation)
    for order, (name, tag) in reversed(list(enumerate(calls))):
        ids = [100 + order, 2]
        output = ModelOutput(name, name, name, [1, order], ids, [-0.1, -0.2], [7, 7], "stop", 0.6)
        session.record(Call(output, [{"role": "user", "content": f"to {name}"}], tag, order))
    return session


def test_a_step_takes_the_tokens_of_the_call_it_names_whatever_order_calls_ended_in() -> None:
    episode = Episode(trajectories=[Trajectory(steps=[Step(id="b", action="x")]), Trajectory(steps=[Step(id="a")])])
    enrich(episode, session_with(("a", None), ("b", None)))
    b, a = (trajectory.steps[0] for trajectory in episode.trajectories)
    assert (b.prompt_ids, b.response_ids, b.logprobs, b.versions) == ([1, 1], [101, 2], [-0.1, -0.2], [7, 7])
    assert (b.temperature, b.finish_reason, b.model_response, b.action) == (0.6, "stop", "b", "x")
    assert a.response_ids == [100, 2]
    assert a.chat_completions == [{"role": "user", "content": "to a"}, {"role": "assistant", "content": "a"}]


def test_calls_through_a_trajectorys_url_become_its_steps_in_the_order_they_began() -> None:
    first, second = Trajectory(uid="one"), Trajectory(uid="two")
    enrich(Episode(trajectories=[first, second]), session_with(("a", "two"), ("b", "one"), ("c", "two")))
    assert [step.id for step in first.steps] == ["b"]
    assert [step.id for step in second.steps] == ["a", "c"]


def test_the_only_trajectory_without_steps_takes_all_calls_without_a_tag() -> None:
    named, rest = Trajectory(steps=[Step(id="b")]), Trajectory()
    enrich(Episode(trajectories=[named, rest]), session_with(("a", None), ("b", None), ("c", None)))
    assert [step.id for step in rest.steps] == ["a", "c"]


def test_a_lone_trajectory_without_steps_or_calls_of_its_own_takes_all_whatever_they_were_tagged() -> None:
    episode = Episode(trajectories=[Trajectory()])
    enrich(episode, session_with(("a", "one"), ("b", None), ("c", "two")))
    assert [step.id for step in episode.trajectories[0].steps] == ["a", "b", "c"]
    assert "unclaimed_calls" not in episode.metadata


def test_a_tag_that_is_another_trajectorys_is_not_taken_by_the_one_that_is_left() -> None:
    tagged, rest = Trajectory(uid="one"), Trajectory()
    episode = Episode(trajectories=[tagged, rest])
    enrich(episode, session_with(("a", "one"), ("b", None), ("c", "nobody")))
    assert ([step.id for step in tagged.steps], [step.id for step in rest.steps]) == (["a"], ["b"])
    assert episode.metadata == {"unclaimed_calls": 1}


def test_two_trajectories_without_steps_are_not_guessed_between() -> None:
    episode = Episode(trajectories=[Trajectory(name="solver"), Trajectory(name="judge")])
    with pytest.raises(AttributionError, match=r"2 model calls .* \(solver, judge\).*Step\(id=response.id\).*url_for"):
        enrich(episode, session_with(("a", None), ("b", None)))


def test_a_step_that_names_no_recorded_call_is_named_in_the_error() -> None:
    episode = Episode(trajectories=[Trajectory(name="solver", steps=[Step(id="typo")])])
    with pytest.raises(AttributionError, match="'solver' has the id 'typo'"):
        enrich(episode, session_with(("a", None)))


def test_in_validation_such_a_step_is_kept_since_only_rewards_matter() -> None:
    episode = Episode(trajectories=[Trajectory(steps=[Step(id="typo")])])
    enrich(episode, session_with(("a", None), is_validation=True))
    assert episode.metadata == {"unclaimed_calls": 1}


def test_a_step_that_brings_its_own_tokens_keeps_them() -> None:
    own = Step(prompt_ids=[1], response_ids=[2, 3], logprobs=[-1.0, -1.0])
    enrich(Episode(trajectories=[Trajectory(steps=[own])]), session_with())
    assert own.response_ids == [2, 3]


def test_a_call_claimed_twice_is_an_error() -> None:
    episode = Episode(trajectories=[Trajectory(steps=[Step(id="a")]), Trajectory(steps=[Step(id="a")])])
    with pytest.raises(AttributionError, match="two steps claim the call 'a'"):
        enrich(episode, session_with(("a", None)))


def test_calls_nobody_claims_are_counted() -> None:
    episode = Episode(trajectories=[Trajectory(steps=[Step(id="a")])])
    enrich(episode, session_with(("a", None), ("b", None), ("c", "someone")))
    assert episode.metadata["unclaimed_calls"] == 2


@pytest.mark.parametrize("is_validation", [False, True])
def test_a_flow_that_returns_nothing_and_called_no_model_is_an_error(is_validation: bool) -> None:
    with pytest.raises(
        AttributionError, match=r"without one recorded model call: call the model through config.base_url"
    ):
        enrich(Episode(trajectories=[Trajectory()]), session_with(is_validation=is_validation))


def test_in_validation_a_flow_may_answer_without_the_model() -> None:
    enrich(Episode(trajectories=[Trajectory(output="42")]), session_with(is_validation=True))
