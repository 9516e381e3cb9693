"""From files, dicts and `key=value` arguments to a checked config that remembers where each value came from.

Knows the schema and the alias tables; loads no model.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from rllm.config.aliases import SPREAD, Entry, check_engine_rank, translated
from rllm.config.check import EXAMPLE_DEFAULT, check
from rllm.config.explain import (
    explain,
    is_open,
    leaves,
    reference,
    show,
    show_tree,
    takes_plain_text,
    to_yaml,
    unknown_key,
)
from rllm.config.fate import fate, is_foreign_section, passes_to_verl, settle
from rllm.config.schema import Config
from rllm.config.sources import BASE, interpolated, read_entries
from rllm.errors import ConfigError

__all__ = ["Resolved", "check", "leaves", "load_config", "load_model", "reference", "show_config", "to_yaml"]

M = TypeVar("M", bound=BaseModel)
NOT_GIVEN = "???"
# So many keys without effect in one config object are another tool's whole tree, not somebody's choices.
WHOLE_TREE = 40


@dataclass
class Resolved(Generic[M]):
    """A config and its history: `provenance` says for each key that is not a default where it came from."""

    config: M
    provenance: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_config(
    files: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    base: Any = None,
    defaults: Mapping[str, Any] | None = None,
    training: bool = True,
) -> Resolved[Config]:
    """The training config. Later wins: built-in defaults, `defaults` (nested or dotted keys), `base` (dict, `Config`, OmegaConf
    tree or what this function returned), files, overrides. `training` False skips checks that only training needs.

    Raises `ConfigError` with source, key, value and what is allowed. Two spellings of one field that disagree within one source
    are an error; between sources the later one wins.
    """
    resolved = load_model(Config, files, overrides, base, defaults, aliases=True)
    resolved.notes += [n for n in check(resolved.config, resolved.provenance, training) if n not in resolved.notes]
    return resolved


def load_model(
    kind: type[M],
    files: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    base: Any = None,
    defaults: Mapping[str, Any] | None = None,
    aliases: bool = False,
) -> Resolved[M]:
    """The same for any config tree, without the checks between fields."""
    known = dict(leaves(kind))
    mapping = base.config if isinstance(base, Resolved) else base
    entries = interpolated(read_entries(files, overrides, mapping, defaults), known)
    for_verl = aliases and next((e.value for e in reversed(entries) if e.key == "backend"), None) == "verl"
    passed: dict[str, Any] = {}
    notes = list(base.notes) if isinstance(base, Resolved) else []
    given: dict[str, Entry] = {}
    ignored: list[Entry] = []
    as_given = {(entry.source, entry.key): entry.value for entry in entries}
    for entry in settle(entries) if aliases else entries:
        if for_verl and entry.key not in known and passes_to_verl(entry.key):
            passed[entry.key] = entry.value
            given["verl"] = replace(entry, key="verl", value=(given["verl"].value if "verl" in given else {}) | passed)
            continue
        for name in _fields_of(entry, known, aliases, ignored):
            value = _value_for(name, entry, known[name].annotation)
            earlier = given.get(name)
            one_value = not is_open(known[name].annotation)
            if one_value and earlier and earlier.source == entry.source and earlier.key != entry.key:
                if entry.key in SPREAD:
                    continue
                if earlier.key not in SPREAD and earlier.value != value:
                    first, second = (f"{e.key}={show(as_given[e.source, e.key])}" for e in (earlier, entry))
                    raise ConfigError(f"{entry.source}: {first} and {second} both set {name}, differently; give one")
            if earlier and isinstance(earlier.value, dict) and isinstance(value, dict) and entry.key != name:
                value = _merged(earlier.value, value)
            given[name] = replace(entry, value=value)
    _check_given(given)
    notes += _about_ignored(ignored)
    _let_epochs_count(given, notes)
    try:
        config = kind.model_validate(_nest({name: entry.value for name, entry in given.items()}))
    except ValidationError as error:
        raise explain(error, given, known) from None
    if isinstance(config, Config):
        roles = {} if config.lora.per_role == "shared" else config.lora.per_role
        ranks = {f"lora.per_role.{role}.rank": settings.rank for role, settings in roles.items()}
        check_engine_rank(entries, {"lora.rank": config.lora.rank} | ranks)
    return Resolved(config, _provenance(given, base), list(dict.fromkeys(notes)))


def _check_given(given: Mapping[str, Entry]) -> None:
    for name, entry in given.items():
        if entry.value == NOT_GIVEN:
            raise ConfigError(f"{entry.source}: {entry.key}={NOT_GIVEN}: this value is still to be given: {name}=VALUE")


def _about_ignored(entries: Sequence[Entry]) -> list[str]:
    """One note for each reason. A whole tree of another tool as config object says nothing of what its user set: one note in all."""
    whole = {entry.key for entry in entries if entry.source == BASE}
    notes = []
    if len(whole) > WHOLE_TREE:
        notes.append(
            f"{len(whole)} keys of the given config, e.g. {min(whole)}, have no effect here (docs/verl_keys.md says why)"
        )
        entries = [entry for entry in entries if entry.source != BASE]
    keys_by_reason: dict[str, dict[str, None]] = {}
    for entry in entries:
        theirs = fate(entry.key)
        assert theirs is not None
        keys_by_reason.setdefault(theirs.reason, {})[entry.key] = None
    for reason, keys in keys_by_reason.items():
        notes.append(f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect here: {reason}")
    return notes


def _let_epochs_count(given: dict[str, Entry], notes: list[str]) -> None:
    """`total_steps` wins over `total_epochs`, but not an example's own over what somebody asked for."""
    steps, epochs = given.get("trainer.total_steps"), given.get("trainer.total_epochs")
    if steps and epochs and steps.source == EXAMPLE_DEFAULT != epochs.source and steps.value is not None:
        del given["trainer.total_steps"]
        notes.append(
            f"{epochs.key}={show(epochs.value)}: the example's own trainer.total_steps={steps.value} is left out"
        )


def show_config(resolved: Resolved[Any]) -> str:
    """Every key with its value and where it came from."""
    return show_tree(resolved.config, resolved.provenance, resolved.notes)


def _provenance(given: Mapping[str, Entry], base: Any) -> dict[str, str]:
    """Where each value came from. What a config object holds at its default, or got from elsewhere, is told as such."""
    origins: dict[str, str] = {}
    for name, entry in given.items():
        ours = entry.key == name or entry.key.startswith(f"{name}.")
        origins[name] = entry.source if ours else f"{entry.source} (as {entry.key})"
    config = base.config if isinstance(base, Resolved) else base
    if isinstance(config, BaseModel):
        history = base.provenance if isinstance(base, Resolved) else {}
        defaults = {key: info.get_default(call_default_factory=True) for key, info in leaves(type(config))}
        for name, entry in given.items():
            if entry.source != BASE:
                continue
            if name in history:
                origins[name] = history[name]
            elif entry.value == defaults[name]:
                del origins[name]
    return origins


def _fields_of(entry: Entry, known: Mapping[str, Any], aliases: bool, ignored: list[Entry]) -> tuple[str, ...]:
    """The fields that a key, in whatever spelling, sets; unknown keys are errors, keys without effect go to `ignored`."""
    key, value = entry.key, entry.value
    if key in known:
        return (key,)
    if value in (None, {}) and any(name.startswith(f"{key}.") for name in known):
        return ()  # a section with everything in it commented out
    theirs = fate(key) if aliases else None
    if theirs is not None:
        if theirs.fields:
            # Elsewhere null means "not given"; here only fields that allow it take it.
            return tuple(name for name in theirs.fields if value is not None or known[name].default is None)
        if not theirs.only:
            ignored.append(entry)
        elif value != NOT_GIVEN and not theirs.takes(value):
            same = " | ".join(show(allowed) for allowed in theirs.only)
            raise ConfigError(f"{entry.source}: {key}={show(value)}: {theirs.reason}; allowed: {same}")
        return ()
    if aliases and value in (None, {}) and is_foreign_section(key):
        return ()
    whole = next((name for name in known if key.startswith(f"{name}.") and is_open(known[name].annotation)), None)
    if whole is not None:
        return (whole,)
    raise unknown_key(entry, known, aliases)


def _value_for(name: str, entry: Entry, annotation: Any) -> Any:
    """The value in our words; a text field takes what was typed (``trainer.experiment_name=2026``)."""
    value = translated(name, entry.key, entry.value)
    inside = entry.key.removeprefix(f"{name}.")
    if is_open(annotation) and inside != entry.key:
        return _open_value(inside, value, annotation)
    if entry.raw and not isinstance(value, (str, list, type(None))) and takes_plain_text(annotation):
        return entry.raw
    return value


def _open_value(inside: str, value: Any, annotation: Any) -> dict[str, Any]:
    """``name.inside=value`` of an open field as a mapping. Where its values are plain, `inside` is one key, dots and all; where
    they are sections (roles), the first dot ends the key and what follows is a key of the section."""
    of_sections = any(
        isinstance(kind, type) and issubclass(kind, BaseModel)
        for part in (annotation, *typing.get_args(annotation))
        for kind in typing.get_args(part)
    )
    if not of_sections:
        return {inside: value}
    key, _, rest = inside.partition(".")
    if not rest:
        return {key: {} if value is None else value}
    setting, _, own = rest.partition(".")
    return {key: {setting: {own: value} if own else value}}


def _merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings put into each other, `later` on top."""
    result = dict(earlier)
    for key, value in later.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree
