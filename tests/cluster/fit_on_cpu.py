"""A whole run on verl without accelerators: ``python fit_on_cpu.py FOLDER RANKS FAULT [key=value]...``; prints the result as JSON.
RANKS are those of each machine: ``2`` is one machine with two, ``1+1`` two with one each (two Ray nodes on this host).

Ray, TransferQueue, FSDP2 on gloo and the flow are what they are on a cluster; in the place of vLLM stands our local engine (`cpu_rollout`).
FAULT ``task`` lets one of the three tasks fail, ``all`` every one, ``none`` none; with ``group`` only one task's solvers get rewards that differ.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "cpu_verl", "VERL_ENGINE_DEVICE": "cuda"}
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "solver_judge"))

import rllm
from rllm.config.load import load_config
from rllm.data.dataset import load_dataset
from rllm.errors import run_cli
from rllm.trainer import AgentTrainer

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
ON_CPU = [
    f"{ROLLOUT}.name=rllm_engine",
    "trainer.device=cpu",
    "actor_rollout_ref.model.use_remove_padding=false",  # needs flash attention
    "verl.+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    f"{ACTOR}.fsdp_config.use_torch_compile=false",
    f"{ACTOR}.use_torch_compile=false",
    f"{ROLLOUT}.layered_summon=false",
    f"{ROLLOUT}.agent.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
]
SMALL = [
    "data.train_batch_size=3",
    "data.max_prompt_length=400",
    "data.max_response_length=24",
    "data.shuffle=false",
    "rollout.n=2",
    "lora.rank=4",
    "lora.alpha=8",
    "model.dtype=float32",
    "optim.lr=1e-2",
]


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster
    from solver_judge_flow import solver_judge, solver_judge_evaluator

    folder, ranks, fault, *overrides = sys.argv[1:]
    train = load_dataset("countdown", split="train").select(range(3))
    broken = {task.id for task in (list(train)[:1] if fault == "task" else train if fault == "all" else ())}

    @rllm.rollout(name="solver_judge")
    async def flow(task: rllm.Task, config: rllm.AgentConfig) -> rllm.Episode:
        if task.id in broken:
            raise RuntimeError("this flow is broken")
        return await solver_judge.arun(task, config)

    @rllm.evaluator
    def one_group(task: rllm.Task, episode: rllm.Episode) -> rllm.EvalOutput:
        for k, trajectory in enumerate(episode.trajectories):
            trajectory.reward = float(k % 2 == 0 or task.id != next(iter(train)).id or trajectory.name != "solver")
        return rllm.EvalOutput(reward=1.0)

    machines = [int(number) for number in ranks.split("+")]
    quiet: dict = {"log_to_driver": False, "logging_level": "ERROR"}
    if len(machines) == 1:
        ray.init("local", num_cpus=16, num_gpus=machines[0], include_dashboard=False, **quiet)
    else:
        cluster = Cluster()
        atexit.register(cluster.shutdown)  # else the next `ray.init` on this host would look for it
        atexit.register(ray.shutdown)  # runs before
        for number in machines:
            cluster.add_node(num_cpus=16, num_gpus=number, include_dashboard=False)
        ray.init(cluster.address, **quiet)
    run = [f"trainer.run_dir={folder}", f"trainer.nnodes={len(machines)}", f"trainer.n_gpus_per_node={machines[0]}"]
    trainer = AgentTrainer(
        agent_flow=flow,
        evaluator=one_group if fault == "group" else solver_judge_evaluator,
        config=load_config(overrides=["backend=verl", *ON_CPU, *SMALL, *run, *overrides]),
        train_dataset=train,
        val_dataset=load_dataset("countdown", split="val").select(range(2)),
    )
    print("RESULT", json.dumps(trainer.train()))


if __name__ == "__main__":
    run_cli(main)
