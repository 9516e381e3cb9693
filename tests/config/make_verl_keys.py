"""Lists the leaf keys of verl's config tree, for the test that every one of them has a place here.

    python tests/config/make_verl_keys.py path/to/verl/trainer/config/_generated_ppo_trainer.yaml > tests/config/verl_0_9_1_keys.txt

verl itself need not be installed: the file is inside its wheel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import yaml


def leaf_keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted key of every leaf; an empty mapping is one."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaf_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print("\n".join(sorted(leaf_keys(yaml.safe_load(file)))))
