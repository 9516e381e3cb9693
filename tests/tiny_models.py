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


_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# What our decoder does not run, and what is special about each.
PLAIN_KINDS: dict[str, dict] = {
    "gpt2": {},  # Conv1D, learnt positions, tied head
    "gpt_neox": {},  # one matrix for query, key and value; parallel halves
    "gemma2": {"head_dim": 8, "sliding_window": 12, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 10.0},
    "phi3": {},  # one matrix for gate and up
    "olmo2": {},  # norms after the halves
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "falcon": {},  # linear layers of its own class
    "cohere": {"logit_scale": 0.3},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},  # a head that cannot be run apart
    "bloom": {},  # ALiBi from the mask
    "mamba": {},  # a state instead of keys and values
    "rwkv": {"attention_hidden_size": 32},  # a state that transformers' caches do not hold
}


def build_plain(kind: str, folder: Path, **settings) -> torch.nn.Module:
    """A random model of a type in `PLAIN_KINDS`, saved to `folder`; weights large enough for every part to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(_SHAPE | PLAIN_KINDS.get(kind, {}) | settings))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    # The state-space parameters mean something: they stay as the architecture makes them.
    for name, parameter in model.named_parameters():
        if (parameter.dim() > 1 and not any(part in name for part in ("A_log", "conv1d", "dt_proj", "time_"))) or (
            "bias" in name and "dt_proj" not in name
        ):
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    return model
