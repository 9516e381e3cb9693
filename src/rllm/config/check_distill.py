"""Fields of `distill` that do not go together, with each other or with the rest, and notes on what they leave undone.

Knows the config tree only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from rllm.config.schema import Config
from rllm.config.schema_distill import DistillConfig
from rllm.config.section import not_default

Refuse = Callable[[str, str], Exception]


def check_distill(config: Config, refuse: Refuse) -> None:
    """Raise what `refuse(key, message)` makes of the first thing that cannot be done."""
    d = config.distill
    if not d.enabled:
        set_too = next(not_default(d, DistillConfig()), None)
        if set_too is not None:
            raise refuse(
                f"distill.{set_too}",
                f"distill.{set_too} does nothing without a teacher; give distill.teacher (a model), distill.adapter (on model.path) or "
                "distill.base_url (an endpoint)",
            )
        return
    _check_endpoint(config, refuse)
    _check_rewards(config, refuse)


def _check_endpoint(config: Config, refuse: Refuse) -> None:
    d = config.distill
    if d.base_url is None:
        for key in ("model", "api_key_env"):
            if getattr(d, key) is not None:
                raise refuse(
                    f"distill.{key}",
                    f"distill.{key}={getattr(d, key)} is about an endpoint, and none is given: set distill.base_url, or leave it out"
                    + (" (a model of this process is distill.teacher)" if key == "model" else ""),
                )
        return
    for key in ("teacher", "adapter"):
        if getattr(d, key) is not None:
            raise refuse(
                "distill.base_url",
                f"distill.base_url={d.base_url} and distill.{key}={getattr(d, key)} both name a teacher; give one",
            )
    if d.api_key_env is not None and d.api_key_env not in os.environ:
        raise refuse(
            "distill.api_key_env",
            f"distill.api_key_env={d.api_key_env}: there is no such environment variable; set it, or leave the key out",
        )
    if config.rollout.temperature != 1.0:
        raise refuse(
            "rollout.temperature",
            f"rollout.temperature={config.rollout.temperature:g} with distill.base_url: an endpoint tells log-probabilities without "
            "temperature, which are not comparable; set rollout.temperature=1, or use distill.teacher",
        )


def _check_rewards(config: Config, refuse: Refuse) -> None:
    """What works on rewards alone has no place where none is trained on, or would throw away what the teacher can teach."""
    d, a = config.distill, config.algorithm
    if a.rejection_sampling.enable:
        raise refuse(
            "algorithm.rejection_sampling.enable",
            "algorithm.rejection_sampling.enable=true with distillation: it throws groups of equal rewards away, which a teacher can "
            "still teach; set it to false",
        )
    if d.mode != "only":
        return
    for role, own in a.per_role.items():
        if own.adv_estimator is not None and d.teaches(role):
            raise refuse(
                "algorithm.per_role",
                f"algorithm.per_role.{role}.adv_estimator={own.adv_estimator}: the role is taught by the teacher alone (distill.mode=only); "
                "leave it out, name other roles in distill.roles, or set distill.mode=add",
            )
    if not d.replaces_all:
        return
    for key in ("kl_in_reward", "overlong_buffer"):
        if getattr(a, key):
            raise refuse(
                f"algorithm.{key}",
                f"algorithm.{key}={getattr(a, key):g} with distill.mode=only: it changes rewards, and none is trained on; set it to 0, or "
                "distill.mode=add",
            )


def distill_notes(config: Config) -> Iterator[str]:
    """Settings that do nothing beside the teacher."""
    d, a = config.distill, config.algorithm
    if not d.enabled:
        return
    if d.replaces_all:
        for key in ("adv_estimator", "grpo_std", "zero_std", "stepwise", "gamma"):
            if getattr(a, key) != type(a).model_fields[key].default:
                yield f"algorithm.{key}={getattr(a, key)} has no effect with distill.mode=only: no reward is trained on"
    if d.base_url is None:
        for key in ("timeout_s", "max_concurrency"):
            if getattr(d, key) != DistillConfig.model_fields[key].default:
                yield f"distill.{key} has no effect without distill.base_url"
    if d.teacher in (None, config.model.path) and d.adapter is None and d.local and not config.lora.adapter_path:
        yield "distill.teacher is the model that the student starts from: with a fresh adapter the two agree, and there is nothing to learn"
