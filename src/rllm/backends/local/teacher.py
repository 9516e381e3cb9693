"""The teacher of on-policy distillation as a model of this process: the student's own base, with an adapter or none, or another model.

Knows folders and decoders; nothing of training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rllm.backends.local.adapters import create_adapter
from rllm.backends.local.language_model import LanguageModel, LowRank
from rllm.backends.local.learner import Policy
from rllm.backends.local.loading import end_of_turn_ids, load_model, read_config, resolve_model, wanted_length
from rllm.config.schema import Config
from rllm.errors import ConfigError, ModelError
from rllm.lora.files import adapter_folders, adapter_settings


def load_teacher(config: Config, folder: Path, tokenizer: Any, model: LanguageModel) -> Policy | None:
    """What ``distill.teacher`` and ``distill.adapter`` name, or None. `folder`, `tokenizer` and `model` are the student's.

    The teacher's weights are the student's own tensors where both are one folder and the student trains adapters; otherwise they are
    loaded beside them, in the same dtype and on the same device. Raises `ModelError` where the teacher cannot be read or reads other
    tokens than the student, `ConfigError` where its longest text is shorter.
    """
    d = config.distill
    if not d.local:
        return None
    theirs = folder if d.teacher is None else resolve_model(d.teacher, "distill.teacher")
    same = theirs.resolve() == folder.resolve()
    if not same:
        with _named("model.path", "distill.teacher"):
            read_config(theirs)
        _check_tokenizer(theirs, folder, tokenizer)
    with _named("model.path", "distill.teacher"):
        # Full fine-tuning changes the weights that the teacher is to keep.
        shared = same and bool(config.lora.adapters())
        decoder = model if shared else load_model(theirs, model.dtype, model.device, longest=wanted_length(config))
    if len(tokenizer) > decoder.config.vocab_size:
        raise ModelError(
            f"distill.teacher: {theirs} has {decoder.config.vocab_size} tokens, the student's tokenizer {len(tokenizer)}"
        )
    return decoder, _adapter(d.adapter, decoder) if d.adapter else None


def check_length(teacher: Policy, longest: int) -> None:
    """Raise a `ConfigError` if the student may write longer texts than the teacher can read."""
    c = teacher[0].config
    able = min(c.max_position, c.attention_window or c.max_position)
    if longest > able:
        raise ConfigError(
            f"distill.teacher: it reads at most {able} tokens, a row may have {longest} (model.max_model_len, or data.max_prompt_length + "
            f"data.max_response_length); set model.max_model_len={able}"
        )


def _adapter(path: str, decoder: LanguageModel) -> LowRank:
    with _named("lora.adapter_path", "distill.adapter"):
        folders = adapter_folders(Path(path).expanduser())
        if len(folders) > 1:
            raise ModelError(
                f"distill.adapter: {path} holds an adapter for each role ({', '.join(folders)}); name the folder of one of them"
            )
        settings = adapter_settings(next(iter(folders.values())))
        return create_adapter(decoder, settings, seed=0).snapshot(decoder.dtype)


def _check_tokenizer(theirs: Path, folder: Path, tokenizer: Any) -> None:
    """The teacher must mean the same by every token id."""
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(theirs)
    except Exception as error:  # as in `load_tokenizer`, but that a teacher needs no chat template
        why = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"distill.teacher: the tokenizer of {theirs} cannot be read: {type(error).__name__}: {why}"
        ) from error
    ours, others = ({i: token for token, i in t.get_vocab().items()} for t in (tokenizer, other))
    for i in sorted(ours.keys() | others.keys()):
        if ours.get(i) != others.get(i):
            raise ModelError(
                f"distill.teacher: {theirs} has another tokenizer than model.path: token {i} is {_told(others.get(i))} there and "
                f"{_told(ours.get(i))} here; the teacher must share the student's tokenizer"
            )
    if other.eos_token_id is None:
        return
    ends, other_ends = end_of_turn_ids(folder, tokenizer), end_of_turn_ids(theirs, other)
    if not set(ends) & set(other_ends):
        raise ModelError(
            f"distill.teacher: {theirs} ends a turn with token {', '.join(_named_ids(other, other_ends))}, model.path with "
            f"{', '.join(_named_ids(tokenizer, ends))}: it would teach never to end one; the two must share an end-of-turn token"
        )


def _named_ids(tokenizer: Any, ids: tuple[int, ...]) -> list[str]:
    return [f"{i} ({tokenizer.convert_ids_to_tokens(i)})" for i in ids]


def _told(token: str | None) -> str:
    return "missing" if token is None else repr(token)


@contextlib.contextmanager
def _named(key: str, instead: str) -> Iterator[None]:
    """Errors about what was read under the key of the student say which key of the teacher is meant."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).replace(key, instead)) from error
