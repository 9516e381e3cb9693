"""What of a config does not go together with ``backend=tinker``, and notes on what it costs there.

Knows the config tree only; what the backend cannot do at all is in the capability table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rllm.config.schema import Config
from rllm.config.schema_tinker import TinkerConfig
from rllm.config.section import not_default

DUAL_CLIP_LOSSES = {"ppo_clip", "gspo"}


def check_tinker(config: Config, refuse: Callable[[str, str], Exception]) -> None:
    """Settings of a server that nobody asks are a backend that was forgotten."""
    if config.backend == "tinker":
        return
    for name in not_default(config.tinker, TinkerConfig()):
        key = f"tinker.{name}"
        raise refuse(
            key,
            f"{key}={getattr(config.tinker, name)}: nothing of it is used with backend={config.backend}; set backend=tinker, or leave it out",
        )


def tinker_notes(config: Config, several_steps: bool) -> Iterator[str]:
    """`several_steps`: a training step may make more than one optimizer step."""
    if config.backend != "tinker":
        return
    a = config.algorithm
    dual = sorted(a.losses() & DUAL_CLIP_LOSSES) if a.clip_ratio_c and (several_steps or a.max_staleness) else []
    if a.kl_beta:
        yield f"algorithm.kl_beta={a.kl_beta:g}: the service has no KL term, so each update costs a forward pass more"
    elif dual:
        yield (
            f"algorithm.clip_ratio_c={a.clip_ratio_c:g}: the service's losses have no dual clip, so optimizer steps after the first on the "
            "same samples cost a forward pass more; 0 switches it off"
        )
    if len(config.lora.adapters()) > 1 and config.optim.grad_clip:
        yield f"optim.grad_clip={config.optim.grad_clip:g} holds for each adapter by itself: the service clips every run alone"
    if config.rollout.max_batch != type(config.rollout).model_fields["max_batch"].default:
        yield f"rollout.max_batch={config.rollout.max_batch} has no effect: the server decides how many it decodes at once"
