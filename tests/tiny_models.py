"""Tiny random Hugging Face models on disk, and the same as our decoder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
VOCAB = 96


def build(kind: str, folder: Path, **settings) -> torch.nn.Module:
    """A random model of `kind`, saved to `folder`. Norms and biases are random too, so that none can be forgotten."""
    config_class, model_class = KINDS[kind]
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "qwen2":
        shape |= {"hidden_size": 96}
        shape.pop("head_dim")
    torch.manual_seed(7)
    model = model_class(config_class(**(shape | settings))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.save_pretrained(folder)
    return model


def random_adapter(decoder, rank: int = 4, alpha: float = 8.0, scale: float = 0.2, **which):
    """An adapter with random A and B, so that it changes every output."""
    from rllm.lora.adapter import LoraAdapter
    from rllm.lora.match import match_modules

    shapes = decoder.linear_shapes()
    modules = match_modules(list(shapes), **which)
    adapter = LoraAdapter(shapes, modules, decoder.block_layout(), rank=rank, alpha=alpha, seed=3)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name in modules:
            _, b = adapter.matrices(name)
            b.copy_(torch.randn(b.shape, generator=generator) * scale)
    return adapter


def with_peft(model, adapter):
    """The transformers model with the same adapter put on it by PEFT."""
    from peft import LoraConfig, get_peft_model

    targets = sorted({name.removeprefix("model.") for name in adapter.modules_adapted})
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets, task_type="CAUSAL_LM")
    peft_model = get_peft_model(model, config).eval()
    state = dict(peft_model.named_parameters())
    with torch.no_grad():
        for name in adapter.modules_adapted:
            a, b = adapter.matrices(name)
            state[f"base_model.model.{name}.lora_A.default.weight"].copy_(a)
            state[f"base_model.model.{name}.lora_B.default.weight"].copy_(b)
    return peft_model
