"""An adapter merged into its base: a full model folder that transformers loads, made from files, a shard at a time.

Knows PEFT folders and checkpoint files, for any architecture whose adapted weights are linear layers; nothing of the decoder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rllm.errors import ConfigError, ModelError
from rllm.lora.checkpoint import fingerprint, plan_shards, read_places, write_index
from rllm.lora.files import adapter_folders, read_adapter, recorded_base
from rllm.lora.merge_check import LogitCheck, check_logits, check_tensors
from rllm.lora.merge_files import MANIFEST, check_target, copy_side_files, move_into, refuse_unnoticed_code
from rllm.lora.merge_plan import Source, Update, merged_weight, plan, read_tensor
from rllm.version import __version__

# Above this share the numbers lost to rounding are no longer small beside what the adapter adds.
ROUNDING_NOTE = 0.1


@dataclass(frozen=True)
class MergeOptions:
    """`dtype` None keeps each tensor's own. `overwrite` replaces an earlier merge. `trust_remote_code`: the base's own Python files may
    be run to check the result, and are copied."""

    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5 * 10**9
    overwrite: bool = False
    trust_remote_code: bool = False


@dataclass
class Merged:
    """What was done. `rounding`: root mean square of what rounding to the output's dtype changed, over that of the update. `logits`:
    None where the model does not fit in memory, and only the tensors were checked."""

    matrices: int
    shards: int
    bytes: int
    notes: list[str]
    rounding: float = 0.0
    logits: LogitCheck | None = None


def find_adapter(path: Path) -> Path:
    """The one adapter folder at `path`: itself, or the only one in it. Several, as with one adapter a role, are named."""
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder; give the adapter folder of a run, or one that PEFT saved")
    with _named_as_given():
        folders = adapter_folders(path)
    if len(folders) > 1:
        raise ConfigError(
            f"{path} holds {len(folders)} adapters: {', '.join(folders)}; a model takes one, say which: {next(iter(folders.values()))}"
        )
    return next(iter(folders.values()))


def base_of(adapter: Path, default: Path) -> str:
    """The base that an adapter names. `default` is our own model: it stands in where it is named, or where the path that is named is
    gone and the recorded fingerprint is that of `default` (it was saved on another machine)."""
    name, recorded = recorded_base(adapter)
    if not name:
        raise ModelError(f"{adapter} does not say which base it was trained on; name it with --base")
    if name == "default" or (recorded and not Path(name).exists() and recorded == fingerprint(default)):
        return "default"
    return name


def merge_adapter(adapter: Path, base: Path, out: Path, options: MergeOptions | None = None) -> Merged:
    """Write the model of folder `base` with the update ``scale * B A`` of folder `adapter` added to its weights to `out`.

    The sum is computed in float32 and rounded once. Written beside `out`, checked there (every tensor against float64, and the logits
    against PEFT's where the model fits in memory), then moved into place: `out` is a whole, checked model or untouched.
    """
    options = options or MergeOptions()
    with _named_as_given():
        _, matrices = read_adapter(adapter)
    check_target(out, (base, adapter), options.overwrite)
    places = read_places(base, "base")
    _check_base(adapter, base)
    config = _read_config(base)
    refuse_unnoticed_code(base, config, options.trust_remote_code)
    ties, turned = _model_facts(base, matrices, options.trust_remote_code)
    # ``(B A)^T = A^T B^T``: what is added to a weight that is kept as [in, out].
    matrices = {name: (b.t(), a.t(), s) if name in turned else (a, b, s) for name, (a, b, s) in matrices.items()}
    sources, untied = plan(places, matrices, ties, options.dtype)
    shards = plan_shards({name: source.nbytes() for name, source in sources.items()}, options.max_shard_bytes)
    result = Merged(
        len(matrices), len(shards), sum(source.nbytes() for source in sources.values()), _notes(matrices, untied)
    )
    _check_disk(out, result.bytes)
    with _staging(out) as staging:
        result.rounding = _write_shards(staging, shards, sources)
        write_index(staging, shards, result.bytes, sum(source.place.numel for source in sources.values()))
        _write_config(staging, config, options.dtype, untied)
        result.notes += copy_side_files(base, adapter, staging, options.trust_remote_code)
        check_tensors(staging, shards, sources)
        result.logits = check_logits(adapter, base, staging, options.trust_remote_code)
        if result.rounding > ROUNDING_NOTE:
            result.notes.append(
                f"rounding to the output's dtype changed the weights by {result.rounding:.0%} of what the adapter adds; "
                "--dtype float32 keeps all of it"
            )
        _write_card(staging, adapter, base, result)
        move_into(staging, out)
    return result


def _write_shards(folder: Path, shards: Mapping[str, list[str]], sources: Mapping[str, Source]) -> float:
    """Write every shard, holding one at a time; returns the share of the update that rounding changed (see `Merged`)."""
    lost = total = 0.0
    for file, names in shards.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            source = sources[name]
            weight = read_tensor(source)
            dtype = source.dtype or weight.dtype
            exact = weight if source.update is None else merged_weight(weight, source.update)
            rounded = exact.to(dtype)
            if rounded.is_floating_point() and not torch.isfinite(rounded.float()).all():
                cause = f"does not fit {dtype}" if torch.isfinite(exact.float()).all() else "is not finite in the base"
                raise ModelError(f"not merged: {name} {cause}")
            if source.update is not None:
                lost += float((rounded.float() - exact).double().square().sum())
                total += float((exact - weight.float()).double().square().sum())
            tensors[name] = rounded.contiguous()
        save_file(tensors, folder / file, metadata={"format": "pt"})
    return (lost / total) ** 0.5 if total else 0.0


def _check_base(adapter: Path, base: Path) -> None:
    """A base other than the recorded one would give a model that no one trained."""
    name, recorded = recorded_base(adapter)
    if recorded is None:
        return
    found = fingerprint(base, "base")
    if found != recorded:
        raise ModelError(
            f"{adapter} was trained on {name} with base fingerprint {recorded}; {base} has {found}, so it holds other weights. "
            "Give the base it was trained on with --base"
        )


def _read_config(base: Path) -> dict[str, Any]:
    try:
        config = json.loads((base / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"base: {base / 'config.json'} cannot be read: {error}") from error
    if config.get("quantization_config"):
        kind = config["quantization_config"].get("quant_method", "an unknown method")
        raise ModelError(f"base: {base} is quantised ({kind}); merge into the unquantised checkpoint it was made from")
    return config


def _model_facts(
    base: Path, modules: Mapping[str, Any], trust_remote_code: bool
) -> tuple[Mapping[str, str], frozenset[str]]:
    """(tied weights of the model: name -> the one it shares, adapted modules that keep their weight as [in, out]); it is built without
    memory to see that the adapted modules are linear layers of it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # the loaders raise many kinds
        raise ModelError(f"base: transformers makes no causal language model of {base}: {error}") from error
    turned = set()
    for name in modules:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise ModelError(
                f"base: {type(model).__name__} has no module {name!r}; is it an adapter of another base?"
            ) from None
        if isinstance(module, Conv1D):
            turned.add(name)
        elif not isinstance(module, torch.nn.Linear):
            raise ModelError(f"base: {name} is a {type(module).__name__}; only adapters of linear layers are merged")
    return dict(getattr(model, "all_tied_weights_keys", None) or {}), frozenset(turned)


def _write_config(folder: Path, config: Mapping[str, Any], dtype: torch.dtype | None, untied: bool) -> None:
    content = dict(config)
    if dtype is not None:
        content.pop("torch_dtype", None)
        content["dtype"] = str(dtype).removeprefix("torch.")
    if untied:
        content["tie_word_embeddings"] = False
        if isinstance(content.get("text_config"), dict):
            content["text_config"] = content["text_config"] | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def _notes(matrices: Mapping[str, Update], untied: bool) -> list[str]:
    notes = []
    if not any(bool(b.any()) and bool(a.any()) for a, b, _ in matrices.values()):
        notes.append("the adapter changes nothing (all its B or A are 0): the result is the base")
    if untied:
        notes.append("the output head was tied to the embeddings and is a matrix of its own now: it alone was adapted")
    return notes


def _write_card(folder: Path, adapter: Path, base: Path, result: Merged) -> None:
    """What the folder is, for people; and for `--overwrite`, which files are ours."""
    name, _ = recorded_base(adapter)
    how = "every tensor against float64"
    if result.logits is not None:
        how += f"; logits within {result.logits.gap:.1e} of PEFT's (allowed {result.logits.tolerance:.1e})"
    lines = [
        f"- base: {name or base.name}",
        f"- base fingerprint: {fingerprint(base, 'base')}",
        f"- adapted matrices: {result.matrices}",
        f"- checked: {how}",
        f"- made with: rllm {__version__}",
        *(f"- note: {note}" for note in result.notes),
    ]
    head = f"---\nlibrary_name: transformers\nbase_model: {name or base.name}\n---\n\n# A LoRA adapter merged into its base\n\n"
    (folder / "README.md").write_text(head + "\n".join(lines) + "\n")
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    (folder / MANIFEST).write_text(json.dumps({"files": [*files, MANIFEST]}, indent=2) + "\n")


def _check_disk(out: Path, size: int) -> None:
    place = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        raise ModelError(
            f"--out {out}: the merged model takes {size / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free"
        )


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A new folder beside `out`; gone at the end, however it ends."""
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        staging = out.absolute().with_name(f".{out.name}.merging-{os.getpid()}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    except OSError as error:
        raise ModelError(f"--out {out}: cannot write there ({error.strerror})") from error
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _named_as_given() -> Iterator[None]:
    """Errors of the adapter's reader without the config key that leads to it in a run."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).removeprefix("lora.adapter_path: ")) from error


def describe(result: Merged, out: Path, say: Callable[[str], None]) -> None:
    """Say what was done and how it was checked."""
    for note in result.notes:
        say(f"note: {note}")
    if result.logits is None:
        say("checked tensor by tensor against float64; the model does not fit in memory to compare logits")
    else:
        say(
            f"checked tensor by tensor against float64, and reloaded: logits within {result.logits.gap:.1e} of PEFT's (allowed "
            f"{result.logits.tolerance:.1e}); the adapter moves them by up to {result.logits.change:.1e}"
        )
    say(f"merged {result.matrices} matrices: {out} ({result.bytes / 1e9:.3g} GB, files of weights: {result.shards})")
