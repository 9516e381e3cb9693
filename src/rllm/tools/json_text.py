"""JSON as models and clients write it: strict, and not deeper than this process can handle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Deeper than this, Python's JSON and the template engine run out of stack.
MAX_DEPTH = 64


def strict_json(text: str | bytes) -> Any:
    """`json.loads` without NaN and infinities, which JSON does not have. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=no_constant)


def no_constant(name: str) -> Any:
    """Refuses the words that Python's JSON reads as numbers."""
    raise ValueError(f"{name} is no JSON number")


def depth_of(value: Any) -> int:
    """How deep lists and objects are nested in a JSON value; more than `MAX_DEPTH` may be told as `MAX_DEPTH` + 1."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        nested = [item for item in level if isinstance(item, (Mapping, list, tuple))]
        if not nested:
            return depth
        depth += 1
        level = [inner for item in nested for inner in (item.values() if isinstance(item, Mapping) else item)]
    return depth
