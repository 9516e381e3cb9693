"""Groups trained while others still run: the same gradient, the same counts, and nothing left where a step comes to nothing."""

import asyncio
import json
import random
import threading
import time

import pytest
import torch
from openai import AsyncOpenAI

import rllm
from rllm.backends.base import DEFAULT_ADAPTER, INITIAL_ADAPTER, AdamParams, Datum, LossSpec, SamplingParams
from rllm.backends.local.backend import LocalBackend
from rllm.config.names import AGGREGATIONS
from rllm.config.schema import Config
from rllm.data.countdown import countdown
from rllm.errors import RunError
from rllm.overlap import TrainAhead
from rllm.types import Episode, Step, Task, Trajectory

CPU = {"device": "cpu", "dtype": "float32"}


@pytest.fixture
def backend_of():
    made = []

    def _make(**lora):
        config = {"model": CPU, "lora": {"rank": 4, "alpha": 8} | lora}
        made.append(LocalBackend.create(Config.model_validate(config)))
        return made[-1]

    yield _make
    for backend in made:
        backend.close()


def rows(count=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    result = []
    for i in range(count):
        ids = torch.randint(5, 200, (10 + 3 * i,), generator=generator).tolist()
        mask = [0] * 6 + [1] * (len(ids) - 6)
        row = Datum(ids, mask, [(i - 4) * m for m in mask], [-3.0 * m for m in mask], role="judge" if i % 3 else "")
        row.call = f"call-{i}"
        result.append(row)
    return result


def gradients(backend):
    return [p.grad.clone() for p in backend.learner.trainable() if p.grad is not None]


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_trained_ahead_give_the_gradient_and_metrics_of_the_whole(backend_of, aggregation, rank):
    backend, data = backend_of(rank=rank), rows()
    plain = LossSpec(aggregation=aggregation, norm=16.0, clip_low=0.3)
    for loss in (plain, {"": plain, "judge": LossSpec("cispo", aggregation=aggregation, norm=16.0)}):
        whole = backend.forward_backward(data, loss)
        expected = gradients(backend)
        backend.discard_gradients()
        for ahead in (data[2:3] + data[5:8], data):
            for piece in (ahead[:2], ahead[2:]):
                backend.train_ahead(piece, loss)
            rest = [row for row in data if row not in ahead]
            metrics = backend.forward_backward(rest, loss, ahead)
            for mine, value in zip(gradients(backend), expected, strict=True):
                assert (mine - value).norm() <= 2e-5 * value.norm()
            assert metrics == pytest.approx(whole, rel=1e-4, abs=1e-7)
            backend.discard_gradients()
    # What was discarded leaves nothing behind.
    backend.train_ahead(data[:3], plain)
    backend.discard_gradients()
    assert backend.forward_backward(data, plain) == pytest.approx(backend_of(rank=rank).forward_backward(data, plain))


async def attempt(task, config):
    """One call, so that which tokens it is sampled from does not depend on the order in which calls arrive."""
    client = AsyncOpenAI(base_url=config.base_url, api_key="none")
    message = {"role": "user", "content": task.metadata["question"]}
    answer = await client.chat.completions.create(model=config.model, messages=[message])
    return rllm.Trajectory(
        name="solver", steps=[rllm.Step(id=answer.id)], output=answer.choices[0].message.content or ""
    )


@rllm.rollout
async def uneven(task, config):
    """Some episodes take longer."""
    await asyncio.sleep(0.6 if int(task.metadata["target"]) % 2 else 0.0)
    return await attempt(task, config)


@rllm.evaluator
def length(task, episode):
    return float(len(episode.trajectories[0].output) % 3)


def train(tmp_path, name, tasks=None, flow=uneven, **sections):
    config = {
        "data": {"train_batch_size": 6, "max_prompt_length": 200, "max_response_length": 48},
        "rollout": {"n": 4}, "lora": {"rank": 4, "alpha": 8}, "model": CPU | {"path": "default"},
        "trainer": {"total_steps": 2, "run_dir": str(tmp_path), "experiment_name": name, "val_before_train": False},
    }  # fmt: skip
    for key, values in sections.items():
        config[key] = config.get(key, {}) | values
    trainer = rllm.AgentTrainer(
        agent_flow=flow, evaluator=length, config=config, train_dataset=tasks or countdown("train", 12)
    )
    result = trainer.train()
    folder = tmp_path / name
    return result, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def at_once(monkeypatch):
    """A few hundred tokens are worth a pass, so that a small run has several."""
    monkeypatch.setattr(LocalBackend, "tokens_at_once", 100)


def test_a_run_that_overlaps_trains_the_same_trajectories_to_the_same_weights(tmp_path, at_once):
    plain, before = train(tmp_path, "plain")
    overlapped, after = train(tmp_path, "overlapped", trainer={"overlap": True})
    assert overlapped["accounting"] == plain["accounting"]
    assert all(m["train/ahead_tokens"] > 0 and m["timing_s/ahead"] > 0 for m in after)
    assert any(m["train/ahead_tokens"] < m["actor/tokens"] for m in after)
    same = ("actor/loss", "actor/grad_norm", "actor/tokens", "actor/ppo_kl", "critic/score/mean", "samples/trained")
    for one, other in zip(before, after, strict=True):
        for metric in same:
            assert other[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-6), metric


class Update:
    """What `TrainAhead` needs of a `PolicyUpdate`, and of a backend that counts."""

    loss = LossSpec()
    tokens_at_once = 20

    def __init__(self, fails=False):
        self.pieces, self.discarded, self.fails = [], 0, fails
        self.backend, self.go = self, threading.Event()

    def fill_ahead(self, rows):
        pass

    def train_ahead(self, data, loss):
        self.go.wait(10)
        if self.fails:
            raise RuntimeError("out of memory")
        self.pieces.append([row.call for row in data])

    def discard_gradients(self):
        self.discarded += 1


def episode(task, k, reward):
    step = Step(prompt_ids=[1, 2, 3], response_ids=[4, 5, 6], logprobs=[-1.0] * 3)
    return Episode(id=f"{task}:{k}", trajectories=[Trajectory(name="solver", steps=[step], reward=reward)])


def ahead_of(update, tasks="abc"):
    ahead = TrainAhead(update, update, Config.model_validate({"rollout": {"n": 4}}), 0)
    return ahead, ahead.watch([Task(task) for task in tasks])


def test_a_group_is_trained_when_its_last_episode_ends_and_rows_stand_in_the_order_of_the_step():
    update = Update()
    ahead, see = ahead_of(update)
    episodes = [episode("b", k, float(k == 2)) for k in (3, 0, 2, 1)]
    for one in episodes[:3]:
        see(one)
    assert ahead._job is None
    update.go.set()
    see(episodes[3])
    while not update.pieces:
        time.sleep(0.01)
    trained = ahead.finish()
    order = sorted(episodes, key=lambda e: e.id)
    assert [row.call for row in trained] == [e.trajectories[0].steps[0].id for e in order]
    assert update.pieces == [[row.call for row in trained]] and update.discarded == 0


def test_what_waits_when_the_episodes_are_over_is_left_for_the_update():
    update = Update()
    ahead, see = ahead_of(update)
    for task in "abc":
        for k in range(4):
            see(episode(task, k, float(k)))
    threading.Timer(0.2, update.go.set).start()
    assert len(ahead.finish()) == 4 and len(update.pieces) == 1


def test_a_step_that_comes_to_nothing_leaves_no_gradient():
    update = Update()
    ahead, see = ahead_of(update)
    for k in range(4):
        see(episode("a", k, float(k)))
    update.go.set()
    ahead.stop()
    assert update.discarded == 1


def test_a_fault_while_training_ahead_is_raised_where_the_step_goes_on():
    update = Update(fails=True)
    update.go.set()
    ahead, see = ahead_of(update)
    for k in range(4):
        see(episode("a", k, float(k)))
    assert ahead._job is not None and ahead._job.exception(10)
    with pytest.raises(RuntimeError, match="out of memory"):
        ahead.finish()


def test_rows_that_turned_out_otherwise_are_trained_again(backend_of):
    from rllm.update import PolicyUpdate

    backend, data = backend_of(), rows()
    update = PolicyUpdate(backend, Config.model_validate({"model": CPU}), LossSpec(), 1)
    expected = backend.forward_backward(data, LossSpec())["loss"]
    norm = backend.optim_step(AdamParams(0.0))["grad_norm"]
    other = [Datum(list(row.ids), list(row.mask), [9.0] * len(row.ids), list(row.logprobs)) for row in data[:4]]
    for row, stale in zip(data, other, strict=False):
        stale.call, stale.role = row.call, row.role
    backend.train_ahead(other, LossSpec())
    left, trained = update._without(data, other)
    assert left is data and not trained
    metrics = backend.forward_backward(left, LossSpec()) | backend.optim_step(AdamParams(0.0))
    assert metrics["loss"] == pytest.approx(expected) and metrics["grad_norm"] == pytest.approx(norm)
    # And as they are, they are not.
    backend.train_ahead(data[:4], LossSpec())
    left, trained = update._without(data, data[:4])
    assert left == data[4:] and list(trained) == data[:4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rank", [8, 0])
def test_on_cuda_passes_are_trained_and_captured_while_the_sampler_captures_its_own(rank):
    config = {"model": {"device": "cuda"}, "lora": {"rank": rank, "alpha": 16}, "rollout": {"max_batch": 64}}
    backend = LocalBackend.create(Config.model_validate(config))
    quiet, loss = LocalBackend.create(Config.model_validate(config)), LossSpec()
    names = [DEFAULT_ADAPTER, INITIAL_ADAPTER if rank else DEFAULT_ADAPTER] * 20
    numbers, faults = random.Random(0), []

    def sample(over, made):
        """Batches of all sizes, each with prompts of other lengths, so that something new is captured all the time."""
        try:
            while not over.is_set():
                prompts = [[numbers.randrange(5, 200) for _ in range(numbers.randrange(4, 150))] for _ in names]
                params = [SamplingParams(max_tokens=numbers.randrange(2, 60), ignore_eos=True) for _ in names]
                asked = [backend.engine.submit(*one) for one in zip(prompts, params, names, strict=True)]
                made += zip(prompts, names, [future.result() for future in asked], strict=True)
        except Exception as error:
            faults.append(error)

    try:
        for trial in range(4):
            over, made = threading.Event(), []
            worker = threading.Thread(target=sample, args=(over, made))
            worker.start()
            pieces = [rows(4 + numbers.randrange(9), seed=10 * trial + k) for k in range(6)]
            for piece in pieces:
                for _ in range(3):  # a shape is captured when it is seen again
                    backend.train_ahead(piece, loss)
                backend.discard_gradients()
            for piece in pieces[:-1]:
                backend.train_ahead(piece, loss)
            over.set()
            worker.join()
            assert not faults and len(made) >= len(names)
            whole = [row for piece in pieces for row in piece]
            metrics = backend.forward_backward(pieces[-1], loss, whole[: -len(pieces[-1])])
            expected = quiet.forward_backward(whole, loss)
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=2e-2)
            for mine, value in zip(gradients(backend), gradients(quiet), strict=True):
                assert (mine - value).norm() <= 3e-2 * value.norm() + 1e-6
            for prompt, name, answer in made[-10:]:
                scored = quiet.score([*prompt, *answer.ids], name).logprobs[len(prompt) - 1 :]
                gaps = [abs(a - b) for a, b in zip(answer.logprobs, scored, strict=True)]
                assert max(gaps) < 0.5 and sum(gaps) / len(gaps) < 0.05, gaps
            for one in (backend, quiet):
                one.optim_step(AdamParams(1e-3))
                one.publish()
            probe = backend.probe()
            assert probe.same_weights and probe.gap_max < probe.tolerance
            assert backend.learner._layers._graphs
            with torch.no_grad():  # AdamW's first steps have the sign of a gradient, even of one that is but rounding
                for mine, value in zip(backend.learner.trainable(), quiet.learner.trainable(), strict=True):
                    mine.copy_(value)
                for weight, master in backend.learner.masters.items():
                    weight.copy_(master)
            backend.publish()
    finally:
        backend.close()
        quiet.close()


def test_a_run_whose_flows_fail_ends_without_a_gradient_left(tmp_path, at_once):
    @rllm.rollout
    async def failing(task, config):
        if int(task.metadata["target"]) % 2:
            raise ValueError("no tool")
        return await attempt(task, config)

    with pytest.raises(RunError, match="no tool"):
        train(tmp_path, "fails", flow=failing, trainer={"overlap": True}, rollout={"max_failed_fraction": 0.1})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("train-ahead")]
