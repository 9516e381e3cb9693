"""Ours against transformers and PEFT in float32, same weights and same random adapter: greedy tokens, log-probabilities, gradients.

    python bench/cpu_checks.py FOLDER float32|bfloat16

Prints what it found and ends with 1 if anything is beyond its bound. Knows nothing of time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from generate import adapted
from transformers import AutoModelForCausalLM

from rllm.backends.base import DEFAULT_ADAPTER, Datum, LossSpec, SamplingParams
from rllm.backends.local.engine import Engine
from rllm.backends.local.learner import Learner
from rllm.backends.local.loading import load_decoder

PROMPTS, GROUP, TOKENS = 4, 4, 32
# float32 differs by the order of summation only. A narrower dtype is held against what transformers itself loses in it.
FLOAT32 = {"greedy": 1e-3, "sampler_mean": 1e-5, "sampler_max": 1e-3, "logprob_mean": 1e-5, "gradient": 1e-4}
NO_WORSE = 1.2


def prompts_of(vocab: int) -> list[list[int]]:
    """Random prompts of different lengths, each standing `GROUP` times in a row."""
    generator = torch.Generator().manual_seed(0)
    different = [torch.randint(0, vocab, (30 + 9 * i,), generator=generator).tolist() for i in range(PROMPTS)]
    return [prompt for prompt in different for _ in range(GROUP)]


def reference_logits(model: Any, row: Datum) -> torch.Tensor:
    """Of the trained tokens of a row, [T, vocab]."""
    trained = [t for t, m in enumerate(row.mask) if m]
    return model(input_ids=torch.tensor([row.ids])).logits[0, torch.tensor(trained) - 1].float()


def reference(model: Any, rows: list[Datum], names: list[str]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(log-probabilities [rows, TOKENS] of the trained tokens, gradients of A and B of the modules `names`) by the PEFT model."""
    model.zero_grad()
    logprobs = []
    for row in rows:
        targets = torch.tensor(row.ids[-TOKENS:]).unsqueeze(1)
        chosen = reference_logits(model, row).log_softmax(-1).gather(1, targets).squeeze(1)
        # At a ratio of 1, the gradient of the clipped loss is that of -advantage * log-probability.
        (-(torch.tensor(row.advantages[-TOKENS:]) * chosen).sum() / (len(rows) * TOKENS)).backward()
        logprobs.append(chosen.detach())
    weights = dict(model.named_parameters())
    grads = [weights[f"base_model.model.{name}.lora_{letter}.default.weight"].grad for name in names for letter in "AB"]
    return torch.stack(logprobs), [grad.clone() for grad in grads if grad is not None]


def relative_error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Of all tensors together: ``|got - expected| / |expected|``."""
    difference = sum((a.float() - b).square().sum().item() for a, b in zip(got, expected, strict=True))
    return (difference / sum(b.square().sum().item() for b in expected)) ** 0.5


def main() -> None:
    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    decoder = load_decoder(folder, getattr(torch, dtype))
    # The reference has the weights that ours has, which a narrow dtype has rounded.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).float().eval()
    peft, adapter = adapted(model, decoder)
    engine = Engine(decoder, eos_ids=[], max_batch=64, max_model_len=512, seed=0)
    engine.publish({DEFAULT_ADAPTER: adapter.snapshot(decoder.dtype)}, 1)
    learner = Learner(decoder, {DEFAULT_ADAPTER: adapter})
    prompts = prompts_of(decoder.config.vocab_size)

    def rows_at(temperature: float, asked: list[list[int]]) -> list[Datum]:
        futures = [
            engine.submit(p, SamplingParams(TOKENS, temperature, seed=i), DEFAULT_ADAPTER) for i, p in enumerate(asked)
        ]
        rows = []
        for i, (prompt, future) in enumerate(zip(asked, futures, strict=True)):
            answer, head = future.result(), [0.0] * len(prompt)
            row = Datum([*prompt, *answer.ids], [0] * len(prompt) + [1] * TOKENS, logprobs=head + answer.logprobs)
            row.advantages = [(i % GROUP - 1.5) * m for m in row.mask]
            rows.append(row)
        return rows

    found = {"greedy": 0.0}
    for row in rows_at(0.0, prompts[::GROUP]):
        with torch.no_grad():
            logits = reference_logits(peft, row)
        chosen = torch.tensor(row.ids[-TOKENS:]).unsqueeze(1)
        found["greedy"] = max(found["greedy"], (logits.amax(-1) - logits.gather(1, chosen).squeeze(1)).max().item())
    rows = rows_at(1.0, prompts)
    sampled = torch.tensor([row.logprobs[-TOKENS:] for row in rows])
    trained = torch.tensor([values[-TOKENS:] for values in learner.logprobs(rows, trained_only=True)])
    for row, values in zip(rows, trained.tolist(), strict=True):
        row.old_logprobs = [0.0] * (len(row.ids) - TOKENS) + values
    learner.forward_backward(rows, LossSpec())
    own = [
        matrix.grad for name in adapter.modules_adapted for matrix in adapter.matrices(name) if matrix.grad is not None
    ]
    exact, gradients = reference(peft, rows, adapter.modules_adapted)
    found["sampler_mean"] = (sampled - trained).abs().mean().item()
    found["sampler_max"] = (sampled - trained).abs().max().item()
    found["logprob_mean"] = (trained - exact).abs().mean().item()
    found["gradient"] = relative_error(own, gradients)
    bounds = FLOAT32
    if dtype != "float32":
        narrow, narrow_gradients = reference(peft.to(getattr(torch, dtype)), rows, adapter.modules_adapted)
        lost = {
            "logprob_mean": (narrow - exact).abs().mean().item(),
            "gradient": relative_error(narrow_gradients, gradients),
        }
        print(f"transformers and PEFT in {dtype}: " + ", ".join(f"{name} {value:.1e}" for name, value in lost.items()))
        most = (narrow - exact).abs().max().item()
        # Two results that each lose that much may lie twice as far apart; so may two logits whose order is in question.
        bounds = {name: NO_WORSE * value for name, value in lost.items()} | {
            "greedy": 2 * most,
            "sampler_mean": 2 * lost["logprob_mean"],
            "sampler_max": 2 * most,
        }
    engine.close()
    print("checks: " + ", ".join(f"{name} {value:.1e}" for name, value in found.items()), flush=True)
    wrong = [
        f"{name} is {found[name]:.1e}, allowed {most:.0e}" for name, most in bounds.items() if not found[name] <= most
    ]
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
