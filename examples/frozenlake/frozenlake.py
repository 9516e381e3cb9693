"""FrozenLake: walk over ice from the start to the goal without falling into a hole. Seeded maps, each one solvable.

Knows the game only; nothing of models or prompts. (The game is that of Gymnasium's toy-text environments; this is our own.)
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
HOLE_SHARE = 0.25
Cell = tuple[int, int]


@dataclass(frozen=True)
class LakeMap:
    """A square lake: start in the top left corner, goal in the bottom right one, `holes` between them."""

    size: int
    holes: frozenset[Cell]

    @property
    def goal(self) -> Cell:
        return self.size - 1, self.size - 1

    def inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self.size and 0 <= cell[1] < self.size

    def distances(self) -> dict[Cell, int]:
        """Fewest moves from each cell to the goal over ice; cells from which it cannot be reached are left out."""
        found, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            row, column = queue.popleft()
            for down, right in MOVES.values():
                cell = (row + down, column + right)
                if self.inside(cell) and cell not in self.holes and cell not in found:
                    found[cell] = found[row, column] + 1
                    queue.append(cell)
        return found

    def to_text(self) -> str:
        """Rows of S (start), G (goal), H (hole) and F (ice), as Gymnasium writes them."""
        names = {(0, 0): "S", self.goal: "G"} | dict.fromkeys(self.holes, "H")
        return "\n".join("".join(names.get((r, c), "F") for c in range(self.size)) for r in range(self.size))

    @classmethod
    def from_text(cls, text: str) -> LakeMap:
        rows = text.split("\n")
        return cls(
            len(rows), frozenset((r, c) for r, row in enumerate(rows) for c, name in enumerate(row) if name == "H")
        )


def random_map(rng: random.Random, size: int) -> LakeMap:
    """A map whose goal can be reached."""
    while True:
        cells = [(r, c) for r in range(size) for c in range(size)][1:-1]
        lake = LakeMap(size, frozenset(cell for cell in cells if rng.random() < HOLE_SHARE))
        if (0, 0) in lake.distances():
            return lake


@dataclass
class FrozenLake:
    """One game. With `slip` > 0 a move goes to one of its two sides with that probability, by a generator of its own."""

    lake: LakeMap
    slip: float = 0.0
    seed: int = 0
    at: Cell = (0, 0)
    moves: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    @property
    def reached_goal(self) -> bool:
        return self.at == self.lake.goal

    @property
    def over(self) -> bool:
        return self.reached_goal or self.at in self.lake.holes

    def move(self, name: str) -> None:
        """Go `up`, `down`, `left` or `right`; against the edge the player stays."""
        if self.over:
            raise ValueError("the game is over")
        down, right = MOVES[name]
        if self.slip and self._rng.random() < self.slip:
            sign = self._rng.choice((-1, 1))
            down, right = sign * right, sign * down
        cell = (self.at[0] + down, self.at[1] + right)
        self.at = cell if self.lake.inside(cell) else self.at
        self.moves += 1

    def observation(self) -> str:
        """The map with the player as @, and what lies around."""
        rows = [list(row) for row in self.lake.to_text().replace("S", "F").split("\n")]
        rows[self.at[0]][self.at[1]] = "@"
        around = ", ".join(f"{name} {self._what((self.at[0] + d, self.at[1] + r))}" for name, (d, r) in MOVES.items())
        return "\n".join("".join(row) for row in rows) + f"\n{around}"

    def _what(self, cell: Cell) -> str:
        if not self.lake.inside(cell):
            return "edge"
        return "hole" if cell in self.lake.holes else "goal" if cell == self.lake.goal else "ice"
