"""Tasks in, finished episodes out: the gateway and the runner over one backend.

Knows how many episodes of which tasks; nothing of training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from rllm.backends.base import DEFAULT_ADAPTER, Backend
from rllm.config.schema import Config
from rllm.errors import RunError
from rllm.gateway.server import Gateway
from rllm.rollouts.runner import EpisodeRequest, EpisodeRunner
from rllm.types import Episode, Task


class Rollouts:
    """Gateway and runner over one backend: tasks in, finished episodes out."""

    def __init__(
        self,
        backend: Backend,
        config: Config,
        flow: Any,
        workflow_class: type | None,
        workflow_args: dict[str, Any],
        evaluator: Any,
    ):
        self.config = config
        self.gateway = Gateway(
            backend,
            host=config.gateway.host,
            port=config.gateway.port,
            max_prompt_length=config.data.max_prompt_length,
            default_max_tokens=config.data.max_response_length,
            roles=[] if config.lora.per_role == "shared" else list(config.lora.per_role),
        )
        self.runner = EpisodeRunner(
            self.gateway,
            flow=flow,
            workflow_class=workflow_class,
            workflow_args=workflow_args,
            evaluator=evaluator,
            config=config,
        )

    def __enter__(self) -> Rollouts:
        self.gateway.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()
        self.gateway.stop()

    def run(
        self,
        tasks: Sequence[Task],
        *,
        n: int,
        step: int = 0,
        attempt: int = 0,
        validation: bool = False,
        adapter: str = DEFAULT_ADAPTER,
    ) -> list[Episode]:
        """`n` episodes of every task, in task order, sampled anew for each `attempt` of a step. Too many failures stop the run with
        the first traceback."""
        seed = self.config.trainer.seed
        label = "val" if validation else f"{step}/{attempt}" if attempt else str(step)
        requests = [
            EpisodeRequest(task, f"{task.id}:{k}", stable_seed(seed, label, task.id, k), validation, adapter)
            for task in tasks
            for k in range(n)
        ]
        episodes = self.runner.run(requests)
        failed = [episode for episode in episodes if episode.failed]
        if failed and len(failed) > self.config.rollout.max_failed_fraction * len(episodes):
            raise RunError(
                f"{len(failed)} of {len(episodes)} episodes failed, more than rollout.max_failed_fraction="
                f"{self.config.rollout.max_failed_fraction}. The first failure (episode {failed[0].id}, "
                f"{failed[0].termination_reason.value if failed[0].termination_reason else 'unknown'}):\n"
                f"{failed[0].error or ''}"
            )
        return episodes


def stable_seed(*parts: object) -> int:
    """A 63-bit seed that depends on `parts` alone, the same on every machine and run."""
    digest = hashlib.blake2b(json.dumps([str(part) for part in parts]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
