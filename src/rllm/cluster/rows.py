"""An episode as the rows that verl trains: exact tokens, one group for each task and role.

Knows our types and verl's keys; imports nothing of verl.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rllm.algorithms.datums import rows_of
from rllm.algorithms.spec import Datum
from rllm.types import Episode

# verl names a row "{prompt}_{session}_{index}" and reads the session as a number.
MOST_TRAJECTORIES = 10_000


@dataclass(frozen=True)
class Row:
    """A run of tokens to train. `key` is what follows verl's id of the prompt; `group` is what its estimators compare by; `call` names
    the first model call, by which the row is found again."""

    key: str
    group: str
    call: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    reward: float
    versions: tuple[int, int]
    turns: int


def rows_of_episode(episode: Episode, session: int, temperature: float) -> list[Row]:
    """The rows of every rewarded trajectory. Each trajectory is a session of its own: verl gives all rows of one session the advantage of
    the last, so roles that shared one would be mixed. A failed episode has none.

    Raises `ValueError` where a call was sampled at another temperature than `temperature`, the one that verl trains all rows at, and for
    more than `MOST_TRAJECTORIES` trajectories, of which the last would take the keys of the next episode.
    """
    if episode.failed:
        return []
    if len(episode.trajectories) > MOST_TRAJECTORIES:
        raise ValueError(
            f"{len(episode.trajectories)} trajectories in one episode; on verl there are {MOST_TRAJECTORIES} at most"
        )
    rows: list[Row] = []
    for k, trajectory in enumerate(episode.trajectories):
        if trajectory.reward is None:
            continue
        steps = {step.id: step for step in trajectory.steps}
        for index, datum in enumerate(rows_of(trajectory, [0.0] * len(trajectory.steps))):
            if datum.temperature != temperature:
                raise ValueError(
                    f"a call of {trajectory.name!r} was sampled at temperature {datum.temperature:g}, but verl trains every row at "
                    f"rollout.temperature={temperature:g}; leave the temperature out of the call"
                )
            versions = steps[datum.call].versions
            start = split(datum)
            rows.append(
                Row(
                    key=f"{session * MOST_TRAJECTORIES + k}_{index}",
                    group=f"{episode.task_id}:{trajectory.role}",
                    call=datum.call,
                    prompt_ids=datum.ids[:start],
                    response_ids=datum.ids[start:],
                    response_mask=datum.mask[start:],
                    response_logprobs=datum.logprobs[start:],
                    reward=float(trajectory.reward),
                    versions=(min(versions), max(versions)),
                    turns=len(trajectory.steps),
                )
            )
    return rows


def split(datum: Datum) -> int:
    """Where the response of a row begins: at its first sampled token."""
    return datum.mask.index(1)


def mini_batches(wanted: int, rows: int, ranks: int) -> int:
    """How many mini-batches `rows` rows make on `ranks` ranks, at most `wanted`: so many that the rows which pad the last ones, with nothing
    to train, can never be a whole mini-batch, wherever they come to."""
    for several in range(wanted, 1, -1):
        padded = math.ceil(rows / (ranks * several)) * ranks * several
        if padded - rows < padded // several:
            return several
    return 1
