"""The sides that bench/cpu.py compares, each a process of its own that makes one training step whenever it is told to.

    python bench/cpu_sides.py ours FOLDER SETTINGS     # SETTINGS: a JSON object, see `Settings`
    python bench/cpu_sides.py trl FOLDER SETTINGS

Says ``@ {...}`` on its output once it is ready and after each step; reads one line from its input before each step. Knows nothing of
tables or of the other side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROMPT = (
    "Using the numbers {}, write an arithmetic expression that evaluates to {}. Use each number once. "
    "Put it in <answer>...</answer>."
)


@dataclass
class Settings:
    """Of one process. `rank` 0: all weights are trained; alpha is the rank. `rows`: how many rows TRL passes through the model at once."""

    dtype: str = "float32"
    rank: int = 8
    prompts: int = 16
    group: int = 4
    tokens: int = 64
    rows: int = 64
    lr: float = 1e-5


@dataclass
class StepCost:
    """What one step took. `cpu_s`: user and system time of all threads of the process."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    tokens: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started


def questions(count: int) -> Iterator[list[dict[str, str]]]:
    """Chats of one question, the same in each process; `count` in all."""
    numbers = random.Random(0)
    for _ in range(count):
        a, b, c = (numbers.randint(1, 19) for _ in range(3))
        yield [{"role": "user", "content": PROMPT.format([a, b, c], a * b - c)}]


def reward_of(text: str) -> float:
    """Any number that differs within a group does: the share of digits."""
    return sum(map(str.isdigit, text)) / 50


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def say(**facts: Any) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("@", json.dumps(facts | {"peak_bytes": peak}), flush=True)


def wait_for_step() -> None:
    """Returns when the next step is asked for; ends the process when none will be."""
    if not sys.stdin.readline():
        sys.stdout.flush()
        os._exit(0)  # a trainer of the other side cannot be left in the middle of its loop in any gentler way


def ours(folder: Path, settings: Settings) -> None:
    """The calls that `rllm train` makes on the local backend in a step: sample, forward and backward, optimizer, publish with its proof."""
    from rllm.algorithms.advantages import RewardGroup, estimate
    from rllm.backends.base import DEFAULT_ADAPTER, AdamParams, Datum, LossSpec, SamplingParams
    from rllm.backends.local.backend import LocalBackend
    from rllm.config.schema import Config

    config = Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": settings.dtype, "device": "cpu"},
            "lora": {"rank": settings.rank, "alpha": settings.rank or 1, "target_modules": "all-linear"},
            "optim": {"lr": settings.lr},
        }
    )
    backend = LocalBackend.create(config)
    backend.engine.eos_ids = frozenset()  # every completion has its full length
    tokenizer = backend.tokenizer
    chats = questions(10**6)

    async def sample(prompts: list[list[int]]) -> list[Any]:
        params = SamplingParams(settings.tokens)
        return await asyncio.gather(*(backend.sample(ids, params, DEFAULT_ADAPTER) for ids in prompts))

    def step(cost: StepCost) -> None:
        prompts = [
            tokenizer.apply_chat_template(next(chats), add_generation_prompt=True, tokenize=True, return_dict=False)
            for _ in range(settings.prompts)
        ]
        with cost.part("sample"):
            answers = asyncio.run(sample([ids for ids in prompts for _ in range(settings.group)]))
        rewards = [reward_of(tokenizer.decode(answer.ids, skip_special_tokens=True)) for answer in answers]
        groups = [rewards[i : i + settings.group] for i in range(0, len(rewards), settings.group)]
        advantages = estimate("grpo", [RewardGroup(group, [settings.tokens] * len(group)) for group in groups])
        data = []
        for prompt, first, values in zip(prompts, range(0, len(answers), settings.group), advantages, strict=True):
            head = [0] * len(prompt)
            for answer, value in zip(answers[first : first + settings.group], values, strict=True):
                mask = head + [1] * len(answer.ids)
                data.append(Datum([*prompt, *answer.ids], mask, [value * m for m in mask], head + answer.logprobs))
        with cost.part("train"):
            found = backend.forward_backward(data, LossSpec())
            backend.optim_step(AdamParams(settings.lr))
        with cost.part("publish"):
            backend.publish()
            if not backend.probe().passed:
                sys.exit("sampler and trainer differ after a publish")
        cost.tokens = int(found["tokens"])

    say(ready=True, trained=sum(p.numel() for p in backend.learner.trainable()))
    while True:
        wait_for_step()
        cost, started, cpu = StepCost(), time.perf_counter(), cpu_seconds()
        step(cost)
        cost.wall_s, cost.cpu_s = time.perf_counter() - started, cpu_seconds() - cpu
        say(**asdict(cost))


def trl(folder: Path, settings: Settings) -> None:
    """A step of TRL's GRPOTrainer, with `transformers.generate` and without a reference model."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    cost, marks = StepCost(), [0.0, 0.0]

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for_step()
            cost.parts, cost.tokens = {}, 0
            marks[:] = time.perf_counter(), cpu_seconds()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            cost.wall_s, cost.cpu_s = time.perf_counter() - marks[0], cpu_seconds() - marks[1]
            cost.parts["train"] = cost.wall_s - cost.parts["sample"]
            say(**asdict(cost))

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, settings.dtype))
    rows = settings.prompts * settings.group
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lora = LoraConfig(
        r=settings.rank, lora_alpha=settings.rank or 1, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [reward_of(chat[0]["content"]) for chat in completions],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=settings.rows,
            gradient_accumulation_steps=rows // settings.rows,
            num_generations=settings.group,
            max_completion_length=settings.tokens,
            generation_kwargs={"min_new_tokens": settings.tokens},
            max_steps=10**6,
            learning_rate=settings.lr,
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=0,
            shuffle_dataset=False,
            optim="adamw_torch",
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": chat} for chat in questions(settings.prompts * 64)]),
        processing_class=tokenizer,
        callbacks=[Steps()],
        peft_config=lora if settings.rank else None,
    )
    inner: Callable[..., Any] = trainer._generate_single_turn

    def generate(*args: Any, **kwargs: Any) -> Any:
        with cost.part("sample"):
            result = inner(*args, **kwargs)
        cost.tokens += sum(map(len, result[0]))
        return result

    trainer._generate_single_turn = generate
    say(ready=True, trained=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad))
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["ours", "trl"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", type=json.loads)
    args = parser.parse_args()
    {"ours": ours, "trl": trl}[args.side](args.folder, Settings(**args.settings))


if __name__ == "__main__":
    main()
