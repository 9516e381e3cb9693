"""Writes docs/verl_keys.md from the tables: what each key of a verl script does here.

python tests/config/make_verl_page.py > docs/verl_keys.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from rllm.config.aliases import ALIASES, NO_EFFECT, ONLY, SPREAD
from rllm.config.explain import leaves, show
from rllm.config.fate import fate
from rllm.config.foreign import TREE_NO_EFFECT, TREE_ONLY
from rllm.config.schema import Config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "solver_judge" / "train_solver_judge_verl.sh"

HEAD = f"""# verl's and rLLM's keys

A script written for verl (0.9.1) or rLLM runs here as it is: its keys set the field that means the same, or have no effect for a reason, or are
refused with the reason before anything loads. Nothing is passed over: keys without effect are listed at the start of the run, one line a reason,
and a key that is nobody's is an error with the nearest one. With `backend=verl`, those that say where and how verl computes (placement, memory,
engines) pass on to it as they are; what is said here of tasks, calls, rewards, advantages and files holds there too ([verl.md](verl.md)). `rllm train FLOW key=value ... --show-config` shows what a script comes to.

Three differences of meaning, each said at the start of a run where it applies: LoRA is on unless `lora_rank=0` is given (verl: off unless a rank is
given); `model.lora.*`, which verl reads for Megatron only, counts like the flat keys; of two spellings of one field that differ, none wins silently: it is an error.

This page is written by `tests/config/make_verl_page.py` from the tables in `src/rllm/config/`, and a test compares them.

## A complete script, key by key

The keys of [{SCRIPT.name}](../{SCRIPT.relative_to(ROOT)}).
"""


def script_keys() -> list[str]:
    """The keys of the complete script, in its order."""
    return re.findall(r"^    ([A-Za-z_.]+)=", SCRIPT.read_text(), flags=re.MULTILINE)


def what_it_does(key: str) -> str:
    """One cell of the table."""
    found = fate(key)
    if found is None:
        assert key in dict(leaves(Config)), key
        return "the same key here"
    if found.fields:
        return "sets " + " and ".join(f"`{name}`" for name in found.fields)
    if found.only:
        return f"{_values(found.only)} only: {found.reason}"
    return f"no effect: {found.reason}"


def _values(values: Iterable[object]) -> str:
    return ", ".join(f"`{show(value)}`" for value in values)


def _table(heads: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| {heads[0]} | {heads[1]} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows), ""]


def page() -> str:
    """The whole page."""
    lines = [HEAD, *_table(("key", "here"), ((f"`{key}`", what_it_does(key)) for key in script_keys()))]
    lines += ["## All keys that set a field", ""]
    lines += _table(("key", "field"), ((f"`{key}`", what_it_does(key)) for key in (*ALIASES, *SPREAD)))
    lines += ["## Keys taken at some values only", ""]
    only = {key: (values, "not built yet") for key, values in ONLY.items()} | TREE_ONLY
    lines += _table(
        ("key", "here"), ((f"`{key}`", f"{_values(values)} only: {why}") for key, (values, why) in only.items())
    )
    lines += ["## Keys without effect", "", "A name that ends in `.` stands for all keys below it.", ""]
    by_reason: dict[str, list[str]] = {}
    for key, reason in (NO_EFFECT | TREE_NO_EFFECT).items():
        by_reason.setdefault(reason, []).append(f"`{key}`")
    lines += _table(("reason", "keys"), ((reason, ", ".join(keys)) for reason, keys in by_reason.items()))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
