"""Targets of an adapter as groups of layers: attention, MLP, output head, which is all that Tinker's API can choose.

Knows the names of the layers; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
HEAD = frozenset({"lm_head"})


@dataclass(frozen=True)
class ModuleGroups:
    attention: bool
    mlp: bool
    head: bool


def module_groups(target: str | Sequence[str]) -> ModuleGroups | None:
    """The groups that ``lora.target_modules`` names whole; None where it chooses otherwise. `all-linear` leaves the head out."""
    if target == "all-linear":
        return ModuleGroups(True, True, False)
    if isinstance(target, str):
        return None
    names = set(target)
    groups = ModuleGroups(names >= ATTENTION, names >= MLP, names >= HEAD)
    chosen = (
        (ATTENTION if groups.attention else set()) | (MLP if groups.mlp else set()) | (HEAD if groups.head else set())
    )
    return groups if chosen and names == chosen else None
