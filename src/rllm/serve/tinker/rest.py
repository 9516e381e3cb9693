"""The HTTP side of Tinker's API, second part: what the REST client lists, shows, changes and downloads.

Knows HTTP and shapes of replies.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import secrets
import tarfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response

from rllm.serve.tinker import bodies
from rllm.serve.tinker.errors import ApiError
from rllm.serve.tinker.routes import PREFIX, Handler, answering, json_body, reply
from rllm.serve.tinker.service import TinkerService
from rllm.serve.tinker.store import KINDS, SCHEME, Checkpoint

LINK_S = 3600
MOST_LISTED = 1000
ARCHIVE = "archive.tar"


class RestRoutes:
    """`links` are signed: who has one may read that file without a key until it expires."""

    def __init__(self, service: TinkerService):
        self.service, self.store = service, service.store
        self._secret = secrets.token_bytes(32)

    async def health(self, request: Request) -> Response:
        return reply({"status": "ok"})

    async def capabilities(self, request: Request) -> Response:
        model = {
            "model_name": self.service.name,
            "max_context_length": self.service.backend.max_model_len,
            "trainable": True,
            "sampleable": True,
        }
        return reply({"supported_models": [model]})

    async def training_runs(self, request: Request) -> Response:
        limit, offset = _page(request, 20)
        runs, total = self.store.runs(limit, offset)
        return reply(
            {
                "training_runs": [self._run(run) for run in runs],
                "cursor": {"offset": offset, "limit": limit, "total_count": total},
            }
        )

    async def training_run(self, request: Request) -> Response:
        return reply(self._run(self._known_run(request)))

    async def run_checkpoints(self, request: Request) -> Response:
        run = self._known_run(request)
        return reply({"checkpoints": [_checkpoint(found) for found in self.store.checkpoints(run["id"])[0]]})

    async def checkpoints(self, request: Request) -> Response:
        limit, offset = _page(request, 100)
        found, total = self.store.checkpoints(None, limit, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return reply({"checkpoints": [_checkpoint(one) for one in found], "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        await self.service.delete(_path(request))
        return Response(status_code=204)

    async def publish(self, request: Request) -> Response:
        self.store.change(_path(request), public=request.method == "POST")
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        ttl = bodies.read(bodies.TtlBody, await json_body(request)).ttl_seconds
        self.store.change(_path(request), expires=None if ttl is None else time.time() + ttl)
        return Response(status_code=204)

    async def weights_info(self, request: Request) -> Response:
        found = self.store.get(bodies.read(bodies.TinkerPath, await json_body(request)).tinker_path)
        about = found.about
        return reply(
            {
                "base_model": about["base"],
                "is_lora": True,
                "lora_rank": about["rank"],
                "lora_alpha": about["alpha"],
                **{key: about[key] for key in ("train_unembed", "train_mlp", "train_attn")},
            }
        )

    async def sessions(self, request: Request) -> Response:
        return reply({"sessions": self.store.sessions(*_page(request, 20))})

    async def session(self, request: Request) -> Response:
        found = self._known_session(request)
        runs, samplers = self.store.of_session(found["id"])
        return reply(
            {
                "training_run_ids": runs,
                "sampler_ids": samplers,
                "user_metadata": _texts(found.get("user_metadata")),
                "display_name": found.get("display_name"),
            }
        )

    async def sampler(self, request: Request) -> Response:
        sampler = request.path_params["sampler"]
        found = self.store.sampler(sampler)
        if found is None:
            raise ApiError(f"there is no sampling session {sampler[:200]!r}", 404)
        told = {"sampler_id": sampler, "base_model": self.service.name}
        return reply(told if found[1] is None else {**told, "model_path": found[1]})

    async def file_links(self, request: Request) -> Response:
        """A link for each file of a PEFT folder."""
        found, expires = self.store.get(_path(request)), int(time.time()) + LINK_S
        urls = {file.name: self._link(request, found, file.name, expires) for file in sorted(found.folder.iterdir())}
        return reply({"urls": urls, "expires": _time(expires)})

    async def archive(self, request: Request) -> Response:
        """A link to all files as one tar, the way SDK <= 0.24 asks for it: in a redirect."""
        found, expires = self.store.get(_path(request)), int(time.time()) + LINK_S
        when = datetime.fromtimestamp(expires, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"location": self._link(request, found, ARCHIVE, expires), "expires": when}
        return Response(status_code=302, headers=headers)

    async def download(self, request: Request) -> Response:
        where = request.path_params
        path = f"{SCHEME}{where['run']}/{where['kind']}/{where['name']}"
        expires, given = request.query_params.get("expires", ""), request.query_params.get("signature", "")
        if not hmac.compare_digest(self._sign(path, where["file"], expires).encode(), given.encode()):
            raise ApiError("this link is not valid here; ask for a new one", 403)
        if not expires.isdecimal() or int(expires) < time.time():
            raise ApiError("this link has expired; ask for a new one", 403)
        folder = self.store.get(path).folder
        if where["file"] == ARCHIVE:
            return Response(_tar(folder), media_type="application/x-tar")
        file = next((file for file in folder.iterdir() if file.name == where["file"]), None)
        if file is None:
            raise ApiError(f"{path} has no file {where['file']!r}", 404)
        return FileResponse(file)

    def _link(self, request: Request, found: Checkpoint, file: str, expires: int) -> str:
        signature = self._sign(found.path, file, str(expires))
        return f"{request.base_url}api/v1/files/{found.path.removeprefix(SCHEME)}/{file}?expires={expires}&signature={signature}"

    def _sign(self, path: str, file: str, expires: str) -> str:
        return hmac.new(self._secret, f"{path}\n{file}\n{expires}".encode(), hashlib.sha256).hexdigest()

    def _known_run(self, request: Request) -> dict[str, Any]:
        run = self.store.run(request.path_params["run"])
        if run is None:
            raise ApiError(f"there is no training run {request.path_params['run'][:200]!r}", 404)
        return run

    def _known_session(self, request: Request) -> dict[str, Any]:
        session = self.store.session(request.path_params["session"])
        if session is None:
            raise ApiError(f"there is no session {request.path_params['session'][:200]!r}", 404)
        return session

    def _run(self, run: dict[str, Any]) -> dict[str, Any]:
        saved = self.store.checkpoints(run["id"])[0]
        last = {kind: next((one for one in reversed(saved) if one.kind == kind), None) for kind in KINDS}
        told = {
            "training_run_id": run["id"],
            "base_model": run["base"],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run["rank"],
            "corrupted": False,
            "last_request_time": _time(run["seen"]),
            "user_metadata": _texts(run.get("user_metadata")),
        }
        for key, kind in (("last_checkpoint", "weights"), ("last_sampler_checkpoint", "sampler_weights")):
            if (one := last[kind]) is not None:
                told[key] = _checkpoint(one)
        return told


def add_rest_routes(app: FastAPI, service: TinkerService) -> None:
    """Tinker's listing routes."""
    routes = RestRoutes(service)
    one = "/training_runs/{run}/checkpoints/{kind}/{name}"
    table: list[tuple[str, str, Handler]] = [
        ("GET", "/healthz", routes.health),
        ("GET", "/get_server_capabilities", routes.capabilities),
        ("GET", "/training_runs", routes.training_runs),
        ("GET", "/training_runs/{run}", routes.training_run),
        ("GET", "/training_runs/{run}/checkpoints", routes.run_checkpoints),
        ("GET", "/checkpoints", routes.checkpoints),
        ("DELETE", one, routes.delete_checkpoint),
        ("POST", f"{one}/publish", routes.publish),
        ("DELETE", f"{one}/publish", routes.publish),
        ("PUT", f"{one}/ttl", routes.set_ttl),
        ("GET", f"{one}/external_weights_urls", routes.file_links),
        ("GET", f"{one}/archive", routes.archive),
        ("GET", "/files/{run}/{kind}/{name}/{file}", routes.download),
        ("POST", "/weights_info", routes.weights_info),
        ("GET", "/sessions", routes.sessions),
        ("GET", "/sessions/{session}", routes.session),
        ("GET", "/samplers/{sampler}", routes.sampler),
    ]
    for method, path, handler in table:
        app.add_route(PREFIX + path, answering(handler), methods=[method])


def _path(request: Request) -> str:
    where = request.path_params
    return f"{SCHEME}{where['run']}/{where['kind']}/{where['name']}"


def _page(request: Request, usual: int) -> tuple[int, int]:
    """(limit, offset) of a listing."""
    values = []
    for name, default in (("limit", usual), ("offset", 0)):
        text = request.query_params.get(name, str(default))
        if not text.isascii() or not text.isdecimal() or len(text) > 12:
            raise ApiError(f"{name}: {text[:100]!r}; expected a whole number, 0 or more")
        values.append(int(text))
    return min(values[0], MOST_LISTED), values[1]


def _checkpoint(found: Checkpoint) -> dict[str, Any]:
    told = {
        "checkpoint_id": f"{found.kind}/{found.name}",
        "checkpoint_type": KINDS[found.kind],
        "time": _time(found.created),
        "tinker_path": found.path,
        "size_bytes": found.bytes,
        "public": found.public,
    }
    if found.about.get("user_metadata"):
        told["user_metadata"] = found.about["user_metadata"]
    return told if found.expires is None else {**told, "expires_at": _time(found.expires)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Clients read metadata as text."""
    return (
        None
        if metadata is None
        else {str(key): value if isinstance(value, str) else str(value) for key, value in metadata.items()}
    )


def _tar(folder: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, arcname=file.name)
    return buffer.getvalue()
