"""The names that algorithm keys may have, each with one line of what it is, and those of other tools that are refused with a reason.

Data only, so that a config is checked before anything heavy is imported; what the names do is in `rllm.algorithms`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rllm.errors import ConfigError

ESTIMATORS: dict[str, str] = {
    "grpo": "(r - mean) / std of the group",
    "dr_grpo": "r - mean of the group",
    "rloo": "r - mean of the group's others",
    "opo": "r - length-weighted mean of the group",
    "reinforce": "r",
    "reinforce_plus_plus": "r whitened over the role's tokens",
    "reinforce_plus_plus_baseline": "r - mean of the group, whitened over the role's tokens",
    "prpo": "r whitened over the role's samples",
    "precomputed": "what the steps carry in Step.advantage",
}
GROUP_RELATIVE: set[str] = {"grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline"}
"""Estimators that compare inside a group: they need at least two, and learn nothing from equal rewards."""
WITHIN_GROUP: set[str] = {"grpo", "dr_grpo", "rloo", "opo", "reinforce", "precomputed"}
"""Estimators whose advantages depend on nothing outside of the group."""
LOSSES: dict[str, str] = {
    "ppo_clip": "-min(ratio A, clip(ratio) A), dual clip",
    "importance_sampling": "-ratio A",
    "cispo": "-stop_gradient(clip(ratio)) A logp",
    "gspo": "ppo_clip with the ratio of the whole sequence",
    "dro": "-(logp A - beta / 2 log(ratio)^2)",
    "reinforce": "-logp A",
    "cross_entropy": "-logp A; A is the weight of the token",
}
NO_RATIO = frozenset({"reinforce", "cross_entropy"})
"""Losses that read the log-probabilities of the trained policy alone."""
AGGREGATIONS: dict[str, str] = {
    "token-mean": "mean over all tokens",
    "token-sum": "sum over all tokens",
    "seq-mean-token-sum": "mean over rows of the sum over tokens",
    "seq-mean-token-mean": "mean over rows of the mean over tokens",
    "seq-mean-token-sum-norm": "mean over rows of the sum over tokens / loss_scale_factor",
}
LOSS_OPTIONS: dict[str, tuple[str, ...]] = {name: ("beta",) if name == "dro" else () for name in LOSSES}
"""Keys of ``algorithm.loss_options`` that each built-in loss reads."""

_CRITIC = "it needs a critic, and none is trained here"
_ROLLOUTS = "it needs a greedy rollout more for every task"
REFUSED_ESTIMATORS: dict[str, str] = {
    "gae": _CRITIC,
    "remax": _ROLLOUTS,
    "optimal_token_baseline": "it needs the gradient norm of every token",
    "tir_optimal_token_baseline": "it needs the gradient norm of every token",
    "grpo_passk": "not built",
    "gdpo": "not built; combine the rewards in the evaluator",
    "gpg": "not built; dr_grpo with algorithm.loss=reinforce is its form without the rescaling",
}
REFUSED_LOSSES: dict[str, str] = dict.fromkeys(
    ("clip_cov", "kl_cov", "geo_mean", "sapo", "gpg", "dppo_tv", "dppo_kl", "bypass_mode"), "not built"
) | {"stable_reinforce": "a loss of the hosted Tinker service whose formula is not published (docs/tinker.md)"}

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""
VLLM_MAX_RANK = VLLM_RANKS[-1]
ESTIMATOR_WORDS = {
    "reinforce++": "reinforce_plus_plus",
    "reinforce++-baseline": "reinforce_plus_plus_baseline",
    "reinforce++_baseline": "reinforce_plus_plus_baseline",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
LOSS_WORDS = {"vanilla": "ppo_clip", "ppo": "ppo_clip"}
"""What verl and rLLM call some of ours."""

TEMPLATE_RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""What `apply_chat_template` is told by rllm and by nobody else."""

_BUILT_IN = frozenset({*ESTIMATORS, *LOSSES})


def check_new_name(name: str, known: Mapping[str, str], what: str) -> None:
    """Raise a `ConfigError` if a user's function cannot be called `name`: built-in names stay what they are."""
    if name in known and name in _BUILT_IN:
        raise ConfigError(f"{what} {name!r} is built in; give yours another name")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.+-]*", name):
        raise ConfigError(f"{what} {name!r}: use a letter, then letters, digits, '_', '.', '+' or '-'")
