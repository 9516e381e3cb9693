"""From files, dicts and `key=value` arguments to a checked config that remembers where each value came from.

Knows the schema and the alias tables; loads no model.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rllm.config.aliases import (
    ALIASES,
    ONLY,
    SPREAD,
    Entry,
    check_engine_rank,
    no_effect_reason,
    settle_advantages,
    settle_kl,
    translated,
)
from rllm.config.check import EXAMPLE_DEFAULT, check
from rllm.config.explain import (
    explain,
    flatten,
    is_open,
    leaves,
    reference,
    show,
    show_tree,
    takes_plain_text,
    to_yaml,
    unknown_key,
)
from rllm.config.schema import Config
from rllm.errors import ConfigError

__all__ = ["Resolved", "check", "leaves", "load_config", "load_model", "reference", "show_config", "to_yaml"]

M = TypeVar("M", bound=BaseModel)
BASE = "config object"


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
    entries = list(_entries(files, overrides, base, defaults))
    notes = list(base.notes) if isinstance(base, Resolved) else []
    given: dict[str, Entry] = {}
    for entry in settle_advantages(settle_kl(entries)) if aliases else entries:
        for name in _fields_of(entry, known, aliases, notes):
            value = _value_for(name, entry, known[name].annotation)
            earlier = given.get(name)
            one_value = not is_open(known[name].annotation)
            if one_value and earlier and earlier.source == entry.source and earlier.key != entry.key:
                if entry.key in SPREAD:
                    continue
                if earlier.key not in SPREAD and earlier.value != value:
                    raise ConfigError(
                        f"{entry.source}: {earlier.key}={show(earlier.value)} and {entry.key}={show(entry.value)} both set "
                        f"{name}, differently; give one"
                    )
            if earlier and isinstance(earlier.value, dict) and isinstance(value, dict) and entry.key != name:
                value = _merged(earlier.value, value)
            given[name] = replace(entry, value=value)
    try:
        config = kind.model_validate(_nest({name: entry.value for name, entry in given.items()}))
    except ValidationError as error:
        raise explain(error, given, known) from None
    if isinstance(config, Config):
        roles = {} if config.lora.per_role == "shared" else config.lora.per_role
        ranks = {f"lora.per_role.{role}.rank": settings.rank for role, settings in roles.items()}
        check_engine_rank(entries, {"lora.rank": config.lora.rank} | ranks)
    return Resolved(config, _provenance(given, base), list(dict.fromkeys(notes)))


def show_config(resolved: Resolved[Any]) -> str:
    """Every key with its value and where it came from."""
    return show_tree(resolved.config, resolved.provenance, resolved.notes)


def _provenance(given: Mapping[str, Entry], base: Any) -> dict[str, str]:
    """Where each value came from. What a config object holds at its default, or got from elsewhere, is told as such."""
    origins: dict[str, str] = {}
    for name, entry in given.items():
        origins[name] = entry.source if entry.key == name else f"{entry.source} (as {entry.key})"
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


def _entries(
    files: Sequence[str | Path], overrides: Sequence[str], base: Any, defaults: Mapping[str, Any] | None
) -> Iterator[Entry]:
    """All settings in rising precedence."""
    for key, value in flatten(defaults or {}):
        yield Entry(EXAMPLE_DEFAULT, key, value)
    if base is not None:
        for key, value in flatten(_as_mapping(base)):
            yield Entry(BASE, key, value)
    for name in files:
        for key, value in flatten(_read_yaml(Path(name))):
            yield Entry(str(name), key, value)
    for override in overrides:
        key, value, raw = _parse_override(override)
        if isinstance(value, Mapping) and value:
            yield from (Entry("argument", name, item) for name, item in flatten(value, f"{key}."))
        else:
            yield Entry("argument", key, value, raw)


def _as_mapping(base: Any) -> Mapping[Any, Any]:
    if isinstance(base, Resolved):
        base = base.config
    if isinstance(base, BaseModel):
        return base.model_dump()
    if type(base).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        base = OmegaConf.to_container(base, resolve=True)
    if not isinstance(base, Mapping):
        raise ConfigError(
            f"config: found {type(base).__name__}; give a dict, a Config, an OmegaConf tree or load_config([file], overrides)"
        )
    return base


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    if not path.is_file():
        raise ConfigError(f"config file {str(path)!r} does not exist")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: found {type(tree).__name__}; the file must hold key: value pairs")
    return tree


def _parse_override(text: str) -> tuple[str, Any, str]:
    """(key, YAML value, value as typed). ``+key=value`` is the same; ``~key`` has no meaning here and is explained."""
    if text.startswith("~"):
        key = text[1:].partition("=")[0]
        raise ConfigError(f"argument {text!r}: keys cannot be removed; leave {key} out, or give the value you want")
    key, equals, raw = text.lstrip("+").partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"argument {text!r}: expected key=value")
    try:
        return key, _number_like(yaml.safe_load(raw)), raw
    except (yaml.YAMLError, ValueError):  # ValueError: a date that does not exist
        return key, raw, raw


def _number_like(value: Any) -> Any:
    """YAML 1.1 reads ``1e-5`` as text; people mean the number."""
    if isinstance(value, str) and value[:1] in "+-.0123456789" and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            pass
    return value


def _fields_of(entry: Entry, known: Mapping[str, Any], aliases: bool, notes: list[str]) -> tuple[str, ...]:
    """The fields that a key, in whatever spelling, sets; unknown keys are errors, keys without effect are noted."""
    key, value = entry.key, entry.value
    if key in known:
        return (key,)
    if value in (None, {}) and any(name.startswith(f"{key}.") for name in known):
        return ()  # a section with everything in it commented out
    if aliases:
        fields = (ALIASES[key],) if key in ALIASES else SPREAD.get(key)
        if fields is not None:
            # Elsewhere null means "not given"; here only fields that allow it take it.
            return tuple(name for name in fields if value is not None or known[name].default is None)
        if key in ONLY:
            if any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in ONLY[key]):
                return ()
            same = " | ".join(show(allowed) for allowed in ONLY[key])
            raise ConfigError(f"{entry.source}: {key}={show(value)}: not built yet; allowed: {same}")
        reason = no_effect_reason(key)
        if reason is not None:
            notes.append(f"{key} has no effect here: {reason}")
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
