"""The frozen lake example: the rules of the game, and that turns and rewards of the flow are those of the game."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import frozenlake_flow as flow
import pytest
from frozenlake import MOVES, FrozenLake, LakeMap, random_map

from rllm.config.schema import Config
from rllm.gateway.server import Gateway
from rllm.rollouts.runner import EpisodeRequest, EpisodeRunner
from rllm.types import Episode, Task, TerminationReason

LAKE = LakeMap.from_text("SFFF\nFHFH\nFFFH\nHFFG")  # Gymnasium's own 4x4 map


def walk(game: FrozenLake, *moves: str) -> FrozenLake:
    for move in moves:
        game.move(move)
    return game


def test_the_edge_holds_a_hole_ends_the_game_and_so_does_the_goal() -> None:
    assert walk(FrozenLake(LAKE), "up", "left").at == (0, 0)
    fallen = walk(FrozenLake(LAKE), "right", "down")
    assert fallen.over and not fallen.reached_goal
    there = walk(FrozenLake(LAKE), "down", "down", "right", "down", "right", "right")
    assert there.over and there.reached_goal and there.moves == 6
    with pytest.raises(ValueError, match="over"):
        there.move("up")


def test_the_distances_are_those_of_walking_every_way() -> None:
    """Against brute force: the shortest of all walks of up to seven moves."""
    found = LAKE.distances()
    reach = {cell for cell in [(r, c) for r in range(4) for c in range(4)] if cell not in LAKE.holes}
    for start in reach:
        cells, steps = {start}, 0
        while LAKE.goal not in cells and steps < 16:
            games = [FrozenLake(LAKE, at=cell) for cell in cells for _ in MOVES]
            cells = {
                walk(game, move).at for game, move in zip(games, list(MOVES) * len(cells), strict=True)
            } - LAKE.holes
            steps += 1
        assert found[start] == steps


def test_maps_are_seeded_solvable_and_survive_being_written_down() -> None:
    def maps(seed: int) -> list[LakeMap]:
        rng = random.Random(seed)
        return [random_map(rng, 5) for _ in range(50)]

    assert maps(1) == maps(1) != maps(2)
    for lake in maps(1):
        assert (0, 0) in lake.distances() and LakeMap.from_text(lake.to_text()) == lake


def test_slipping_goes_to_the_sides_as_often_as_said_and_the_same_for_a_seed() -> None:
    wide = LakeMap(3, frozenset())

    def ends(seed: int) -> tuple[int, int]:
        return walk(FrozenLake(wide, slip=0.4, seed=seed, at=(1, 1)), "up").at

    where = [ends(seed) for seed in range(2000)]
    assert where == [ends(seed) for seed in range(2000)]
    shares = [where.count(cell) / 2000 for cell in ((0, 1), (1, 0), (1, 2))]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.04)


def test_the_player_sees_the_map_and_what_lies_around() -> None:
    assert walk(FrozenLake(LAKE), "down").observation() == (
        "FFFF\n@HFH\nFFFH\nHFFG\nup ice, down ice, left edge, right hole"
    )


Play = Callable[[Callable[[str], str]], Episode]


@pytest.fixture
def play(gateway: Gateway, backend: Any) -> Play:
    """The flow with a model that answers the last thing it saw."""

    def play(policy: Callable[[str], str]) -> Episode:
        backend.answer = lambda text: policy(text.rpartition("user\n")[2].partition("<|im_end|>")[0])
        config = Config.model_validate({"rollout": {"reward_workers": 0}})
        runner = EpisodeRunner(gateway, flow=flow.frozenlake, evaluator=flow.frozenlake_evaluator, config=config)
        try:
            [episode] = runner.run([EpisodeRequest(Task(id="t", metadata={"map": LAKE.to_text()}), "t:0")])
        finally:
            runner.close()
        assert not episode.failed, episode.error
        return episode

    return play


def shortest(seen: str) -> str:
    """A way to the goal, from the map in what was seen."""
    rows = seen.split("\n")[-5:-1]
    [at] = [(r, row.index("@")) for r, row in enumerate(rows) if "@" in row]
    left = LAKE.distances()
    return next(m for m, (d, r) in MOVES.items() if left.get((at[0] + d, at[1] + r)) == left[at] - 1)


def test_a_walk_to_the_goal_is_worth_one_and_has_one_step_a_turn(play: Play) -> None:
    episode = play(lambda seen: f"I go {shortest(seen)}.")
    [trajectory] = episode.trajectories
    assert (trajectory.reward, episode.is_correct, episode.termination_reason) == (
        1.0,
        True,
        TerminationReason.ENV_DONE,
    )
    assert len(trajectory.steps) == 6 and episode.metrics == {"success": 1.0, "moves": 6}
    for before, after in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        whole = before.prompt_ids + before.response_ids
        assert after.prompt_ids[: len(whole)] == whole, "one row of tokens, nothing rendered twice"


def test_a_fall_is_worth_nothing_and_ends_the_game(play: Play) -> None:
    episode = play(lambda seen: "right" if "up edge, down ice, left edge" in seen else "down")
    assert (episode.trajectories[0].reward, len(episode.trajectories[0].steps)) == (0.0, 2)
    assert episode.termination_reason is TerminationReason.ENV_DONE


def test_walking_in_circles_ends_after_the_most_turns_and_is_told_as_that(play: Play) -> None:
    episode = play(lambda seen: "up")
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED and not episode.failed
    assert (episode.trajectories[0].reward, len(episode.trajectories[0].steps)) == (0.0, flow.MAX_TURNS)


def test_an_answer_without_a_direction_costs_a_turn_and_is_explained(play: Play) -> None:
    seen: list[str] = []

    def policy(last: str) -> str:
        seen.append(last)
        return "what?"

    episode = play(policy)
    assert episode.trajectories[0].output == {
        "at": [0, 0],
        "reached_goal": False,
        "moves": 0,
        "invalid": flow.MAX_TURNS,
    }
    assert seen[1] == "error: say one of up, down, left, right"


@pytest.mark.parametrize(
    ("text", "move"), [("left", "left"), ("not up but down!", "down"), ("upwards", None), ("", None)]
)
def test_the_last_direction_named_is_the_move(text: str, move: str | None) -> None:
    assert flow.parse_move(text) == move


def test_no_map_of_validation_is_in_training() -> None:
    val = {task.id for task in flow.tasks("val", 96, 0)}
    assert len(val) == 96 and val.isdisjoint(task.id for task in flow.tasks("train", 512, 0))
