"""The sides that bench/gpu.py compares with, each a process of its own: vLLM's sampling and TRL's training step on work W.

    python bench/gpu_peers.py vllm RANK SETTINGS     # RANK 0: no adapter; SETTINGS: a JSON object, see `Settings`
    python bench/gpu_peers.py trl RANK SETTINGS

Models have random weights of the given shapes. Prints one line for each figure. Knows nothing of our own code.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Settings:
    """`shape`: keywords of a Qwen3Config. `micro`: rows that TRL passes through the model at once."""

    shape: dict[str, Any]
    batches: list[int] = field(default_factory=lambda: [64, 128, 256])
    prompt: int = 256
    tokens: int = 512
    repeats: int = 2
    micro: int = 16


def prompts_of(count: int, length: int, numbers: random.Random) -> list[list[int]]:
    return [[numbers.randrange(1000) for _ in range(length)] for _ in range(count)]


def qwen3_config(shape: dict[str, Any], **more: Any) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None, **more)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
    return config


def save_lora(folder: Path, config: Any, rank: int) -> None:
    """A PEFT folder with random matrices on every linear layer but the head."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {"self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
             "self_attn.o_proj": (q, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
             "mlp.down_proj": (inner, hidden)}  # fmt: skip
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (inputs, outputs) in sizes.items():
            start = f"base_model.model.model.layers.{layer}.{name}."
            tensors[start + "lora_A.weight"] = torch.randn(rank, inputs, dtype=torch.bfloat16) * 0.02
            tensors[start + "lora_B.weight"] = torch.randn(outputs, rank, dtype=torch.bfloat16) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    facts["target_modules"] = sorted({name.split(".")[1] for name in sizes})
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def vllm(rank: int, settings: Settings) -> None:
    """Tokens a second of `LLM.generate` with the log-probability of each sampled token, as training needs it. The prefix cache is on:
    prompts of a group are read once, and every run has prompts of its own."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    numbers = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = qwen3_config(settings.shape)
        config.save_pretrained(folder / "m")
        if rank:
            save_lora(folder / "a", config, rank)
        started = time.perf_counter()
        llm = LLM(
            model=str(folder / "m"), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=1024,
            gpu_memory_utilization=0.6, max_num_seqs=max(settings.batches), enable_prefix_caching=True,
            **({"enable_lora": True, "max_lora_rank": max(8, rank), "max_loras": 1} if rank else {}),
        )  # fmt: skip
        lora = {"lora_request": LoRARequest("a", 1, str(folder / "a"))} if rank else {}

        def generate(prompts: list[list[int]], tokens: int) -> float:
            params = SamplingParams(
                temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False
            )
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            begun = time.perf_counter()
            answers = llm.generate(asked, params, use_tqdm=False, **lora)
            assert all(len(answer.outputs[0].token_ids) == tokens for answer in answers)
            return time.perf_counter() - begun

        generate(prompts_of(8, settings.prompt, numbers), 8)
        print(
            f"vLLM rank {rank}: first tokens after {time.perf_counter() - started:.1f} s, its own imports not counted",
            flush=True,
        )
        for batch in settings.batches:
            for label, group in (("different prompts", 1), ("groups of 8", 8)):
                seconds = []
                for _ in range(settings.repeats + 1):
                    prompts = [
                        ids for ids in prompts_of(batch // group, settings.prompt, numbers) for _ in range(group)
                    ]
                    seconds.append(generate(prompts, settings.tokens))
                middle = statistics.median(seconds[1:])
                rate = batch * settings.tokens / middle
                print(f"vLLM rank {rank} batch {batch:3d} {label:17s} {rate:8.0f} tok/s  {middle:.3f} s", flush=True)


def trl(rank: int, settings: Settings) -> None:
    """Seconds of a step of TRL's GRPOTrainer and of its parts; all rows have their full length."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    words = {f"w{i}": i for i in range(1000)} | {"<unk>": 1000, "<end>": 1001, "<pad>": 1002}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )
    config = qwen3_config(settings.shape, attn_implementation="sdpa")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = words["<end>"]
    model.config.pad_token_id = model.generation_config.pad_token_id = words["<pad>"]
    numbers, steps, prompts, group = random.Random(0), settings.repeats + 1, 16, 8
    parts: list[dict[str, float]] = []
    marks = {"begun": 0.0, "peak": 0.0}

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            parts.append({"generate": 0.0, "score": 0.0, "optimizer": 0.0})
            marks["begun"] = now()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            marks["optimizer"] = now()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            parts[-1]["optimizer"] += now() - marks["optimizer"]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = parts[-1]
            step["whole"] = now() - marks["begun"]
            step["forward+backward"] = step["whole"] - step["score"] - step["optimizer"]
            step["score"] -= step["generate"]
            marks["peak"] = max(marks["peak"], torch.cuda.max_memory_allocated())
            print(
                f"TRL rank {rank} step {len(parts)}: {json.dumps({k: round(v, 3) for k, v in step.items()})}",
                flush=True,
            )

    texts = [" ".join(f"w{i}" for i in ids) for ids in prompts_of(prompts * (steps + 1), settings.prompt, numbers)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [random.random() for _ in completions],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(), bf16=True, per_device_train_batch_size=settings.micro,
            gradient_accumulation_steps=prompts * group // settings.micro, num_generations=group,
            max_completion_length=settings.tokens, max_steps=steps, learning_rate=1e-5, temperature=1.0, beta=0.0,
            generation_kwargs={"min_new_tokens": settings.tokens}, logging_strategy="no", save_strategy="no",
            report_to="none", gradient_checkpointing=False, disable_tqdm=True, seed=0, shuffle_dataset=False, optim="adamw_torch",
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        callbacks=[Steps()],
        peft_config=LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM") if rank else None,
    )  # fmt: skip

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            result = work(*args, **kwargs)
            parts[-1][name] += now() - begun
            if name == "score":  # what follows is training
                torch.cuda.reset_peak_memory_stats()
            return result

        return run

    trainer._generate_single_turn = timed("generate", trainer._generate_single_turn)
    trainer._generate_and_score_completions = timed("score", trainer._generate_and_score_completions)
    trainer.train()
    medians = {name: statistics.median(step[name] for step in parts[1:]) for name in parts[0]}
    print(
        f"TRL rank {rank}  whole step {medians['whole']:.2f} s  "
        + "  ".join(f"{name} {value:.3f}" for name, value in medians.items() if name != "whole")
        + f"  peak of training {marks['peak'] / 2**30:.1f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["vllm", "trl"])
    parser.add_argument("rank", type=int)
    parser.add_argument("settings", type=json.loads)
    args = parser.parse_args()
    {"vllm": vllm, "trl": trl}[args.side](args.rank, Settings(**args.settings))


if __name__ == "__main__":
    main()
