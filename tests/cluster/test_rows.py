"""Episodes as verl's rows: exact tokens, one group for each task and role, and advantages that are those of the local backend."""

import random

import pytest

from rllm.algorithms.grouping import Accounting
from rllm.cluster import rows
from rllm.cluster.engine import ClientBackend
from rllm.cluster.rows import mini_batches, rows_of_episode
from rllm.collect import Collected
from rllm.config.load import load_config
from rllm.gateway.errors import RequestError
from rllm.types import Episode, Step, TerminationReason, Trajectory
from rllm.update import datums_of


def step(prompt, response, **more):
    more = {"logprobs": [-0.5] * len(response), "versions": [3] * len(response), "temperature": 0.6} | more
    return Step(prompt_ids=list(prompt), response_ids=list(response), **more)


def episode(task="a:b", k=0, solvers=(1.0, 0.0), judge=1.0):
    trajectories = [Trajectory("solver", [step([1, 2], [10 + i, 11, 2])], reward) for i, reward in enumerate(solvers)]
    trajectories.append(Trajectory("judge", [step([1, 3], [9])], judge))
    return Episode(id=f"{task}:{k}", trajectories=trajectories, termination_reason=TerminationReason.ENV_DONE)


def test_each_trajectory_is_a_session_of_its_own_in_the_group_of_its_task_and_role():
    rows = rows_of_episode(episode(k=1), 1, 0.6)
    assert [row.key for row in rows] == ["10000_0", "10001_0", "10002_0"]
    assert [row.group for row in rows] == ["a:b:solver", "a:b:solver", "a:b:judge"]
    assert [row.reward for row in rows] == [1.0, 0.0, 1.0]
    assert all("_" not in row.key.rpartition("_")[0] for row in rows)


def test_turns_that_go_on_share_a_row_and_a_rewritten_history_starts_another():
    first, second = step([1, 2], [5, 6]), step([1, 2, 5, 6, 7], [8])
    rewritten = step([1, 9], [4])
    turns = Episode(id="t:0", trajectories=[Trajectory("agent", [first, second, rewritten], 1.0)])
    one, two = rows_of_episode(turns, 0, 0.6)
    assert (one.prompt_ids, one.response_ids, one.response_mask) == ([1, 2], [5, 6, 7, 8], [1, 1, 0, 1])
    assert one.response_logprobs == [-0.5, -0.5, 0.0, -0.5]
    assert (two.prompt_ids, two.response_ids) == ([1, 9], [4])
    assert (one.key, two.key) == ("0_0", "0_1")
    assert one.call == first.id and two.call == rewritten.id


def test_failed_episodes_have_no_rows_and_neither_have_trajectories_without_tokens():
    failed = episode()
    failed.termination_reason = TerminationReason.ERROR
    assert rows_of_episode(failed, 0, 0.6) == []
    silent = Episode(id="t:0", trajectories=[Trajectory("solver", [step([1], [])], 1.0)])
    assert rows_of_episode(silent, 0, 0.6) == []


def test_an_episode_with_more_trajectories_than_there_are_keys_is_refused(monkeypatch):
    monkeypatch.setattr(rows, "MOST_TRAJECTORIES", 2)
    with pytest.raises(ValueError, match="3 trajectories in one episode; on verl there are 2 at most"):
        rows_of_episode(episode(), 0, 0.6)


def test_a_call_at_another_temperature_is_told_with_the_fix():
    with pytest.raises(ValueError, match=r"temperature 0\.6.*rollout\.temperature=1.*leave the temperature out"):
        rows_of_episode(episode(), 0, 1.0)


def test_every_row_finds_its_datum_by_the_call_it_began_with():
    config = load_config(overrides=["backend=verl"]).config
    found = Collected()
    episodes = [episode(k=k, solvers=(1.0, 0.0), judge=float(k)) for k in range(2)]
    found.add(episodes, config)
    data = {row.call: row for row in datums_of(found.groups, found.account, config)}
    found.account.check()
    rows = [row for k, e in enumerate(episodes) for row in rows_of_episode(e, k, 0.6)]
    for row in rows:
        assert data[row.call].ids == [*row.prompt_ids, *row.response_ids]
        assert data[row.call].mask[-len(row.response_ids) :] == row.response_mask


@pytest.mark.parametrize("singletons", [False, True])
def test_verls_grpo_on_our_rows_is_ours(singletons):
    pytest.importorskip("verl", reason="needs verl 0.9.1: make test-verl")
    torch = pytest.importorskip("torch")
    np = pytest.importorskip("numpy")
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    draw = random.Random(singletons)
    config = load_config(overrides=["backend=verl", "algorithm.zero_std=keep"]).config
    episodes = []
    for task in ("a", "b:c"):
        for k in range(1 if singletons and task == "a" else 4):
            rewards = tuple(float(draw.random() < 0.5) for _ in range(2))
            episodes.append(episode(task, k, rewards, draw.random()))
    account = Accounting()
    found = Collected()
    found.add(episodes, config)
    data = {row.call: row for row in datums_of(found.groups, account, config)}
    rows = [row for e in episodes for row in rows_of_episode(e, e.rollout_idx, 0.6)]
    uids = [f"uid{row.group.rpartition(':')[0]}" for row in rows]
    longest = max(len(row.response_ids) for row in rows)
    mask = torch.zeros(len(rows), longest)
    scores = torch.zeros(len(rows), longest)
    for i, row in enumerate(rows):
        mask[i, : len(row.response_mask)] = torch.tensor(row.response_mask)
        scores[i, len(row.response_mask) - 1] = row.reward
    tensors = {"response_mask": mask, "token_level_rewards": scores, "responses": mask.long()}
    batch = DataProto.from_dict(tensors, {"uid": np.array([row.group for row in rows], dtype=object)})
    keys = [f"{uid}_{row.key}" for uid, row in zip(uids, rows, strict=True)]
    theirs = compute_advantage_for_multi_trajectories(batch, keys, "grpo", config={}).batch["advantages"][:, 0].tolist()
    sizes = {row.group: sum(other.group == row.group for other in rows) for row in rows}
    for row, value in zip(rows, theirs, strict=True):
        own = data[row.call].advantages[-1]
        if sizes[row.group] > 1:
            assert own == pytest.approx(value, rel=1e-4, abs=1e-6)  # verl adds 1e-6 to the standard deviation
        else:  # verl takes the raw reward, we compare with nobody and learn nothing
            assert own == 0.0 and value == pytest.approx(row.reward)


@pytest.mark.parametrize(
    ("wanted", "rows", "ranks", "made"),
    [(1, 1, 8, 1), (3, 12, 1, 3), (3, 4, 1, 2), (4, 1, 1, 1), (4, 9, 2, 3), (16, 3, 2, 2), (2, 0, 1, 1)],
)
def test_no_mini_batch_can_be_made_of_padding_alone(wanted, rows, ranks, made):
    assert mini_batches(wanted, rows, ranks) == made
    padded = -(-rows // (ranks * made)) * ranks * made
    assert made == 1 or padded - rows < padded / made


class Answer:
    def __init__(self, ids, logprobs, stop_reason="completed"):
        self.token_ids, self.log_probs, self.stop_reason = ids, logprobs, stop_reason
        self.extra_fields = {"global_steps": 5}


@pytest.mark.parametrize(
    ("ids", "most", "reason"), [([4, 2], 8, "stop"), ([4, 5], 2, "length"), ([4, 2], 2, "stop"), ([4, 5], 8, "stop")]
)
def test_how_a_completion_ended_is_told_by_its_tokens(ids, most, reason):
    from rllm.backends.base import SamplingParams

    engine = ClientBackend(None, None, "m", 64, {2})
    done = engine._completion(Answer(ids, [-1.0] * len(ids)), SamplingParams(most), None)
    assert (done.finish_reason, done.versions) == (reason, [5] * len(ids))


def test_an_answer_without_log_probabilities_and_an_aborted_one_are_errors():
    from rllm.backends.base import SamplingParams

    engine = ClientBackend(None, None, "m", 64, {2})
    with pytest.raises(RuntimeError, match="2 tokens and no log-probabilities"):
        engine._completion(Answer([1, 2], None), SamplingParams(4), None)
    with pytest.raises(RuntimeError, match="aborted"):
        engine._completion(Answer([1], [0.0], "aborted"), SamplingParams(4), None)


async def _sample(engine, adapter):
    from rllm.backends.base import SamplingParams

    return await engine.sample([1], SamplingParams(4), adapter)


def test_only_the_one_policy_can_be_asked_for():
    import asyncio

    with pytest.raises(RequestError, match="one policy"):
        asyncio.run(_sample(ClientBackend(None, None, "m", 64, {2}), "judge"))
