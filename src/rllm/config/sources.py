"""Where settings are read from: dicts, YAML files and `key=value` arguments, as OmegaConf and Hydra read them.

Gives a list of entries in rising precedence. Knows no field but by name; decides nothing about what a key means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rllm.config.aliases import ALIASES, FLAGS, SWITCHES, Entry
from rllm.config.check import EXAMPLE_DEFAULT
from rllm.config.explain import flatten, nearest_key, show
from rllm.errors import ConfigError

BASE = "config object"
ARGUMENT = "argument"

_FILE = "a YAML file is given with --config FILE (in a script: load_config([FILE], overrides))"
_SHOW = "rllm train TARGET --show-config prints the resolved config"
_ONE_RUN = "one call is one run; call it once for each value"
HYDRA_OPTIONS = {
    "--config-name": _FILE,
    "--config-path": _FILE,
    "--config-dir": _FILE,
    "-cn": _FILE,
    "-cp": _FILE,
    "-cd": _FILE,
    "--cfg": _SHOW,
    "--resolve": _SHOW,
    "--package": _SHOW,
    "--info": _SHOW,
    "--hydra-help": "rllm train --help lists every key",
    "--multirun": _ONE_RUN,
    "-m": _ONE_RUN,
    "--run": "leave it out",
    "--experimental-rerun": "a run's config.yaml is given with --config FILE",
}


def read_entries(
    files: Sequence[str | Path], overrides: Sequence[str], base: Any, defaults: Mapping[str, Any] | None
) -> list[Entry]:
    """All settings in rising precedence: `defaults`, `base` (a mapping), files, overrides. Interpolations are as written."""
    entries = [Entry(EXAMPLE_DEFAULT, key, value) for key, value in flatten(defaults or {})]
    if base is not None:
        entries += [Entry(BASE, key, value) for key, value in flatten(as_mapping(base))]
    for name in files:
        entries += [Entry(str(name), key, value) for key, value in flatten(read_yaml(Path(name)))]
    for override in overrides:
        key, value, raw = parse_override(override)
        if isinstance(value, Mapping) and value:
            entries += [Entry(ARGUMENT, name, item) for name, item in flatten(value, f"{key}.")]
        else:
            entries.append(Entry(ARGUMENT, key, value, raw))
    return entries


def as_mapping(base: Any) -> Mapping[Any, Any]:
    """A config object of any accepted kind as nested mappings."""
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


def read_yaml(path: Path) -> Mapping[Any, Any]:
    """The tree in a YAML file, interpolations unresolved."""
    if not path.is_file():
        raise ConfigError(f"config file {str(path)!r} does not exist")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: found {type(tree).__name__}; the file must hold key: value pairs")
    return tree


def parse_override(text: str) -> tuple[str, Any, str]:
    """(key, value, value as typed) of ``key=value``. Hydra's ``+key=value`` and ``++key=value`` are the same: every key that can be
    set exists here. Its other forms have no meaning here and are explained."""
    if text.startswith("-"):
        raise ConfigError(f"argument {text!r}: {about_option(text)}")
    if text.startswith("~"):
        key = text[1:].partition("=")[0]
        raise ConfigError(
            f"argument {text!r}: keys cannot be removed; leave {key} out for its default, or give the value you want"
        )
    plus = len(text) - len(text.lstrip("+"))
    key, equals, raw = text[min(plus, 2) :].partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"argument {text!r}: expected key=value")
    if "@" in key:
        raise ConfigError(f"argument {text!r}: Hydra's config groups are not used here; give the keys themselves")
    try:
        return key, _spaced(yaml.load(raw, Loader=_Loader)), raw
    except (yaml.YAMLError, ValueError):  # not YAML at all: a regex, a name
        return key, raw, raw
    except RecursionError:
        raise ConfigError(f"argument {text[:80]!r}: the value holds itself, or is nested too deeply") from None


def about_option(text: str) -> str:
    """What to do instead of an argument with dashes."""
    name = text.partition("=")[0]
    if name in HYDRA_OPTIONS:
        return f"an option of Hydra; {HYDRA_OPTIONS[name]}"
    setting = text.lstrip("-")
    if "=" in setting:
        return f"settings are written without dashes: {setting}"
    return "unknown option; settings are written key=value"


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf and Hydra read it: ``1e-5`` is a number, a date is text."""


_FLOAT = re.compile(
    r"""(?: [-+]? (?: \d[\d_]*\.[\d_]* | \.\d[\d_]* ) (?: [eE][-+]?\d+ )?
         | [-+]? \d[\d_]* [eE][-+]?\d+
         | [-+]? \.(?: inf|Inf|INF ) | \.(?: nan|NaN|NAN ) )$""",
    re.VERBOSE,
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":timestamp", ":float"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _spaced(value: Any) -> Any:
    """Hydra writes ``{a:1}`` where YAML wants ``{a: 1}``; YAML reads the former as a key ``a:1`` without a value."""
    if isinstance(value, list):
        return [_spaced(item) for item in value]
    if not isinstance(value, dict):
        return value
    mapping = {}
    for key, item in value.items():
        name, colon, text = key.partition(":") if isinstance(key, str) and item is None else (key, "", "")
        mapping[name] = yaml.load(text, Loader=_Loader) if colon else _spaced(item)
    return mapping


def interpolated(entries: Sequence[Entry], known: Mapping[str, Any]) -> list[Entry]:
    """The entries with every ``${...}`` replaced by what it stands for: the final value of a key, in any spelling and from any
    source (a default too), or an environment variable (``${oc.env:NAME}``). `known`: fields by key, for defaults."""
    if not any(_has_interpolation(entry.value) for entry in entries):
        return list(entries)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree = _all_spellings(entries, known)
    # Beside the key that it sets, each value also stands under a name of its own: a later source may have set the key again.
    places = {}
    for i, entry in enumerate(entries):
        if _has_interpolation(entry.value):
            places[i] = f"{entry.key.rpartition('.')[0]}.value {i}".lstrip(".")
            _put(tree, places[i], entry.value)
    resolved, root = list(entries), None
    for i, place in places.items():
        entry = entries[i]
        try:
            root = root or OmegaConf.create(tree)
            value: Any = root
            for part in place.split("."):
                value = value[part]
        except (OmegaConfBaseException, ValueError) as error:
            raise ConfigError(
                f"{entry.source}: {entry.key}={show(entry.value)}: {_why(error, known, entries)}"
            ) from None
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        resolved[i] = replace(entry, value=value, raw=None if entry.raw is None else str(value))
    return resolved


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(map(_has_interpolation, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_interpolation, value))


def _all_spellings(entries: Sequence[Entry], known: Mapping[str, Any]) -> dict[str, Any]:
    """One tree in which every field has its last value, under our name and under each alias whose values mean the same."""
    spellings: dict[str, list[str]] = {}
    for key, name in ALIASES.items():
        if name not in FLAGS and key not in SWITCHES:
            spellings.setdefault(name, []).append(key)
    tree: dict[str, Any] = {}
    values = [(name, info.get_default(call_default_factory=True)) for name, info in known.items()]
    for key, value in [*values, *((entry.key, entry.value) for entry in entries)]:
        _put(tree, key, value)
        name = ALIASES.get(key, key)
        others = {name, *spellings.get(name, ())} - {key} if name in spellings else set()
        if _has_interpolation(value):
            # The others follow this one, unless it follows one of them.
            if any(other in str(value) for other in others):
                continue
            value = f"${{{key}}}"
        for other in others:
            _put(tree, other, value)
    return tree


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[leaf] = value


def _why(error: Exception, known: Mapping[str, Any], entries: Sequence[Entry]) -> str:
    """What is wrong with an interpolation, in one line."""
    text = str(error).split("\n")[0]
    missing = re.search(r"Interpolation key '(.+)' not found", text)
    if missing is None:
        return text
    near = nearest_key(missing[1], list(known), [entry.key for entry in entries])
    return f"there is no key {missing[1]!r}" + (f"; did you mean {near!r}?" if near else "")
