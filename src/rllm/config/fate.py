"""What becomes of a key of another tool: one look-up over the tables of `aliases.py` and `foreign.py`, and keys that belong together.

Knows no files and no schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rllm.config.aliases import (
    ALIASES,
    KL_SWITCHES,
    NO_EFFECT,
    ONLY,
    PRECOMPUTED,
    SPREAD,
    STEPWISE,
    STEPWISE_MODE,
    VERL_KL_COEF,
    Entry,
)
from rllm.config.foreign import ACTOR, MODEL, ROLLOUT, TREE_NO_EFFECT, TREE_ONLY
from rllm.errors import ConfigError

_NO_EFFECT = NO_EFFECT | TREE_NO_EFFECT
TEMPLATE, THINKING = "data.apply_chat_template_kwargs", "rllm.disable_thinking"
DRO_BETA, LOSS_BETA = f"{ACTOR}.policy_loss.dro_beta", "algorithm.loss_options.beta"
OVERLONG_BUFFERS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)

# verl's tree holds a second set of LoRA keys, for Megatron, beside the first. These are the values it has where nobody set them.
MEGATRON_LORA: dict[str, tuple[str, Any]] = {
    f"{MODEL}.lora.rank": (f"{MODEL}.lora_rank", 0),
    f"{MODEL}.lora.alpha": (f"{MODEL}.lora_alpha", 32),
    f"{MODEL}.lora.target_modules": (
        f"{MODEL}.target_modules",
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    ),
    f"{MODEL}.lora.exclude_modules": (f"{MODEL}.exclude_modules", []),
}


def settle(entries: Sequence[Entry]) -> list[Entry]:
    """What two keys of another tool say together, said with one."""
    return settle_advantages(settle_kl(settle_lora(settle_overlong(settle_inside(entries)))))


def settle_inside(entries: Sequence[Entry]) -> list[Entry]:
    """Keys that set one entry of a mapping here: settings of the chat template, and the beta of dro, which verl's tree always holds and
    which means something only where that loss is chosen."""
    loss = next((e.value for e in reversed(entries) if "algorithm.loss" in (e.key, ALIASES.get(e.key))), None)
    own = [e.value for e in entries if e.key.startswith("algorithm.per_role.") and e.key.endswith(".loss")]
    inside = {THINKING: ("rollout.chat_template_kwargs.enable_thinking", False), DRO_BETA: (LOSS_BETA, None)}
    settled: list[Entry] = []
    for entry in entries:
        target, value = inside.get(entry.key, ("", None))
        if entry.key.startswith(f"{TEMPLATE}."):
            target = f"rollout.chat_template_kwargs.{entry.key.removeprefix(f'{TEMPLATE}.')}"
        elif (entry.key == DRO_BETA and "dro" not in (loss, *own)) or (
            entry.key == THINKING and entry.value is not True
        ):
            target = ""
        if target:
            given = entry.value if value is None else value
            entry = replace(entry, key=target, value=given, source=f"{entry.source} (as {entry.key})")
        settled.append(entry)
    return settled


def settle_overlong(entries: Sequence[Entry]) -> list[Entry]:
    """verl switches its overlong buffer on beside its length; here a length of 0 is off."""
    settled = list(entries)
    for buffer in OVERLONG_BUFFERS:
        switch = next((entry for entry in reversed(settled) if entry.key == f"{buffer}.enable"), None)
        has_length = any(e.key in (f"{buffer}.len", "algorithm.overlong_buffer") for e in settled)
        if switch is not None and not isinstance(switch.value, bool):
            raise ConfigError(f"{switch.source}: {switch.key}={switch.value!r}: allowed are true and false")
        if switch is not None and switch.value and not has_length:
            raise ConfigError(f"{switch.source}: {switch.key}=true: how long is the buffer? Give {buffer}.len too")
        off = switch is None or not switch.value
        dropped = {switch.key} if switch else set()
        dropped |= {f"{buffer}.len", f"{buffer}.penalty_factor"} if off else set()
        settled = [entry for entry in settled if entry.key not in dropped]
    return settled


def settle_kl(entries: Sequence[Entry]) -> list[Entry]:
    """verl switches each of its KL terms on with one key and weighs it with another (default 0.001); here one weight says both.

    Switched off, the weight is 0 whatever the coefficient says; switched on without a coefficient, it is verl's default.
    """
    settled = list(entries)
    for switch, coefficient, weight in KL_SWITCHES:
        settled = _settle_switch(settled, switch, coefficient, weight)
    return settled


def _settle_switch(entries: Sequence[Entry], switch: str, coefficient: str, weight: str) -> list[Entry]:
    given = next((entry for entry in reversed(entries) if entry.key == switch), None)
    if given is None:
        return list(entries)
    if not isinstance(given.value, bool):
        raise ConfigError(f"{given.source}: {switch}={given.value!r}: allowed are true and false")
    value: float | None = 0.0
    if given.value:
        # Where the coefficient is no key of its own here, the switch takes it over.
        own = _coefficient(entries, coefficient, weight)
        known = any(e.key == weight or (e.key == coefficient and coefficient in ALIASES) for e in entries)
        value = None if known else VERL_KL_COEF if own is None else own
    dropped = {switch} if value is None else {switch, coefficient}
    settled = [replace(e, value=value, raw=None) if e is given and value is not None else e for e in entries]
    return [e for e in settled if e.key not in dropped or (e.key == switch and e.value is value and value is not None)]


def _coefficient(entries: Sequence[Entry], coefficient: str, weight: str) -> float | None:
    """verl's weight of a term whose switch is on. It is checked here, where it still has its name."""
    theirs = next((e for e in reversed(entries) if e.key == coefficient), None)
    if theirs is None or coefficient in ALIASES:
        return None
    if isinstance(theirs.value, bool) or not isinstance(theirs.value, (int, float)):
        raise ConfigError(f"{theirs.source}: {coefficient}={theirs.value!r}: allowed: number")
    ours = next((e for e in reversed(entries) if e.key == weight and e.source == theirs.source), None)
    if ours is not None and ours.value != theirs.value:
        raise ConfigError(
            f"{ours.source}: {weight}={ours.value} and {coefficient}={theirs.value} both set {weight}, differently; give one"
        )
    return theirs.value


def settle_advantages(entries: Sequence[Entry]) -> list[Entry]:
    """rLLM has switches where one word says it here: stepwise advantages that are not enabled are broadcast, whatever their mode, and
    precomputed advantages are an estimator."""
    settled = list(entries)
    for key, on, other in ((STEPWISE, None, STEPWISE_MODE), (PRECOMPUTED, "precomputed", None)):
        switch = next((entry for entry in reversed(settled) if entry.key == key), None)
        if switch is None:
            continue
        if not isinstance(switch.value, bool):
            raise ConfigError(f"{switch.source}: {key}={switch.value!r}: allowed are true and false")
        word = on if switch.value else "broadcast" if key == STEPWISE else None
        dropped = {key} if switch.value or other is None else {key, other}
        settled = [
            replace(entry, value=word, raw=None) if entry is switch and word else entry
            for entry in settled
            if entry.key not in dropped or (entry is switch and word)
        ]
    return settled


def settle_lora(entries: Sequence[Entry]) -> list[Entry]:
    """Of a whole verl tree, which holds both sets of LoRA keys, the untouched Megatron ones are left out."""
    given = {(entry.source, entry.key) for entry in entries}

    def untouched(entry: Entry) -> bool:
        flat, value = MEGATRON_LORA.get(entry.key, ("", None))
        return (entry.source, flat) in given and entry.value == value

    return [entry for entry in entries if not untouched(entry)]


@dataclass(frozen=True)
class Fate:
    """What becomes of a foreign key: it sets `fields`; or it is taken at the values `only` and refused at others, for `reason`; or it
    changes nothing, for `reason`."""

    fields: tuple[str, ...] = ()
    only: tuple[Any, ...] = ()
    reason: str = ""

    def takes(self, value: Any) -> bool:
        """Whether `value` is one of `only`; true is not 1 and false is not 0."""
        return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in self.only)


def fate(key: str) -> Fate | None:
    """What becomes of another tool's key; None for a key that is nobody's."""
    if key in ALIASES:
        return Fate((ALIASES[key],))
    if key in SPREAD:
        return Fate(SPREAD[key])
    if key in ONLY:
        return Fate(only=ONLY[key], reason="not built yet")
    if key in TREE_ONLY:
        return Fate(only=TREE_ONLY[key][0], reason=TREE_ONLY[key][1])
    if key.endswith("._target_"):
        return Fate(reason="it names a class of verl")
    whole = next((name[:-1] for name in _prefixes(key) if name[:-1] in TREE_ONLY), None)
    if whole is not None:  # a key inside a mapping that must be empty
        return Fate(only=TREE_ONLY[whole][0], reason=TREE_ONLY[whole][1])
    return next((Fate(reason=_NO_EFFECT[name]) for name in (key, *_prefixes(key)) if name in _NO_EFFECT), None)


# Sections of verl's tree of which every key is verl's; in the others only those of its own tables are.
_VERL_ONLY = ("actor_rollout_ref.", "ray_kwargs.", "transfer_queue.", "global_profiler.")
_VERL_SHARED = ("trainer.", "model_engine")
_VERL_OTHER = ("data.dataloader_num_workers",)
# Of those, what rllm does itself on verl too (tasks, calls, rewards, advantages, files): such a key has the fate there that it has here.
_OURS_THERE = (
    f"{ROLLOUT}.do_sample",
    f"{ROLLOUT}.top_k",
    f"{ROLLOUT}.min_p",
    f"{ROLLOUT}.ignore_eos",
    f"{ROLLOUT}.over_sample_rate",
    f"{ROLLOUT}.val_kwargs.",
    f"{ROLLOUT}.multi_turn.",
    f"{ROLLOUT}.agent.agent_loop_config_path",
    f"{ROLLOUT}.agent.default_agent_loop",
    f"{ACTOR}.policy_loss.",
    f"{ACTOR}.shuffle",
    f"{ACTOR}.optim.total_training_steps",
    "trainer.critic_warmup",
    "trainer.checkpoint_callback_class",
    "trainer.episode_log_dir",
    "trainer.log_val_generations",
    "trainer.max_critic_ckpt_to_keep",
    "trainer.resume_mode",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
)
# The rest of that section is for Megatron.
_LORA_PASSED = (f"{MODEL}.lora.merge", f"{MODEL}.lora.fully_sharded_loras")


def passes_to_verl(key: str) -> bool:
    """Whether a key, which is no field here, is one that ``backend=verl`` passes on to verl untouched."""
    theirs = fate(key)
    if (theirs is not None and theirs.fields) or key.startswith(_OURS_THERE):
        return False
    if key.startswith(f"{MODEL}.lora."):
        return key in _LORA_PASSED
    return key.startswith(_VERL_ONLY) or (theirs is not None and key.startswith((*_VERL_SHARED, *_VERL_OTHER)))


def foreign_keys() -> list[str]:
    """Every key of another tool that has an entry of its own (those of a group are not listed)."""
    return [*ALIASES, *SPREAD, *ONLY, *TREE_ONLY, *(key for key in _NO_EFFECT if not key.endswith("."))]


def is_foreign_section(key: str) -> bool:
    """Whether other tools have keys below `key`."""
    return any(name.startswith(f"{key}.") for name in (*foreign_keys(), *_NO_EFFECT))


def _prefixes(key: str) -> Iterator[str]:
    """``a.b.``, ``a.`` of ``a.b.c``: the longest first."""
    parts = key.split(".")
    return (".".join(parts[:n]) + "." for n in range(len(parts) - 1, 0, -1))
