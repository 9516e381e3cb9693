"""Words about config keys and values: the nearest key to a misspelt one, what is allowed, every key with its origin.

Knows the shape of config trees, not where their values come from.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rllm.config.aliases import HINTS, Entry
from rllm.config.fate import foreign_keys
from rllm.config.schema import Config
from rllm.errors import ConfigError

NEAR = 0.65


def leaves(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, pydantic field) of every leaf of a config tree."""
    for name, info in kind.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from leaves(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of nested mappings; an empty mapping is a leaf."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def reference(kind: type[BaseModel] = Config) -> list[tuple[str, str, str]]:
    """(key, default, description) of every key, for help and docs."""
    return [
        (key, show(info.get_default(call_default_factory=True)), info.description or "") for key, info in leaves(kind)
    ]


def show_tree(config: BaseModel, provenance: Mapping[str, str], notes: Iterable[str]) -> str:
    """Every key with its value and where it came from, one a line, then the notes."""
    flat = dict(flatten(config.model_dump()))
    width = max(len(f"{key}={show(value)}") for key, value in flat.items())
    lines = [f"{f'{key}={show(value)}':<{width}}  # {_origin(key, provenance)}" for key, value in flat.items()]
    return "\n".join([*lines, *(f"# note: {note}" for note in notes)])


def _origin(key: str, provenance: Mapping[str, str]) -> str:
    """Where the value of `key`, or of the open field that it lies in, came from."""
    whole = (name for name in provenance if key == name or key.startswith(f"{name}."))
    return provenance.get(next(whole, ""), "default")


def to_yaml(config: BaseModel) -> str:
    """The whole tree as a config file."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def show(value: Any) -> str:
    """A value as one would type it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def unknown_key(entry: Entry, known: Iterable[str], aliases: bool) -> ConfigError:
    """What to say of a key that is nobody's: a section that was given a value, the nearest key, or what there is."""
    known = list(known)
    inside = [name for name in known if name.startswith(entry.key + ".")]
    if inside:
        return ConfigError(
            f"{entry.source}: {entry.key}={show(entry.value)}: {entry.key} is a section, not a value; "
            f"its keys are {', '.join(inside)}"
        )
    near = nearest_key(entry.key, known, foreign_keys() if aliases else ())
    if near is None:
        section = entry.key.partition(".")[0]
        siblings = [name for name in known if name.startswith(section + ".")]
        sections = dict.fromkeys(name.partition(".")[0] for name in known)
        hint = f"{section} has {', '.join(siblings)}" if siblings else f"sections are {', '.join(sections)}"
    else:
        hint = f"did you mean {near!r}?"
    return ConfigError(f"{entry.source}: unknown key {entry.key!r}; {hint}")


def nearest_key(key: str, fields: Sequence[str], foreign: Sequence[str]) -> str | None:
    """The valid key most like `key`, or None. Other tools' spellings are offered only to those who use them."""
    key = key.lower().replace("-", "_")
    section, _, leaf = key.rpartition(".")
    root = section.partition(".")[0]
    candidates = [*fields, *(name for name in foreign if root and name.partition(".")[0] == root)]
    # Without a section that we have, all of it may be one word: lora_rank, lora.rank.x
    one_word = leaf if any(name.startswith(f"{section}.") for name in fields) else key.replace(".", "_")
    scores = {name: _likeness(section, leaf, name, one_word if name in fields else "") for name in candidates}
    best = max(scores, key=scores.__getitem__)
    close = difflib.get_close_matches(leaf, HINTS, n=1, cutoff=0.9)
    hint = HINTS.get(key) or (HINTS[close[0]] if close else None)
    if scores[best] < 0.9 and hint in fields:
        return hint
    return best if scores[best] >= NEAR else None


def _likeness(section: str, leaf: str, name: str, one_word: str) -> float:
    """0 to 1: mostly the last part, a little the section; or all of `name` against one word."""
    other_section, _, other_leaf = name.rpartition(".")
    last = _ratio(leaf, other_leaf)
    by_parts = 0.75 * last + 0.25 * _ratio(section, other_section) if last >= 0.6 else 0.0
    return max(by_parts, _ratio(one_word, name.replace(".", "_")))


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def explain(error: ValidationError, given: Mapping[str, Entry], known: Mapping[str, Any]) -> ConfigError:
    """One line for the first bad value: where, key, found, allowed."""

    def field_of(loc: Sequence[Any]) -> str:
        name = ".".join(map(str, loc))
        return next((key for key in known if name == key or name.startswith(key + ".")), name)

    errors = error.errors()
    field = field_of(errors[0]["loc"])
    # Of the branches of a union, the one that got furthest is the one that was meant.
    first = max((e for e in errors if field_of(e["loc"]) == field), key=lambda e: len(e["loc"]))
    inside = [str(part) for part in first["loc"][field.count(".") + 1 :] if "[" not in str(part)]
    info = known.get(field)
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if message[:2] != "Do" else message
    entry = given.get(field) or next((e for key, e in given.items() if key.startswith(f"{field}.")), None)
    source = entry.source if entry else "config"
    if info is None:  # a rule between fields: it names them itself
        return ConfigError(f"{source}: {message}")
    if first["type"] == "extra_forbidden":
        settings = _keys_of_sections(info.annotation)
        near = difflib.get_close_matches(inside[-1], settings, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"its keys are {', '.join(settings)}"
        return ConfigError(f"{source}: unknown key {'.'.join([field, *inside])!r}; {hint}")
    if inside and is_open(info.annotation):
        key, value = ".".join([field, *inside]), first.get("input")
        return ConfigError(f"{source}: {key}={show(value)}: {message} ({info.description})")
    assert entry is not None
    about = f" ({info.description})" if info.description else ""
    return ConfigError(
        f"{source}: {entry.key}={show(entry.value)}: {message}; allowed: {type_name(info.annotation)}{about}"
    )


def _keys_of_sections(annotation: Any) -> list[str]:
    """The keys of the sections that an open field holds."""
    for part in (annotation, *typing.get_args(annotation)):
        for kind in typing.get_args(part):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                return list(kind.model_fields)
    return []


def type_name(annotation: Any) -> str:
    """An annotation in words."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in typing.get_args(annotation))
    if origin is list:
        return "list of text"
    if origin is dict:
        return "mapping"
    if origin is typing.Annotated:
        return type_name(typing.get_args(annotation)[0])
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def is_open(annotation: Any) -> bool:
    """Whether the field is a mapping whose keys are the user's own (role names, patterns)."""
    return any(typing.get_origin(part) is dict for part in (annotation, *typing.get_args(annotation)))


def takes_plain_text(annotation: Any) -> bool:
    """Whether the field is text (or null) and nothing else, so that ``name=2026`` means the text 2026."""
    return annotation is str or set(typing.get_args(annotation)) == {str, type(None)}
