"""Tokens per second of our sampler beside `transformers.generate`, on a random Qwen3 of four million parameters, with and without LoRA.

    python bench/generate.py --batches 16 64 128

Checks first that both give the same greedy tokens and prints no speed otherwise. Knows nothing of training.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from rllm.backends.base import BASE, DEFAULT_ADAPTER, Completion, SamplingParams
from rllm.backends.local.engine import Engine
from rllm.backends.local.loading import load_decoder
from rllm.lora.adapter import LoraAdapter
from rllm.lora.match import match_modules

VOCAB = 200
PROMPT_TOKENS = (40, 80)
RANK = 8
# Two logits closer than this may swap places under another order of summation.
TIE = 1e-4


def build_model(folder: Path, vocab: int = VOCAB) -> Any:
    """A random Qwen3 of four million parameters, also saved to `folder`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def random_prompts(n: int, seed: int, group: int = 1) -> list[list[int]]:
    """`n` prompts of uniformly random ids, lengths uniform in PROMPT_TOKENS, each standing `group` times in a row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(*PROMPT_TOKENS, (n // group,), generator=generator).tolist()
    different = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [prompt for prompt in different for _ in range(group)]


def adapted(model: Any, decoder: Any) -> tuple[Any, LoraAdapter]:
    """The same random rank-8 adapter of all linear layers on both: (PEFT model around `model`, ours)."""
    shapes = decoder.linear_shapes()
    modules = match_modules(list(shapes))
    adapter = LoraAdapter(shapes, modules, decoder.block_layout(), rank=RANK, alpha=RANK, seed=0)
    targets = [name.removeprefix("model.") for name in modules]
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, task_type="CAUSAL_LM"))
    weights = dict(peft.named_parameters())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in modules:
            a, b = adapter.matrices(name)
            b.copy_(torch.randn(b.shape, generator=generator) * 0.05)
            weights[f"base_model.model.{name}.lora_A.default.weight"].copy_(a)
            weights[f"base_model.model.{name}.lora_B.default.weight"].copy_(b)
    return peft.eval(), adapter


def theirs(model: Any, prompts: list[list[int]], new_tokens: int, sampled: bool) -> list[list[int]]:
    """Completions of `transformers.generate`: left-padded prompts, its KV cache."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how: dict[str, Any] = (
        {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
    )
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **how,
        )
    return out[:, longest:].tolist()


def ours(engine: Engine, prompts: list[list[int]], new_tokens: int, sampled: bool, adapter: str) -> list[list[int]]:
    """Completions of our engine. The publish empties its prefix cache: every different prompt is read."""
    engine.publish(engine.adapters, engine.version + 1)
    params = SamplingParams(new_tokens, temperature=1.0 if sampled else 0.0)
    futures: list[Future[Completion]] = [engine.submit(prompt, params, adapter) for prompt in prompts]
    return [future.result().ids for future in futures]


def differs(model: Any, prompt: list[int], expected: list[int], got: list[int]) -> bool:
    """Whether two greedy completions part where the model's two best logits are no tie."""
    if expected == got:
        return False
    at = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return True
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + expected[:at]])).logits[0, -1]
    return (logits[expected[at]] - logits[got[at]]).abs().item() > TIE


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[1, 4], help="how often each prompt is asked in a batch"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder))
        peft_base = build_model(Path(folder))  # PEFT changes the model it is put on
        decoder = load_decoder(Path(folder))
    peft, adapter = adapted(peft_base, decoder)
    engine = Engine(decoder, eos_ids=[], max_batch=max(args.batches), max_model_len=2048)
    engine.publish({DEFAULT_ADAPTER: adapter.snapshot(decoder.dtype)}, 1)
    sides = {"base": (model, BASE), f"LoRA r={RANK}": (peft, DEFAULT_ADAPTER)}
    try:
        for label, (reference, name) in sides.items():
            asked = random_prompts(16, seed=99)
            want = theirs(reference, asked, args.new_tokens, sampled=False)
            got = ours(engine, asked, args.new_tokens, False, name)
            wrong = sum(differs(reference, *row) for row in zip(asked, want, got, strict=True))
            if wrong:
                sys.exit(
                    f"{label}: {wrong} of {len(asked)} greedy completions differ from transformers'; no speed to report"
                )
        print(
            f"same greedy tokens; {args.threads} threads, {args.new_tokens} new tokens, fp32, median of {args.repeats}"
        )
        print(
            "| batch | different prompts | weights | transformers tok/s | ours tok/s | ratio | ours: prefill s | decode ms/step |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for batch, group in itertools.product(args.batches, args.groups):
            for label, (reference, name) in sides.items():
                row = measure(engine, reference, name, batch, group, args.new_tokens, args.repeats)
                print(f"| {batch} | {batch // group} | {label} {row}", flush=True)
    finally:
        engine.close()


def measure(engine: Engine, reference: Any, adapter: str, batch: int, group: int, new_tokens: int, repeats: int) -> str:
    """One table row: the two take turns, each repeat on other prompts."""
    their_s, our_s = [], []
    before: dict[str, float] = {}
    for repeat in range(repeats + 1):
        prompts = random_prompts(batch, repeat, group)
        their_s.append(seconds(lambda: theirs(reference, prompts, new_tokens, sampled=True)))  # noqa: B023
        our_s.append(seconds(lambda: ours(engine, prompts, new_tokens, True, adapter)))  # noqa: B023
        if repeat == 0:  # warm-up
            their_s, our_s, before = [], [], engine.stats()
    after = engine.stats()
    steps = after["decode_steps"] - before["decode_steps"]
    prefill_s = (after["prefill_s"] - before["prefill_s"]) / repeats
    step_ms = 1e3 * (after["decode_s"] - before["decode_s"]) / steps
    their_rate, our_rate = (batch * new_tokens / statistics.median(s) for s in (their_s, our_s))
    return f"| {their_rate:,.0f} | {our_rate:,.0f} | {our_rate / their_rate:.2f}x | {prefill_s:.3f} | {step_ms:.2f} |"


if __name__ == "__main__":
    main()
