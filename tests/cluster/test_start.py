"""What a run on verl checks before anything starts: the machines, the saved run it goes on with, the adapter, the tasks."""

import datetime
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rllm.backends.local.backend import LocalBackend
from rllm.backends.local.loading import DEFAULT_MODEL
from rllm.cluster.resume import CHECKPOINTS, STEP_FILE, saved_run, write_facts
from rllm.cluster.room import connect, lacking
from rllm.config.load import load_config
from rllm.data.dataset import Dataset
from rllm.errors import ConfigError, DataError, ModelError, RunError
from rllm.types import Task

needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl 0.9.1: make test-verl")
TASKS = Dataset([{"id": f"t{i}", "question": "?"} for i in range(4)], split="train")


def config_of(*overrides):
    return load_config(overrides=["backend=verl", *overrides]).config


def test_a_cluster_with_room_lacks_nothing():
    assert lacking([{"GPU": 8.0, "CPU": 64.0}, {"CPU": 4.0}], nodes=1, gpus=8) is None


@pytest.mark.parametrize(
    ("nodes", "gpus", "told"),
    [
        (1, 4, "2 machines, with this many GPUs each: 2, 2"),  # in sum there are enough, and verl would wait for ever
        (3, 1, "trainer.nnodes=3"),
        (2, 2, "6 a machine, and Ray counts 6, 2"),
    ],
)
def test_what_a_cluster_lacks_is_told_machine_by_machine(nodes, gpus, told):
    assert told in (lacking([{"GPU": 2.0, "CPU": 6.0}, {"GPU": 2.0, "CPU": 2.0}], nodes, gpus) or "")


def test_without_any_gpu_the_local_backend_is_named():
    assert "backend=local" in (lacking([{"CPU": 8.0}], 1, 1) or "")


@needs_verl
@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "nonsense"])
def test_an_address_without_a_cluster_is_told_at_once(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(RunError, match=f"^Ray at {address}: .*correct RAY_ADDRESS"):
        connect({"include_dashboard": False, "logging_level": "ERROR"})
    assert time.monotonic() - began < 15


@needs_verl
def test_a_cluster_that_was_started_here_and_has_ended_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray_current_cluster").write_text("127.0.0.1:1")  # as a kill of `ray start --head` leaves it
    with pytest.raises(RunError, match=r"^Ray at [\d.]+:1: .*ray stop"):
        connect({"_temp_dir": str(tmp_path), "include_dashboard": False, "logging_level": "ERROR"})


@pytest.fixture
def saved(tmp_path):
    """A run on verl that saved step 3 on two GPUs."""
    run = tmp_path / "runs" / "mine"
    actor = run / CHECKPOINTS / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    (run / CHECKPOINTS / STEP_FILE).write_text("3")
    for rank in range(2):
        (actor / f"model_world_size_2_rank_{rank}.pt").touch()
    write_facts(run, config_of(), TASKS)
    return run


def going_on(run, *overrides):
    return saved_run(config_of(f"trainer.resume={run}", "trainer.n_gpus_per_node=2", *overrides), TASKS, 5)


def test_a_saved_run_is_found_by_its_folder_and_by_its_name(saved):
    found = going_on(saved)
    assert (found.run, found.step) == (saved, 3)
    named = (f"trainer.run_dir={saved.parent}", "trainer.experiment_name=mine")
    assert going_on("auto", *named).run == saved
    shutil.copytree(saved, saved.with_name("mine-2"))
    assert going_on("auto", *named).run == saved.with_name("mine-2")  # the newest of that name
    assert going_on("auto", named[0], "trainer.experiment_name=other") is None


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("lora.rank=16",), "lora.rank=8, this config 16"),
        (("lora.target_modules=[q_proj]",), "lora.target_modules"),
        (("rollout.n=2",), "rollout.n=4, this config 2"),
        (("trainer.n_gpus_per_node=4",), "saved by 2 GPUs.*has 4.*adapter-step-3"),
    ],
)
def test_what_does_not_fit_a_saved_run_is_told_before_anything_starts(saved, overrides, told):
    with pytest.raises(ConfigError, match=told):
        going_on(saved, *overrides)


def test_other_tasks_all_steps_done_and_no_state_are_told(saved, tmp_path):
    config = config_of(f"trainer.resume={saved}", "trainer.n_gpus_per_node=2")
    with pytest.raises(ConfigError, match="training tasks"):
        saved_run(config, Dataset(list(TASKS)[:3], split="train"), 5)
    with pytest.raises(ConfigError, match="all 3 steps of that run are done"):
        saved_run(config, TASKS, 3)
    with pytest.raises(ConfigError, match="no such folder"):
        going_on(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="experiment_name is needed"):
        going_on("auto")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A saved adapter of rank 4 and alpha 12."""
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    made = load_config(overrides=["lora.rank=4", "lora.alpha=12", "model.device=cpu"]).config
    backend = LocalBackend.create(made)
    backend.export_adapter(folder)
    backend.close()
    return folder


@needs_verl
def test_the_rank_and_alpha_of_a_saved_adapter_count_and_that_is_told(adapter):
    from rllm.cluster.start import with_saved_adapter

    given = config_of(f"lora.adapter_path={adapter}", "lora.rank=32")
    config, notes = with_saved_adapter(given)
    assert (config.lora.rank, config.lora.alpha, given.lora.rank) == (4, 12, 32)
    assert "rank 4, alpha 12" in notes[0]


@needs_verl
def test_a_saved_adapter_that_is_not_there_or_has_several_ranks_is_refused_at_start(adapter, tmp_path):
    from rllm.cluster.start import with_saved_adapter

    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        with_saved_adapter(config_of(f"lora.adapter_path={tmp_path}"))
    several = tmp_path / "several"
    shutil.copytree(adapter, several)
    about = json.loads((several / "adapter_config.json").read_text())
    (several / "adapter_config.json").write_text(json.dumps(about | {"alpha_pattern": {"q_proj": 24}}))
    with pytest.raises(ConfigError, match="several ranks or alphas"):
        with_saved_adapter(config_of(f"lora.adapter_path={several}"))


@needs_verl
def test_a_task_comes_out_as_it_went_in(tmp_path):
    from rllm.cluster.tasks import TaskRows, text_to_task, write_tasks

    about = {"numbers": (1, 2), 3: "a number as key", "raw": b"x", "day": datetime.date(2026, 1, 2), "cut": "\ud83d"}
    tasks = [Task("a", "one\u2028two\x85three\nfour", about), Task("b", [{"role": "user", "content": "hi"}], {})]
    rows = TaskRows([str(write_tasks(tasks, tmp_path / "tasks.pkl"))])
    assert [text_to_task(rows[i]["task"]) for i in range(len(rows))] == tasks
    assert rows[0]["raw_prompt"][0]["content"] == tasks[0].instruction


@needs_verl
def test_a_task_that_cannot_be_sent_is_named(tmp_path):
    from rllm.cluster.tasks import write_tasks

    with pytest.raises(DataError, match="task 'a' cannot be sent to other processes"):
        write_tasks([Task("a", "?", {"lock": threading.Lock()})], tmp_path / "tasks.pkl")


@needs_verl
def test_a_worker_that_dies_is_told_and_a_busy_one_is_not_waited_for(monkeypatch):
    import ray
    from omegaconf import OmegaConf

    from rllm.cluster.start import _run
    from rllm.cluster.worker import FlowManager

    @ray.remote(num_cpus=0)
    class Worker:
        async def alive(self):
            return None

        async def block(self):
            time.sleep(3)

        async def end(self):
            os._exit(1)

    manager = FlowManager.__new__(FlowManager)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        manager.agent_loop_workers, manager._asked = [Worker.remote(), Worker.remote()], {}
        ray.get([worker.alive.remote() for worker in manager.agent_loop_workers])
        manager.agent_loop_workers[0].block.remote()
        began = time.monotonic()
        for _ in range(3):
            manager.check_alive()
        assert time.monotonic() - began < 2
        manager.agent_loop_workers[1].end.remote()
        with pytest.raises(RunError, match="a process that runs episodes has died"):
            for _ in range(200):
                manager.check_alive()
                time.sleep(0.05)

        def dies(tree, task_runner_class):
            ray.get(ray.remote(lambda: ray.get(Worker.remote().end.remote())).remote())

        monkeypatch.setattr("verl.trainer.main_ppo.run_ppo", dies)
        with pytest.raises(RunError, match=r"the run on verl was lost: .*trainer\.resume=<its folder> goes on"):
            _run(OmegaConf.create({"trainer": {"device": "cuda"}}))
    finally:
        ray.shutdown()


@needs_verl
def test_a_flow_and_the_files_that_it_uses_reach_a_machine_that_has_none_of_them(tmp_path):
    from rllm.cluster.job import Job

    folder = tmp_path / "users"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "__init__.py").touch()
    (folder / "parts" / "deeper.py").write_text("LEVEL = 3\ndef level(): return LEVEL\n")
    (folder / "my_words.py").write_text("from parts import deeper\ndef words(): return f'level {deeper.level()}'\n")
    (folder / "my_flow.py").write_text("import my_words\ndef flow(task, config): return my_words.words()\n")
    sys.path.insert(0, str(folder))
    try:
        flow = importlib.import_module("my_flow").flow
        path = Job(config_of(), tmp_path, flow=flow, evaluator=flow).save()
    finally:
        sys.path.remove(str(folder))
        for name in ("my_flow", "my_words", "parts", "parts.deeper"):
            del sys.modules[name]
    shutil.rmtree(folder)
    code = f"from rllm.cluster.job import Job; print(Job.load({str(path)!r}).flow(None, None))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "level 3", done.stderr


@needs_verl
def test_a_flow_that_holds_what_cannot_travel_is_told(tmp_path):
    from rllm.cluster.job import Job

    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to other processes.*inside of the function"):
        Job(config_of(), tmp_path, flow=lambda task, config: lock).save()


@needs_verl
@pytest.mark.parametrize("lost", [True, False])
def test_an_episode_whose_rows_could_not_be_written_counts_as_failed(lost):
    import asyncio

    from rllm.cluster.job import Job
    from rllm.cluster.worker import FlowWorker
    from rllm.types import Episode, Step, TerminationReason, Trajectory

    worker = FlowWorker.__new__(FlowWorker)
    worker.job, worker.episodes = Job(config_of(), Path()), []
    step = Step(prompt_ids=[1], response_ids=[2], logprobs=[-1.0], versions=[0], temperature=1.0)
    made = Episode(
        "t:0", trajectories=[Trajectory("solver", [step], 1.0)], termination_reason=TerminationReason.ENV_DONE
    )

    async def run(*_, **__):
        return made

    async def put(rows, *_):
        if lost:
            raise OSError("the storage is full")

    worker._episode, worker._put = run, put
    asyncio.run(worker._run_agent_loop({}, {}, task="", session_id=0, uid="u", global_steps=1))
    assert worker.episodes == [made] and made.failed is lost
    assert ("the storage is full" in (made.error or "")) is lost


@needs_verl
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("lora.target_modules=nothing",), "nothing"),
        (("lora.target_modules=[q_proj,w_proj]",), "'w_proj'.*q_proj"),
        (("lora.exclude_modules=.*",), "leave no module to train"),
    ],
)
def test_targets_that_match_no_module_are_refused_before_a_worker_starts(overrides, told):
    from rllm.cluster.start import with_named_targets

    with pytest.raises(ConfigError, match=told):
        with_named_targets(config_of(*overrides), DEFAULT_MODEL)
    for taken in ("lora.target_modules=[q_proj,lm_head]", "lora.rank=0", r"lora.exclude_modules=.*\.1\..*"):
        given = config_of(taken)
        assert with_named_targets(given, DEFAULT_MODEL) is given


@needs_verl
def test_an_expression_reaches_peft_as_the_modules_that_the_local_backend_adapts():
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from rllm.cluster.start import with_named_targets

    overrides = (r"lora.target_modules=.*layers\.1\..*", "lora.exclude_modules=[k_proj]")
    lora = with_named_targets(config_of(*overrides), DEFAULT_MODEL).lora
    assert lora.exclude_modules is None and len(lora.target_modules) == 6
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=list(lora.target_modules)))
    backend = LocalBackend.create(load_config(overrides=[*overrides, "model.device=cpu"]).config)
    try:
        assert sorted(adapted.base_model.targeted_module_names) == sorted(backend.adapters["default"].modules_adapted)
    finally:
        backend.close()


@needs_verl
@pytest.mark.parametrize(
    ("mean", "told"),
    [(2e-3, "does not run the policy.*2.00e-03.*publish_tolerance"), (float("nan"), "diverged: lower")],
)
def test_a_gap_between_sampler_and_trainer_ends_the_run_with_what_it_means(mean, told):
    from rllm.cluster.trainer import check_gap

    check_gap(3, 1e-3, 1.0, 1e-3)
    with pytest.raises(RunError, match=f"^step 3: .*{told}"):
        check_gap(3, mean, 1.0, 1e-3)
