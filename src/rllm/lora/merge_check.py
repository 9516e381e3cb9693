"""Proof that a merged folder is the base plus the adapter: every tensor against float64, and the logits against PEFT's.

Reads folders; writes nothing.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch import Tensor

from rllm.errors import ModelError
from rllm.lora.checkpoint import read_places
from rllm.lora.merge_plan import FLOATS, Source, Update, read_tensor

# Largest difference of logits that is allowed, over max(1, largest logit). All is computed in float32, so what is left is the rounding
# of the merged weights to the dtype they are stored in.
LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# What a weight may be off in float32: its rounding, and that of a sum of `rank` products.
FLOAT32_SLACK = 1e-6
# One model in float32 at a time, with room for its activations and for reading it.
MEMORY_SHARE = 0.6
PROMPTS, PROMPT_TOKENS = 3, 24


def check_tensors(folder: Path, shards: Mapping[str, Sequence[str]], sources: Mapping[str, Source]) -> None:
    """Read every tensor back: the base's own bits where nothing was adapted, else ``W + scale * B A`` of float64 to within half a unit
    in the last place."""
    for file, names in shards.items():
        with safe_open(folder / file, framework="pt") as written:
            if sorted(written.keys()) != sorted(names):
                raise ModelError(f"not merged: {file} does not hold the tensors it should")
            for name in names:
                source, found = sources[name], written.get_tensor(name)
                weight = read_tensor(source)
                if source.update is None:
                    right = torch.equal(found, weight.to(source.dtype or weight.dtype))
                else:
                    right = _equals_float64(found, weight, source.update)
                if not right:
                    raise ModelError(f"not merged: {name}, read back from {file}, is not what it should be")


def _equals_float64(found: Tensor, weight: Tensor, update: Update) -> bool:
    a, b, scale = update
    low_rank = b.double() @ a.double() * scale
    exact = weight.double() + low_rank
    terms = weight.double().abs() + (b.double().abs() @ a.double().abs()) * abs(scale)
    info = torch.finfo(found.dtype)
    allowed = info.eps / 2 * exact.abs() + FLOAT32_SLACK * terms + info.smallest_normal * info.eps
    return bool(((found.double() - exact).abs() <= allowed).all())


@dataclass(frozen=True)
class LogitCheck:
    """Largest difference from PEFT's logits, what was allowed, and the largest change that the adapter makes to those of the base."""

    gap: float
    tolerance: float
    change: float


def check_logits(adapter: Path, base: Path, merged: Path, trust_remote_code: bool = False) -> LogitCheck | None:
    """Compare logits on fixed prompts, all in float32, with those of PEFT over the base; too large a difference is an error.

    None where a float32 copy of the model does not fit in memory.
    """
    places = read_places(merged)
    size = sum(place.numel for place in places.values()) * torch.float32.itemsize
    if size > MEMORY_SHARE * psutil.virtual_memory().available:
        return None
    from peft import PeftModel

    with _quiet(), torch.no_grad():
        model, problems = _load(base, trust_remote_code)
        ids = prompts(model.config.get_text_config().vocab_size)
        plain = model(input_ids=ids, use_cache=False).logits
        expected = PeftModel.from_pretrained(model, str(adapter)).eval()(input_ids=ids, use_cache=False).logits
        del model
        gc.collect()
        model, more = _load(merged, trust_remote_code)
        found = model(input_ids=ids, use_cache=False).logits
    if more - problems:
        raise ModelError(f"not merged: transformers loads the result with {', '.join(sorted(more - problems)[:3])}")
    dtypes = {FLOATS[place.dtype] for place in places.values() if place.dtype in FLOATS}
    dtype = max(dtypes, key=lambda d: torch.finfo(d).eps)
    largest = max(1.0, float(expected.abs().max()))
    check = LogitCheck(
        gap=float((found - expected).abs().max()),
        tolerance=LOGIT_TOLERANCE[dtype] * largest,
        change=float((expected - plain).abs().max()),
    )
    if not check.gap <= check.tolerance:
        raise ModelError(
            f"not merged: the result's logits differ from PEFT's by {check.gap:.2e}, allowed {check.tolerance:.1e} "
            f"({dtype}, logits up to {largest:.1f}); the adapter may use a feature that is not known here"
        )
    return check


def prompts(vocabulary: int) -> Tensor:
    """Fixed token ids [PROMPTS, PROMPT_TOKENS] from all over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator)


def _load(folder: Path, trust_remote_code: bool) -> tuple[Any, set[str]]:
    """(model in float32, what its loading left open)."""
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the loader raises many kinds
        raise ModelError(f"not merged: transformers cannot load {folder}: {error}") from error
    model, info = loaded
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return model.eval(), {f"{kind.replace('_keys', '')} {key}" for kind in kinds for key in info[kind]}


@contextmanager
def _quiet():
    """Progress bars and warnings of the libraries are no news here: what they warn of is what is checked."""
    from transformers.utils import logging as transformers_logging

    level = logging.root.manager.disable
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
