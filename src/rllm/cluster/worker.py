"""verl's agent loop with our flows in it: each worker has a gateway over verl's rollout servers, runs episodes and writes their rows.

Imported in processes of a run on verl only: it needs verl, Ray and TransferQueue.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import ray
import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rllm.cluster.engine import ClientBackend
from rllm.cluster.job import Job
from rllm.cluster.rows import Row, rows_of_episode
from rllm.cluster.tasks import text_to_task
from rllm.errors import RunError
from rllm.rollouts.batch import Rollouts, stable_seed
from rllm.rollouts.runner import EpisodeRequest
from rllm.rollouts.watchdog import Watchdog
from rllm.types import Episode, TerminationReason

_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]


class FlowWorker(_Worker):
    """Runs the flow of a job where verl's worker would run an agent loop."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any):
        super().__init__(config, llm_client, *args, **kwargs)
        self.job = Job.load(config.rllm.job)
        ours, rollout = self.job.config, config.actor_rollout_ref.rollout
        longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        self.engine = ClientBackend(
            llm_client, self.tokenizer, ours.model.path, longest, _end_ids(self.model_config, self.tokenizer)
        )
        self.rollouts = Rollouts(
            self.engine,  # pyright: ignore[reportArgumentType]
            ours,
            self.job.flow,
            self.job.workflow_class,
            self.job.workflow_args,
            self.job.evaluator,
        )
        self.rollouts.gateway.start()
        workers = max(rollout.agent.num_workers, 1)
        self.free = asyncio.Semaphore(max(ours.rollout.max_concurrency // workers, 1))
        self.episodes: list[Episode] = []
        # A flow that blocks the loop uses up everybody's time, so it is ended while the others have some left.
        self.watchdog: Watchdog | None = None

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        task: str,
        session_id: int,
        uid: str,
        **row: Any,
    ) -> None:
        """One training episode. Never raises for a fault of the flow: a failed episode is kept for the accounts and has no rows."""
        step = int(row["global_steps"])
        episode = await self._episode(task, int(session_id), step, validate=False)
        try:
            rows = rows_of_episode(episode, int(session_id), self.job.config.rollout.temperature)
            if rows:
                await self._put(rows, uid, step, row.get("data_source", "unknown"))
        except ValueError as error:
            episode.termination_reason, episode.error = TerminationReason.ERROR, str(error)
        except (
            Exception
        ):  # rows that could not be written are not trained, so the episode must not count as if they were
            episode.termination_reason, episode.error = TerminationReason.ERROR, traceback.format_exc()
        self.episodes.append(episode)

    async def validate(self, asked: list[tuple[str, int]], step: int) -> list[Episode]:
        """Validation episodes: (task as text, rollout index) each."""
        return list(await asyncio.gather(*(self._episode(task, k, step, validate=True) for task, k in asked)))

    def take_episodes(self) -> tuple[list[Episode], dict[str, float], list[str]]:
        """The training episodes since this was last asked, with what the gateway counted and the notes of the runner."""
        taken, self.episodes = self.episodes, []
        return taken, self.rollouts.gateway.take_counts(), self.rollouts.runner.notes

    async def alive(self) -> None:
        """Answers, in a process that lives."""

    async def _episode(self, task: str, k: int, step: int, validate: bool) -> Episode:
        self.engine.home = asyncio.get_running_loop()
        if self.watchdog is None:
            self.watchdog = Watchdog(self.job.config.rollout.episode_timeout_s / 2)
            self.watchdog.__enter__()  # as long as this process
        found = text_to_task(task)
        seed = stable_seed(self.job.config.trainer.seed, "val" if validate else str(step), found.id, k)
        async with self.free:
            return await self.rollouts.runner.run_episode(EpisodeRequest(found, f"{found.id}:{k}", seed, validate))

    async def _put(self, rows: list[Row], uid: str, step: int, source: str) -> None:
        """Write rows into TransferQueue as verl's own worker does, but for their groups."""
        fields, tags = [], []
        for row in rows:
            output = AgentLoopOutput(
                prompt_ids=row.prompt_ids,
                response_ids=row.response_ids,
                response_mask=row.response_mask,
                response_logprobs=row.response_logprobs,
                reward_score=row.reward,
                num_turns=row.turns,
                metrics=AgentLoopMetrics(),
                extra_fields={"reward_extra_info": {}},
            )
            field = output.as_dict()
            ids = torch.cat([field["prompts"], field["responses"]])
            field |= {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": field["response_mask"]}
            field |= {"uid": row.group, "call": row.call, "data_source": source, "multi_modal_inputs": {}}
            fields.append(field)
            lengths = {"prompt_len": len(row.prompt_ids), "response_len": len(row.response_ids), "seq_len": len(ids)}
            least, most = row.versions
            steps = {"global_steps": step, "min_global_steps": least, "max_global_steps": most}
            tags.append({"status": "success"} | lengths | steps)
        keys = [f"{uid}_{row.key}" for row in rows]
        await tq.async_kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train"
        )


def _end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a turn: the tokenizer's and those of the generation settings."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = found if isinstance(found, (list, tuple)) else [found]
    return {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}


class FlowManager(AgentLoopManagerTQ):
    """verl's manager with `FlowWorker`s: ``rollout.agent.agent_loop_manager_class``."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # After super, which sets its own. The watchdog tells a flow from the loop by Python's frames, of which uvloop has none.
        self.agent_loop_workers_class = ray.remote(runtime_env={"env_vars": {"RAY_USE_UVLOOP": "0"}})(FlowWorker)
        self._asked: dict[int, Any] = {}

    def check_alive(self) -> None:
        """Raise a `RunError` where a worker has died: nobody else would tell, and the rows that it owes would be waited for without end.
        Waits for no answer; one that is busy is asked no second time."""
        for i, worker in enumerate(self.agent_loop_workers):
            if i not in self._asked:
                self._asked[i] = worker.alive.remote()
            elif ray.wait([self._asked[i]], timeout=0)[0]:
                self._got([self._asked.pop(i)])

    @staticmethod
    def _got(answers: list[Any]) -> list[Any]:
        """What the workers answered."""
        try:
            return ray.get(answers)
        except ray.exceptions.RayActorError as error:
            raise RunError(
                "a process that runs episodes has died: the flow or the evaluator ended it (os._exit, a crash in native code), or it ran "
                f"out of memory. {error}"
            ) from error

    def take_episodes(self) -> tuple[list[Episode], dict[str, float], list[str]]:
        """Of all workers; counts are summed."""
        episodes: list[Episode] = []
        counts: dict[str, float] = {}
        notes: list[str] = []
        for found, counted, noted in self._got([w.take_episodes.remote() for w in self.agent_loop_workers]):
            episodes += found
            notes += [note for note in noted if note not in notes]
            counts = {name: counts.get(name, 0.0) + value for name, value in counted.items()}
        return episodes, counts, notes

    def validate(self, tasks: list[str], n: int, step: int) -> list[Episode]:
        """`n` episodes of each task, in task order."""
        asked = [(task, k) for task in tasks for k in range(n)]
        several = len(self.agent_loop_workers)
        shares = [asked[i::several] for i in range(several)]
        done = self._got(
            [w.validate.remote(share, step) for w, share in zip(self.agent_loop_workers, shares, strict=True)]
        )
        return [done[i % several][i // several] for i in range(len(asked))]
