"""Tasks in, finished episodes out: the gateway and the runner over one backend.

Knows how many episodes of which tasks; nothing of training.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllm.backends.base import DEFAULT_ADAPTER, Backend
from rllm.config.schema import Config
from rllm.errors import RunError
from rllm.gateway.remote import RemoteGateway
from rllm.gateway.server import Gateway
from rllm.rollouts.limits import LimitedBackend
from rllm.rollouts.runner import EpisodeRequest, EpisodeRunner
from rllm.types import Episode, Task


def refuse_running_loop(call: str) -> None:
    """Raise a `RunError` if `call`, which runs event loops of its own, is made from inside of one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RunError(
        f"{call}() was called inside a running event loop (a notebook or an async function); there it needs a thread of its own: "
        f"await asyncio.to_thread({call}, ...)"
    )


class Rollouts:
    """Gateway and runner over one backend: tasks in, finished episodes out."""

    def __init__(
        self,
        backend: Backend | None,
        config: Config,
        flow: Any,
        workflow_class: type | None,
        workflow_args: dict[str, Any],
        evaluator: Any,
        gateway: RemoteGateway | None = None,
    ):
        """`gateway` stands in for the backend's own; the backend may then be None."""
        self.config = config
        self.gateway = gateway or self._own_gateway(backend, config)
        self.runner = EpisodeRunner(
            self.gateway,
            flow=flow,
            workflow_class=workflow_class,
            workflow_args=workflow_args,
            evaluator=evaluator,
            config=config,
        )

    @staticmethod
    def _own_gateway(backend: Backend | None, config: Config) -> Gateway:
        assert backend is not None
        limits = config.rollout
        return Gateway(
            LimitedBackend.over(backend, limits.max_tokens_in_flight, limits.call_timeout_s),
            host=config.gateway.host,
            port=config.gateway.port,
            max_prompt_length=config.data.max_prompt_length,
            default_max_tokens=config.data.max_response_length,
            reasoning=limits.reasoning,
            template=limits.chat_template_kwargs,
            roles=[] if config.lora.per_role == "shared" else list(config.lora.per_role),
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
        known: Mapping[str, Episode] | None = None,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """`n` episodes of every task, in task order, sampled anew for each `attempt` of a step. Too many failures stop the run with
        the first traceback.

        `known` holds episodes, by id, that need not be run; `on_episode` hears of each other one as it ends.
        """
        seed = self.config.trainer.seed
        label = "val" if validation else f"{step}/{attempt}" if attempt else str(step)
        requests = [
            EpisodeRequest(task, f"{task.id}:{k}", stable_seed(seed, label, task.id, k), validation, adapter)
            for task in tasks
            for k in range(n)
        ]
        known = known or {}
        ran = iter(self.runner.run([request for request in requests if request.uid not in known], on_episode))
        episodes = [known[request.uid] if request.uid in known else next(ran) for request in requests]
        check_failures(episodes, self.config.rollout.max_failed_fraction)
        return episodes


def check_failures(episodes: Sequence[Episode], most: float) -> None:
    """Raise a `RunError` with the first traceback where more than the share `most` of `episodes` failed."""
    failed = [episode for episode in episodes if episode.failed]
    _keep_once(failed)
    if failed and len(failed) > most * len(episodes):
        raise RunError(
            f"{len(failed)} of {len(episodes)} episodes failed, more than rollout.max_failed_fraction="
            f"{most}. The first failure (episode {failed[0].id}, "
            f"{failed[0].termination_reason.value if failed[0].termination_reason else 'unknown'}):\n"
            f"{failed[0].error or ''}"
        )


def _keep_once(failed: Sequence[Episode]) -> None:
    """Of tracebacks that are the same, the first is kept; the others name the episode that has it."""
    first: dict[str, str] = {}
    for episode in failed:
        error = episode.error or ""
        if first.setdefault(error, episode.id) != episode.id and "\n" in error.strip():
            episode.error = f"{error.strip().rpartition(chr(10))[2]} (the same traceback as episode {first[error]})"


def stable_seed(*parts: object) -> int:
    """A 63-bit seed that depends on `parts` alone, the same on every machine and run."""
    digest = hashlib.blake2b(json.dumps([str(part) for part in parts]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
