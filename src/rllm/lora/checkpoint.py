"""Model folders in Hugging Face's layout, as files: which tensor lies where, how it is read, and how new shards are named and indexed.

Knows the format; nothing of what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rllm.errors import ConfigError, ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# The fingerprint reads this many pieces of so many bytes of every tensor: little enough to take no time, spread over all of it.
FINGERPRINT_PIECES, FINGERPRINT_PIECE_BYTES = 16, 256
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of a checkpoint: its file, dtype (safetensors' name: F32, BF16, ...), shape, and bytes [start, end) in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def weight_files(folder: Path, key: str = "model.path") -> list[Path]:
    """The safetensors files that transformers would load from `folder`; `key` is what an error says was wrong."""
    index = folder / INDEX
    single = folder / SINGLE
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{key}: {index} cannot be read ({error!r}); the file may be incomplete") from error
    else:
        files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{key}: {folder} has no model.safetensors; save the model with save_pretrained()")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{key}: {file} is named in {index.name} and missing")
    return files


def read_places(folder: Path, key: str = "model.path") -> dict[str, TensorPlace]:
    """Where every tensor of the checkpoint is, by name, in the order of the files."""
    places: dict[str, TensorPlace] = {}
    for file in weight_files(folder, key):
        for name, place in _file_places(file, key).items():
            if name in places:
                raise ModelError(f"{key}: {name} is in {places[name].file.name} and in {file.name}")
            places[name] = place
    return places


def _file_places(file: Path, key: str) -> dict[str, TensorPlace]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        begin = 8 + length
        places = {
            name: TensorPlace(
                file, value["dtype"], tuple(value["shape"]), *(begin + offset for offset in value["data_offsets"])
            )
            for name, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        }
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{key}: {file} cannot be read ({error}); the file may be incomplete") from error
    end = max((place.end for place in places.values()), default=begin)
    if end > size:
        raise ModelError(f"{key}: {file} cannot be read ({size} bytes of {end}); the file is incomplete")
    return places


def fingerprint(folder: Path, key: str = "model.path") -> str:
    """16 hex digits for the weights of a model folder, the same however they are sharded.

    Names, dtypes and shapes count whole, of the values 4 KiB a tensor, evenly spread: any training of a matrix shows.
    """
    digest = hashlib.blake2b(digest_size=8)
    places = read_places(folder, key)
    streams = {file: file.open("rb") for file in {place.file for place in places.values()}}
    try:
        for name in sorted(places):
            place = places[name]
            digest.update(f"{name} {place.dtype} {place.shape}\n".encode())
            room = max(0, place.end - place.start - FINGERPRINT_PIECE_BYTES)
            for offset in sorted({room * i // (FINGERPRINT_PIECES - 1) for i in range(FINGERPRINT_PIECES)}):
                streams[place.file].seek(place.start + offset)
                digest.update(streams[place.file].read(min(FINGERPRINT_PIECE_BYTES, place.end - place.start - offset)))
    finally:
        for stream in streams.values():
            stream.close()
    return digest.hexdigest()


def plan_shards(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """File name -> tensors in it, for tensors of `sizes` bytes: in order, a new file where `limit` bytes would be passed."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def write_index(folder: Path, shards: Mapping[str, Sequence[str]], total_bytes: int, parameters: int) -> None:
    """The index of several shards; one file needs none."""
    if list(shards) == [SINGLE]:
        return
    weight_map = {name: file for file, names in shards.items() for name in names}
    content = {
        "metadata": {"total_parameters": parameters, "total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def parse_size(text: str, key: str) -> int:
    """Bytes of ``5GB`` (10^9, as transformers counts), ``512MiB`` (2^20) or a bare number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ConfigError(f"{key} {text!r}: expected a size such as 5GB, 500MB or 2GiB")
    return int(float(found[1]) * unit)
