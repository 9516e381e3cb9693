"""What lies around the weights of a merged model: configs and tokenizer copied, code never unnoticed, other people's files left alone.

Knows file names; nothing of tensors.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, ModelError
from rllm.lora.checkpoint import INDEX

MANIFEST = "rllm_merge.json"
# Weights in any format and their indexes: what the merged model has of its own, or must not have twice.
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".ckpt",
    ".onnx",
    ".npz",
)
_NOT_COPIED = ("config.json", "README.md", MANIFEST, INDEX, "pytorch_model.bin.index.json")
_FOLDERS = ("additional_chat_templates",)
# What makes up a tokenizer; one that the adapter brings along is the one it was trained with, and replaces the base's as a whole.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_target(out: Path, sources: Sequence[Path], overwrite: bool) -> None:
    """Refuse an `out` that is a file, one of the `sources`, or not empty; with `overwrite` an earlier merge may be there."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"--out {out}: is a {'link' if out.is_symlink() else 'file'}; give a new folder")
    for source in sources:
        if out.exists() and out.resolve() == source.resolve():
            raise ConfigError(f"--out {out}: is what is merged; give a new folder")
    found = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if not found:
        return
    if not overwrite:
        raise ConfigError(
            f"--out {out}: holds {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}; give a new folder, or --overwrite to "
            "replace an earlier merge"
        )
    ours = {Path(name).parts[0] for name in _earlier_files(out)}
    copied = {path.name for source in sources for path in source.iterdir()}
    foreign = [
        name
        for name in found
        if name not in ours and (name.endswith(_WEIGHT_SUFFIXES) or name in _NOT_COPIED or name in copied)
    ]
    if foreign:
        raise ConfigError(
            f"--out {out}: {', '.join(foreign)} comes from no earlier merge; --overwrite replaces only what a merge wrote, so move it "
            "away or give a new folder"
        )


def _earlier_files(folder: Path) -> list[str]:
    """What an earlier merge says it wrote into `folder`; nothing where there was none."""
    file = folder / MANIFEST
    if not file.is_file():
        return []
    try:
        names = json.loads(file.read_text())["files"]
        if not all(
            isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts for name in names
        ):
            raise ValueError("names outside the folder")
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} cannot be read ({error!r}); give a new folder") from error
    return names


def refuse_unnoticed_code(base: Path, config: Mapping[str, Any], trusted: bool) -> None:
    """A base that brings Python code with it would have it run by whoever loads the merged model."""
    code = sorted(file.name for file in base.glob("*.py"))
    if trusted or not (code or config.get("auto_map")):
        return
    raise ModelError(
        f"base: {base} comes with its own code ({', '.join(code) or 'auto_map in config.json'}), which runs when the model is loaded; "
        "read it, then say --trust-remote-code"
    )


def copy_side_files(base: Path, adapter: Path, out: Path, trusted: bool) -> list[str]:
    """Copy all that is no weight; the config is the caller's. Returns notes."""
    notes: list[str] = []
    own_tokenizer = (adapter / "tokenizer_config.json").is_file() and any(
        (adapter / name).is_file() for name in _VOCABULARIES
    )
    for file in sorted(base.iterdir()):
        name = file.name
        if not file.is_file() or name.startswith(".") or name in _NOT_COPIED or name.endswith(_WEIGHT_SUFFIXES):
            continue
        if (name.endswith(".py") and not trusted) or (own_tokenizer and name in _TOKENIZER):
            continue
        shutil.copyfile(file, out / name)
    for name in _FOLDERS:
        if (base / name).is_dir():
            shutil.copytree(base / name, out / name)
    if own_tokenizer:
        for name in _TOKENIZER:
            if (adapter / name).is_file():
                shutil.copyfile(adapter / name, out / name)
        if _differ(base, adapter):
            notes.append("the tokenizer is the adapter's, which differs from the base's")
    return notes


def _differ(base: Path, adapter: Path) -> bool:
    pairs = [(base / name, adapter / name) for name in _TOKENIZER]
    return any(a.is_file() != b.is_file() or (a.is_file() and not filecmp.cmp(a, b, shallow=False)) for a, b in pairs)


def move_into(staging: Path, out: Path) -> None:
    """Make `staging` the folder `out`. Into an earlier merge file by file, where its config goes first and the new one comes last: cut
    short, the folder is no model; what no merge wrote stays."""
    if out.exists() and not any(out.iterdir()):
        out.rmdir()
    if not out.exists():
        staging.rename(out)
        return
    new = [file.relative_to(staging) for file in staging.rglob("*") if file.is_file()]
    foreign = [str(name) for name in new if (out / name).exists() and str(name) not in _earlier_files(out)]
    if foreign:
        raise ConfigError(
            f"--out {out}: {', '.join(foreign)} comes from no earlier merge, and would be replaced; move it away"
        )
    old = _earlier_files(out)
    (out / "config.json").unlink(missing_ok=True)
    for name in {*old} - {str(name) for name in new}:
        (out / name).unlink(missing_ok=True)
    for name in sorted(new, key=lambda name: str(name) == "config.json"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(out / name)
