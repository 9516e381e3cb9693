"""Which linear layers get an adapter. The rules are PEFT's, since its files are ours.

Works on names alone: knows no tensors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from rllm.config.schema import LoraSettings
from rllm.errors import ConfigError

T = TypeVar("T")

ALL_LINEAR = "all-linear"
OUTPUT_HEAD = "lm_head"
# What architectures call the two halves of a layer, for the switches ``train_attn`` and ``train_mlp``.
_HALVES = {
    "train_attn": ("self_attn", "attn", "attention", "self_attention"),
    "train_mlp": ("mlp", "feed_forward", "feedforward", "ffn", "block_sparse_moe"),
}


def match_modules(
    names: Sequence[str],
    target: str | Sequence[str] = ALL_LINEAR,
    exclude: str | Sequence[str] | None = None,
    head: str = OUTPUT_HEAD,
) -> list[str]:
    """The names that are adapted, in the order of `names`.

    A string is a regular expression that must match the whole dotted name, ``all-linear`` means every layer but the output `head`; a
    list holds names or dotted suffixes. Exclusion follows the same rules and wins. An entry that matches nothing is an error.
    """
    if target == ALL_LINEAR:
        chosen = [name for name in names if not _is_suffix(name, head)]
    elif isinstance(target, str):
        pattern = _compile(target, "target_modules")
        chosen = [name for name in names if pattern.fullmatch(name)]
        if not chosen:
            raise ConfigError(_nothing_matches(target, names, "as a full-match regular expression"))
    else:
        for entry in target:
            if entry == ALL_LINEAR:
                raise ConfigError(
                    f"lora.target_modules: {ALL_LINEAR!r} stands alone; write target_modules={ALL_LINEAR} instead of a list"
                )
            if not any(_is_suffix(name, entry) for name in names):
                raise ConfigError(_nothing_matches(entry, names, "as a name or dotted suffix"))
        chosen = [name for name in names if any(_is_suffix(name, entry) for entry in target)]
    left = [name for name in chosen if not is_excluded(name, exclude)]
    if not left:
        raise ConfigError(
            f"lora.target_modules={target!r} and lora.exclude_modules={exclude!r} together leave no module to train; "
            f"the model has {', '.join(leaf_names(names))}"
        )
    return left


def adapted_modules(names: Sequence[str], settings: LoraSettings, head: str = OUTPUT_HEAD) -> list[str]:
    """The names that the settings of one adapter choose: targets less excludes, then the three ``train_`` switches (Tinker's way of
    saying it: attention, MLP, output head). A pattern for ranks or alphas that fits none of them is an error."""
    chosen = match_modules(names, settings.target_modules, settings.exclude_modules, head)
    for switch, halves in _HALVES.items():
        if not getattr(settings, switch):
            ours = {name for name in names if not set(halves).isdisjoint(name.split("."))}
            if not ours:
                raise ConfigError(
                    f"lora.{switch}=false: no module of this model is below one called {', '.join(halves)}, so it cannot be told what "
                    f"to leave out; use lora.exclude_modules. The model has {', '.join(leaf_names(names))}"
                )
            chosen = [name for name in chosen if name not in ours]
    if settings.train_unembed and head in names and head not in chosen:
        chosen.append(head)
    if not chosen:
        raise ConfigError(
            f"lora.target_modules={settings.target_modules!r} with train_attn={settings.train_attn}, train_mlp={settings.train_mlp}, "
            f"train_unembed={settings.train_unembed} leaves no module to train"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(settings, key):
            if not any(pattern_matches(pattern, name) for name in chosen):
                raise ConfigError(_nothing_matches(pattern, chosen, "that is adapted", key))
    return chosen


def pattern_matches(pattern: str, name: str) -> bool:
    """Whether a key of ``rank_pattern`` or ``alpha_pattern`` names this module: a regular expression for the end of its dotted name."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def by_pattern(patterns: Mapping[str, T], name: str, default: T) -> T:
    """The value of the first pattern that names the module, else `default`."""
    return next((value for pattern, value in patterns.items() if pattern_matches(pattern, name)), default)


def is_excluded(name: str, exclude: str | Sequence[str] | None) -> bool:
    """Whether `exclude` (full-match regex, or list of names and suffixes) names this module."""
    if not exclude:
        return False
    if isinstance(exclude, str):
        return _compile(exclude, "exclude_modules").fullmatch(name) is not None
    return any(_is_suffix(name, entry) for entry in exclude)


def unmatched_excludes(names: Sequence[str], exclude: str | Sequence[str] | None) -> list[str]:
    """The entries of `exclude` that name no module: harmless, but hardly what was meant."""
    entries = [exclude] if isinstance(exclude, str) else exclude or []
    return [
        entry for entry in entries if not any(is_excluded(n, exclude if exclude == entry else [entry]) for n in names)
    ]


def leaf_names(names: Iterable[str]) -> list[str]:
    """The distinct last parts of dotted names, in order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _is_suffix(name: str, entry: str) -> bool:
    return name == entry or name.endswith("." + entry)


def _compile(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"lora.{key}: {pattern!r} is no valid regular expression ({error})") from error


def _nothing_matches(entry: str, names: Sequence[str], how: str, key: str = "target_modules") -> str:
    leaves = leaf_names(names)
    near = difflib.get_close_matches(entry, leaves, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    whose = "The model has" if key == "target_modules" else "The adapter has"
    return f"lora.{key}: {entry!r} matches no module {how}{hint} {whose} {', '.join(leaves)}"
