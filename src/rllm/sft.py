"""Supervised fine-tuning on chats: cross-entropy on the assistant's tokens, with LoRA or on all weights.

Knows chats and the learner; nothing of rewards or sampling.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from pydantic import Field

from rllm.algorithms.schedules import rate_factor, warmup_length
from rllm.algorithms.spec import DEFAULT_ADAPTER, Datum, LossSpec
from rllm.config.schema import LoraSettings, ModelConfig, OptimConfig
from rllm.config.section import Section
from rllm.data.dataset import read_jsonl
from rllm.errors import ConfigError, DataError, RunError

# Below this many rows starting worker processes costs more than it saves.
PARALLEL_ROWS = 20_000
ROWS_PER_JOB = 2_000


class SftDataConfig(Section):
    train_files: str | list[str] | None = Field(default=None, description="JSONL file(s) of {'messages': [...]} chats")
    max_length: int = Field(
        default=1024, gt=1, description="Longest chat in tokens; a longer one is left out and counted"
    )
    batch_tokens: int = Field(default=16384, gt=0, description="Tokens per optimizer step, prompts included")
    workers: int = Field(default=1, gt=0, description="Processes that tokenise")


class SftOptimConfig(OptimConfig):
    lr: float = Field(default=1e-4, gt=0, description="Peak learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="Course of the learning rate after warm-up"
    )
    warmup_ratio: float = Field(
        default=0.05, ge=0, le=1, description="Share of the steps in which the rate rises from 0"
    )


class SftTrainerConfig(Section):
    total_epochs: int = Field(default=1, gt=0, description="Passes over the chats")
    total_steps: int | None = Field(default=None, gt=0, description="Optimizer steps; wins over total_epochs")
    max_seconds: float | None = Field(
        default=None, gt=0, description="Stop after this time; the schedule then follows the clock"
    )
    seed: int = Field(default=0, ge=0, description="Seed of order and adapter init")
    log_freq: int = Field(default=20, gt=0, description="Print a line every N steps")
    out: str = Field(
        default="runs/sft", description="Folder for the result: a full model (lora.rank=0) or a PEFT adapter"
    )


class SftConfig(Section):
    """Config tree of `rllm sft`."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraSettings = Field(default_factory=LoraSettings)
    data: SftDataConfig = Field(default_factory=SftDataConfig)
    optim: SftOptimConfig = Field(default_factory=SftOptimConfig)
    trainer: SftTrainerConfig = Field(default_factory=SftTrainerConfig)


Tokens = tuple[list[int], list[int]]
"""(token ids, mask) of one chat; the mask is 1 on the tokens that are trained."""


def encode_chat(
    tokenizer: Any, messages: Sequence[dict[str, Any]], where: str, tools: Sequence[Any] | None = None
) -> Tokens:
    """Token ids of a chat and a mask that is 1 on each assistant answer and the end-of-turn token after it. `tools` go to the template.
    An answer of weight 0 is only read.

    The spans come from rendering prefixes of the chat, never from searching text. A template that rewrites earlier turns
    (dropping their thinking, say) is an error here, as the model would be trained on text it never sees.
    """

    def render(
        part: Sequence[dict[str, Any]], generation: bool = False, offered: Sequence[Any] | None = tools or None
    ) -> str:
        try:
            return tokenizer.apply_chat_template(part, tools=offered, tokenize=False, add_generation_prompt=generation)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: the chat template cannot render the first {len(part)} messages: {error}"
            ) from error

    _check_markers(tokenizer, messages, where)
    text = render(messages)
    spans: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:i], generation=True)
            through = text if i == len(messages) - 1 else render(messages[: i + 1])
            if not text.startswith(before) or not text.startswith(through):
                raise DataError(
                    f"{where}: the chat template renders the first {i + 1} messages differently once later ones follow; "
                    "split the chat so that each ends with its last assistant message"
                )
            if message.get("weight") != 0:
                spans.append((len(before), len(through)))
    if tools and text == render(messages, offered=None):
        raise DataError(
            f"{where}: field 'tools': the chat template writes no tools; leave them out, or say them in a system message"
        )
    _check_calls(messages, where, text, render)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    mask = [0] * len(ids)
    waiting = iter(spans)
    span = next(waiting, None)
    for t, (start, end) in enumerate(encoded["offset_mapping"]):
        while span is not None and start >= span[1]:
            span = next(waiting, None)
        if span is not None and start >= span[0] and end > start:
            mask[t] = 1
            if ids[t] == tokenizer.eos_token_id:  # what the template adds after the end of turn is not trained
                span = next(waiting, None)
    mask[0] = 0
    return ids, mask


def _check_calls(
    messages: Sequence[dict[str, Any]], where: str, text: str, render: Callable[[Sequence[dict[str, Any]]], str]
) -> None:
    """Calls that leave no trace in the `text` of the chat would not be learned."""
    plain = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
    if plain != list(messages) and text == render(plain):
        raise DataError(
            f"{where}: field 'tool_calls': the chat template writes no tool calls; write them into the content, as the model should"
        )


def _check_markers(tokenizer: Any, messages: Sequence[dict[str, Any]], where: str) -> None:
    """Contents with the text of a chat marker would be read as the marker."""
    for i, message in enumerate(messages):
        found = next((marker for marker in tokenizer.all_special_tokens if marker in message["content"]), None)
        if found:
            raise DataError(
                f"{where}: messages[{i}]: the content has the chat marker {found!r}, which would be read as one; take it out, or break it up"
            )


def _encode_rows(folder: str, rows: Sequence[tuple[str, Any]]) -> list[Tokens]:
    from rllm.backends.local.loading import load_tokenizer

    tokenizer = load_tokenizer(Path(folder))
    return [encode_chat(tokenizer, _messages(row, where), where, _tools(row, where)) for where, row in rows]


def encode_files(files: Sequence[str], folder: Path, workers: int = 1) -> list[Tokens]:
    """Every chat of the files, tokenised; errors name file and line."""
    rows: list[tuple[str, Any]] = []
    for name in files:
        path = Path(name)
        if not path.is_file():
            state = "is no file" if path.exists() else "does not exist"
            raise DataError(f"data.train_files: {name!r} {state}")
        rows += read_jsonl(path)
    if not rows:
        raise DataError(f"data.train_files: no chats in {', '.join(files)}")
    if workers == 1 or len(rows) < PARALLEL_ROWS:
        return _encode_rows(str(folder), rows)
    jobs = [rows[i : i + ROWS_PER_JOB] for i in range(0, len(rows), ROWS_PER_JOB)]
    with ProcessPoolExecutor(workers) as pool:
        return [chat for part in pool.map(_encode_rows, [str(folder)] * len(jobs), jobs) for chat in part]


def _messages(row: Any, where: str) -> list[dict[str, Any]]:
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: field 'messages': found {messages!r}; it must be a list of {{role, content}}")
    for i, message in enumerate(messages):
        if isinstance(message, dict) and message.get("tool_calls") and message.get("content", "") is None:
            messages[i] = message = message | {"content": ""}  # how OpenAI writes a message that only calls
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("content"), str)
            or not isinstance(message.get("role"), str)
        ):
            raise DataError(f"{where}: messages[{i}]: found {message!r}; it must have a role and a text content")
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: messages[{i}]: the content is no valid text: {error}") from error
        if message.get("weight") not in (None, 0, 1):
            raise DataError(
                f"{where}: messages[{i}]: weight={message['weight']!r}; allowed: 0 (only read) | 1 (trained)"
            )
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages):
        raise DataError(f"{where}: no assistant message, or none of weight 1, so nothing to train on")
    if messages[0]["role"] == "assistant":
        raise DataError(
            f"{where}: messages[0]: an assistant message without anything before it; begin with what it answers"
        )
    return messages


def _tools(row: dict[str, Any], where: str) -> list[Any]:
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: field 'tools': found {tools!r}; it must be a list of OpenAI tool definitions")
    return tools or []


def epoch_batches(chats: Sequence[Tokens], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the chats of each optimizer batch of one epoch, in its order: about `batch_tokens` tokens each."""
    order = list(range(len(chats)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    result: list[list[int]] = [[]]
    size = 0
    for i in order:
        if size >= batch_tokens:
            result.append([])
            size = 0
        result[-1].append(i)
        size += len(chats[i][0])
    return result


def batches(chats: Sequence[Tokens], batch_tokens: int, seed: int) -> Iterator[list[Datum]]:
    """Endless optimizer batches of about `batch_tokens` tokens; every epoch is shuffled anew."""
    for epoch in itertools.count():
        for batch in epoch_batches(chats, batch_tokens, seed, epoch):
            rows = [chats[i] for i in batch]
            yield [
                Datum(ids, mask, [float(m) for m in mask], [0.0] * len(ids), adapter=DEFAULT_ADAPTER)
                for ids, mask in rows
            ]


def run_sft(config: SftConfig, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Train as `config` says; writes the model or adapter and `result.json` to ``trainer.out`` and returns the result."""
    from rllm.backends.local.adapters import SaveContext, create_adapter, save_adapter
    from rllm.backends.local.backend import check_quantization, pick_device, pick_dtype
    from rllm.backends.local.learner import Learner
    from rllm.backends.local.loading import load_decoder, load_tokenizer, resolve_model, save_decoder

    if config.data.train_files is None:
        raise ConfigError("data.train_files: not given; name a JSONL file of {'messages': [...]} chats")
    out = Path(config.trainer.out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"trainer.out: {out} is a file; give a folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"trainer.out: {out}: {error.strerror}: {error.filename}; give a folder that can be written"
        ) from error
    started = time.monotonic()
    device = pick_device(config.model.device)
    check_quantization(config.model, bool(config.lora.rank), device)
    folder = resolve_model(config.model.path)
    load_tokenizer(folder)
    files = [config.data.train_files] if isinstance(config.data.train_files, str) else config.data.train_files
    everything = encode_files(files, folder, config.data.workers)
    chats = [chat for chat in everything if len(chat[0]) <= config.data.max_length]
    if not chats:
        raise DataError(f"all {len(everything)} chats are longer than data.max_length={config.data.max_length} tokens")
    model = load_decoder(folder, pick_dtype(config.model.dtype, device), device, config.model.quantization)
    adapters = {DEFAULT_ADAPTER: create_adapter(model, config.lora, config.trainer.seed)} if config.lora.rank else {}
    # On a GPU a step is one micro-batch where memory allows it.
    learner = Learner(model, adapters, config.data.batch_tokens * 2 if device.type == "cuda" else None)
    log(f"{len(chats)} chats ({len(everything) - len(chats)} too long), {sum(len(c[0]) for c in chats)} tokens")
    result = _optimise(config, learner, chats, log)
    result |= {
        "chats": len(chats),
        "too_long": len(everything) - len(chats),
        "seconds": round(time.monotonic() - started, 1),
    }
    if adapters:
        context = SaveContext(
            model, folder, config.model.path, {"step": result["steps"], "metrics": {"nll": result["nll"]}}
        )
        result["peft_logit_gap"] = save_adapter(adapters[DEFAULT_ADAPTER], out, config.lora, context)
    else:
        save_decoder(model, folder, out)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    log(f"saved {'adapter' if adapters else 'model'} to {out}")
    return result


def _optimise(config: SftConfig, learner: Any, chats: Sequence[Tokens], log: Callable[[str], None]) -> dict[str, Any]:
    from dataclasses import replace

    from rllm.backends.base import AdamParams

    o, t = config.optim, config.trainer
    adam = AdamParams(o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip)
    total = t.total_steps or sum(
        len(epoch_batches(chats, config.data.batch_tokens, t.seed, epoch)) for epoch in range(t.total_epochs)
    )
    clock, step, tokens, nll = time.monotonic(), 0, 0, math.nan
    for step, batch in enumerate(batches(chats, config.data.batch_tokens, t.seed)):
        seconds = time.monotonic() - clock
        progress = step / total if t.max_seconds is None else max(step / total, seconds / t.max_seconds)
        if progress >= 1.0:
            break
        metrics = learner.forward_backward(batch, LossSpec("cross_entropy"))
        factor = rate_factor(
            progress,
            1.0,
            schedule=o.schedule,
            warmup=warmup_length(total, o.warmup_steps, o.warmup_ratio) / total,
            min_ratio=o.min_lr_ratio,
        )
        norm = learner.optim_step(replace(adam, lr=o.lr * factor))["grad_norm"]
        nll = metrics["loss"]
        if not math.isfinite(nll) or not math.isfinite(norm):
            raise RunError(f"step {step}: loss {nll}, gradient norm {norm}; lower optim.lr (now {o.lr})")
        tokens += sum(len(datum.ids) for datum in batch)
        if step % t.log_freq == 0:
            rate = tokens / max(time.monotonic() - clock, 1e-9)
            log(f"step {step} of {total}  nll {nll:.4f}  grad {norm:.2f}  {rate:,.0f} tokens/s")
    return {"steps": step, "nll": nll, "tokens": tokens}
