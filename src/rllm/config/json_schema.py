"""The config tree as a JSON schema, for editors: every key with its description, defaults and choices, in our spelling and in others'.

Says what a config *file* may hold; rules between fields are `check.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm.config.aliases import ALIASES, NO_EFFECT, SPREAD, TRANSLATED
from rllm.config.check import AGGREGATIONS, ESTIMATORS, LOGGERS, LOSSES
from rllm.config.fate import fate, foreign_keys
from rllm.config.foreign import TREE_NO_EFFECT
from rllm.config.schema import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Values that `check.py` knows and the types do not. Of the first two, users may register more.
OPEN_CHOICES = {"algorithm.adv_estimator": ESTIMATORS, "algorithm.loss": LOSSES}
CHOICES = {"algorithm.loss_agg_mode": AGGREGATIONS}
INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_OUTSIDE = ("title", "description", "default")


def config_schema() -> dict[str, Any]:
    """The schema, self-contained, without network references."""
    schema = Config.model_json_schema()
    inlined: set[str] = set()
    schema = _section(schema, schema["$defs"], "", inlined)
    schema["$defs"] = {kind: part for kind, part in schema["$defs"].items() if kind not in inlined}
    schema["patternProperties"] = {r"\.": {"description": "A key written with its dots, e.g. lora.rank"}}
    for key in foreign_keys():
        _insert(schema, key.split("."), _foreign_leaf(key))
    for group in (*NO_EFFECT, *TREE_NO_EFFECT):
        if group.endswith("."):
            section = _insert(schema, group[:-1].split("."), {"type": "object"})
            if "title" not in section:  # one of ours that others put keys into stays closed
                section["additionalProperties"] = True
            section.setdefault("description", f"No effect here: {(NO_EFFECT | TREE_NO_EFFECT)[group]}")
    return {"$schema": DIALECT, **schema, "title": "rllm config"}


def _section(part: dict[str, Any], kinds: Mapping[str, Any], at: str, inlined: set[str]) -> dict[str, Any]:
    """A section with the sections in it written out, so that other spellings can be put among its keys. `at`: ``algorithm.`` or so."""
    properties = {}
    for name, field in part["properties"].items():
        kind = field.get("$ref", "").rpartition("/")[2]
        if kind:
            inlined.add(kind)
            inner = _section(kinds[kind], kinds, f"{at}{name}.", inlined)
            properties[name] = inner | {"type": ["object", "null"]}  # null: everything in it is commented out
        else:
            properties[name] = _as_in_a_file(f"{at}{name}", field)
    return part | {"properties": properties}


def _as_in_a_file(key: str, field: dict[str, Any]) -> dict[str, Any]:
    """A field with its choices, and with ``${...}`` allowed where it is no text."""
    if key in CHOICES or key in OPEN_CHOICES:
        known = list(CHOICES.get(key) or OPEN_CHOICES[key])
        other = [{"type": "string"}] if key in OPEN_CHOICES else [INTERPOLATION]
        return {name: field[name] for name in _OUTSIDE if name in field} | {"anyOf": [{"enum": known}, *other]}
    if key == "trainer.logger":
        one = {"enum": list(LOGGERS)}
        return {name: field[name] for name in _OUTSIDE if name in field} | {
            "anyOf": [one, {"type": "array", "items": one}]
        }
    if field.get("type") == "string" and "enum" not in field and "const" not in field:
        return field
    outside = {name: field[name] for name in _OUTSIDE if name in field}
    inside = {name: value for name, value in field.items() if name not in _OUTSIDE}
    words = [{"enum": list(TRANSLATED[key])}] if key in TRANSLATED else []
    return outside | {"anyOf": [*inside.get("anyOf", [inside]), *words, INTERPOLATION]}


def _foreign_leaf(key: str) -> dict[str, Any]:
    found = fate(key)
    assert found is not None
    if key in ALIASES or key in SPREAD:
        return {"description": f"Sets {' and '.join(found.fields)}"}
    if found.only:
        return {"description": f"Only this is taken here: {found.reason}", "enum": list(found.only)}
    return {"description": f"No effect here: {found.reason}"}


def _insert(schema: dict[str, Any], path: list[str], leaf: dict[str, Any]) -> dict[str, Any]:
    """Put `leaf` at the dotted path, making sections on the way; what is there already stays. Returns what is at the path."""
    for section in path[:-1]:
        schema.setdefault("type", "object")
        schema.setdefault("additionalProperties", False)
        schema = schema.setdefault("properties", {}).setdefault(section, {})
    schema.setdefault("type", "object")
    schema.setdefault("additionalProperties", False)
    return schema.setdefault("properties", {}).setdefault(path[-1], leaf)
