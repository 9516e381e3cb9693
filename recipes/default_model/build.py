"""Build the embedded default model from nothing: demonstrations, tokenizer, random weights, `rllm` SFT.

    python recipes/default_model/build.py --out build/default --seconds 180

Deterministic up to floating point for a given seed and number of steps. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from demonstrations import demonstrations
from tokenizer import train_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from rllm.sft import SftConfig, run_sft

CHATS_PER_JOB = 2500


def _job(seed: int) -> list[dict]:
    return list(demonstrations(CHATS_PER_JOB, seed))


def write_demonstrations(n: int, seed: int, out: Path, workers: int) -> None:
    jobs = [seed * 1_000_000 + i for i in range(-(-n // CHATS_PER_JOB))]
    with ProcessPoolExecutor(workers) as pool, out.open("w") as file:
        for chats in pool.map(_job, jobs):
            file.writelines(json.dumps(chat) + "\n" for chat in chats)


def random_model(folder: Path, tokenizer: Any, seed: int) -> None:
    """A randomly initialised Qwen3 of about 2 million parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/default"))
    parser.add_argument("--chats", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seconds", type=float, help="stop training after this time (the schedule follows)")
    parser.add_argument("--batch-tokens", type=int, default=49152)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    start = args.out / "start"
    start.mkdir(parents=True, exist_ok=True)
    chats = args.out / "demonstrations.jsonl"
    write_demonstrations(args.chats, args.seed, chats, args.workers)
    with chats.open() as file:
        texts = [
            m["content"] for _, line in zip(range(20_000), file, strict=False) for m in json.loads(line)["messages"]
        ]
    tokenizer = train_tokenizer(texts, start)
    random_model(start, tokenizer, args.seed)
    config = SftConfig.model_validate(
        {
            "model": {"path": str(start), "dtype": "float32"},
            "lora": {"rank": 0},
            "data": {"train_files": str(chats), "batch_tokens": args.batch_tokens, "workers": args.workers},
            "optim": {"lr": args.lr, "weight_decay": 0.01, "warmup_ratio": 0.03, "min_lr_ratio": 0.02},
            "trainer": {
                "total_epochs": args.epochs,
                "max_seconds": args.seconds,
                "seed": args.seed,
                "log_freq": 100,
                "out": str(args.out / "model"),
            },
        }
    )
    run_sft(config)


if __name__ == "__main__":
    main()
