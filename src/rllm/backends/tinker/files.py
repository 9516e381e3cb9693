"""Files of a run that trains on a server: a pointer to the state it keeps, and adapters downloaded from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import torch

from rllm.backends.tinker.connection import Connection
from rllm.errors import ModelError
from rllm.lora.files import CARD, CONFIG, WEIGHTS, model_card, read_adapter
from rllm.types import new_id
from rllm.version import __version__

POINTER = "tinker.json"
FORMAT = 1
EXPORT_TTL_S = 3600
DOWNLOAD_S = 120.0


@dataclass(frozen=True)
class Pointer:
    """Where a server keeps the state of a run: the path of each adapter's."""

    trained: dict[str, Any]
    server: str
    policy_version: int
    paths: dict[str, str]
    format: int = FORMAT


def write_pointer(path: Path, trained: dict[str, Any], server: str, policy_version: int, paths: dict[str, str]) -> None:
    """Appears complete or not at all."""
    path.mkdir(parents=True, exist_ok=True)
    partial = path / (POINTER + ".partial")
    pointer = Pointer(trained, server, policy_version, paths)
    partial.write_text(json.dumps(asdict(pointer), indent=2) + "\n", encoding="utf-8")
    partial.replace(path / POINTER)


def read_pointer(path: Path, trained: Mapping[str, Any]) -> Pointer:
    """The pointer in a folder, if it fits `trained`. Raises `ModelError`."""
    try:
        pointer = Pointer(**json.loads((path / POINTER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{path / POINTER} cannot be read: {error}; a state of another backend goes on with that backend only"
        ) from error
    if pointer.format != FORMAT:
        raise ModelError(f"{path / POINTER}: of form {pointer.format}, this rllm reads form {FORMAT}")
    for name, now in trained.items():
        if (then := pointer.trained.get(name)) != now:
            raise ModelError(
                f"{path}: saved with {name}={then}, this config has {now}; a state goes on only as it was begun"
            )
    return pointer


def download(
    connection: Connection, client: Any, folder: Path, model_name: str, version: int, facts: Mapping[str, Any]
) -> None:
    """The adapter of a run as it is now, as a PEFT folder. It appears after its files were read back, or not at all."""
    saved = connection.wait(
        client.save_weights_external(f"export-{version:06d}-{new_id()[:8]}", ttl_seconds=EXPORT_TTL_S), "exporting"
    )
    server = connection.server
    rest = connection.sdk.RestClient(base_url=server.url, api_key=server.key)
    urls: dict[str, str] = connection.wait(rest.get_external_weights_urls(saved.path), "exporting").urls
    staging = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    with httpx.Client(timeout=DOWNLOAD_S, follow_redirects=True) as http:
        for name, url in urls.items():
            _fetch(http, url, staging, name)
    check(staging, folder)
    (staging / CARD).write_text(_card(model_name, server.url, facts))
    if folder.is_dir():
        for file in staging.iterdir():
            file.replace(folder / file.name)
        staging.rmdir()
    else:
        staging.rename(folder)


def _fetch(http: httpx.Client, url: str, folder: Path, name: str) -> None:
    target = folder / Path(unquote(name)).name
    try:
        with http.stream("GET", url) as answer:
            answer.raise_for_status()
            with target.open("wb") as file:
                for part in answer.iter_bytes():
                    file.write(part)
    except httpx.HTTPError as error:
        raise ModelError(f"adapter not saved: {name} cannot be downloaded: {error}") from error


def check(staging: Path, folder: Path) -> None:
    """Raise `ModelError` unless a folder is an adapter that can be used."""
    if not (staging / CONFIG).is_file() or not (staging / WEIGHTS).is_file():
        found = ", ".join(sorted(file.name for file in staging.iterdir())) or "nothing"
        raise ModelError(f"adapter not saved to {folder}: the server gave {found}; expected {CONFIG} and {WEIGHTS}")
    _, matrices = read_adapter(staging)
    if odd := [n for n, (a, b, _) in matrices.items() if not (torch.isfinite(a).all() and torch.isfinite(b).all())]:
        raise ModelError(f"adapter not saved to {folder}: {odd[0]} holds values that are not finite")


def _card(model_name: str, server: str, facts: Mapping[str, Any]) -> str:
    rows = {"base": model_name, "trained by": server} | {k: v for k, v in facts.items() if not isinstance(v, Mapping)}
    rows["versions"] = f"rllm {__version__}"
    return model_card(model_name, "LoRA adapter trained with rllm through Tinker's API", rows, facts)
