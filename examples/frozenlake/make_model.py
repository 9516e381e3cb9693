"""Make the starting model of this example: the embedded default model, fine-tuned on games of two habits.

    python examples/frozenlake/make_model.py --out runs/frozenlake_model

The habits are mixed on purpose, move by move: a step of a shortest way, or any step at all. Maps of the validation split are in none of
the games.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from frozenlake import MOVES, FrozenLake, LakeMap, random_map
from frozenlake_flow import MAX_TURNS, MODEL, first_message, is_held_out

from rllm.sft import SftConfig, run_sft

RANDOM_MOVES = 0.5


def good_move(rng: random.Random, game: FrozenLake) -> str:
    """A step of a shortest way to the goal."""
    left = game.lake.distances()
    row, column = game.at
    return rng.choice([m for m, (d, r) in MOVES.items() if left.get((row + d, column + r)) == left[game.at] - 1])


def played(rng: random.Random, lake: LakeMap) -> list[dict[str, str]]:
    """A game as a chat; it goes on over ice only, so that most of what is seen is the middle of a game."""
    game = FrozenLake(lake)
    messages = [{"role": "user", "content": first_message(game)}]
    for _ in range(MAX_TURNS):
        move = rng.choice(list(MOVES)) if rng.random() < RANDOM_MOVES else good_move(rng, game)
        messages.append({"role": "assistant", "content": move})
        game.move(move)
        if game.over:
            break
        messages.append({"role": "user", "content": game.observation()})
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def games(n: int, seed: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    rng = random.Random(f"frozenlake/games/{seed}")
    made = 0
    while made < n:
        lake = random_map(rng, 4)
        if not is_held_out(lake):
            made += 1
            yield {"messages": played(rng, lake)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--games", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "games.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in games(args.games, args.seed)))
    config = {
        "model": {"path": "default", "dtype": "float32"},
        "lora": {"rank": 0},
        "data": {"train_files": str(file), "batch_tokens": 4096},
        "optim": {"lr": 2e-3, "weight_decay": 0.01},
        "trainer": {"seed": args.seed, "out": str(args.out), "log_freq": 20},
    }
    run_sft(SftConfig.model_validate(config))


if __name__ == "__main__":
    main()
