"""The HTTP side of Tinker's API: every route under /api/v1 that the SDK's clients call, one method each.

Knows HTTP and shapes of replies; what is done is `service.py`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rllm.errors import ModelError
from rllm.gateway.messages import strict_json
from rllm.serve.tinker import bodies
from rllm.serve.tinker.errors import ApiError
from rllm.serve.tinker.extension import about
from rllm.serve.tinker.futures import Failure, PendingResult
from rllm.serve.tinker.service import TinkerService
from rllm.serve.tinker.wire import TrainRequest, train_request_of_json, train_request_of_proto

logger = logging.getLogger(__name__)
PREFIX = "/api/v1"
PROTOBUF = "application/x-protobuf"
MAX_BODY_BYTES = 128 * 2**20
LARGE_BODY_BYTES = 2**18
# A step of the optimizer is one request where it can be: larger chunks than the SDK's own 1024 rows and 5 MB.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 4096,
    "fwdbwd_max_chunk_bytes_count": 32_000_000,
    "fwdbwd_dispatch_bytes_semaphore_size": 128_000_000,
    "sample_max_concurrent_requests": 2000,
    "sample_enable_stuck_detection": True,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": True,
}
DYNAMIC_CONFIG = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}
B = TypeVar("B", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


class Routes:
    """The handlers of the training loop and of sampling; listings are in `rest.py`."""

    def __init__(self, service: TinkerService):
        self.service = service
        self._clones: dict[str, int] = {}

    async def client_config(self, request: Request) -> Response:
        await json_body(request)
        return reply({**CLIENT_CONFIG, "rllm": about(self.service)})  # the SDK passes over what it does not know

    async def dynamic_config(self, request: Request) -> Response:
        await json_body(request)
        return reply(DYNAMIC_CONFIG)

    async def create_session(self, request: Request) -> Response:
        session = self.service.create_session(bodies.read(bodies.CreateSession, await json_body(request)))
        return reply({"type": "create_session", "session_id": session})

    async def heartbeat(self, request: Request) -> Response:
        self.service.open_session(bodies.read(bodies.SessionBody, await json_body(request)).session_id)
        return reply({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        body = bodies.read(bodies.Finish, await json_body(request))
        why = {"type": str(body.reason.get("type", "success")), "detail": body.detail}
        await self.service.finish_session(request.path_params["session"], why)
        return Response(status_code=204)

    async def telemetry(self, request: Request) -> Response:
        await json_body(request)
        return reply({"status": "accepted"})

    async def create_model(self, request: Request) -> Response:
        return reply(self.service.create_model(bodies.read(bodies.CreateModel, await json_body(request))).reply())

    async def load_weights(self, request: Request) -> Response:
        return await self._in_turn(request, bodies.LoadWeights, self.service.load_weights)

    async def unload_model(self, request: Request) -> Response:
        model_id = bodies.read(bodies.ModelBody, await json_body(request)).model_id
        return reply(self.service.unload(model_id).reply())

    async def get_info(self, request: Request) -> Response:
        return reply(self.service.info(bodies.read(bodies.ModelBody, await json_body(request)).model_id))

    async def forward_backward(self, request: Request) -> Response:
        return await self._train(request, forward_only=False)

    async def forward(self, request: Request) -> Response:
        return await self._train(request, forward_only=True)

    async def _train(self, request: Request, forward_only: bool) -> Response:
        raw = await body_bytes(request)
        told: tuple[Any, Any] = (None, None)

        def read() -> TrainRequest:
            nonlocal told
            if request.headers.get("content-type", "").startswith(PROTOBUF):
                return train_request_of_proto(_decoded(raw, request))
            body = parsed(raw)
            told = body.get("model_id"), body.get("seq_id")
            return train_request_of_json(body, forward_only)

        try:
            # What takes long to read must not hold up everybody else.
            train = await asyncio.to_thread(read) if len(raw) > LARGE_BODY_BYTES else read()
            told = train.model_id, train.seq_id
            return reply(self.service.train(train).reply())
        except ApiError as error:
            if error.final:
                self.service.refused(*(error.request or told))
            raise

    async def optim_step(self, request: Request) -> Response:
        return await self._in_turn(request, bodies.OptimStep, self.service.optim_step)

    async def save_weights(self, request: Request) -> Response:
        return await self._in_turn(request, bodies.SaveWeights, self.service.save_weights)

    async def save_for_sampler(self, request: Request) -> Response:
        return await self._in_turn(request, bodies.SaveForSampler, self.service.save_for_sampler)

    async def save_external(self, request: Request) -> Response:
        return await self._in_turn(request, bodies.SaveExternal, self.service.save_external)

    async def _in_turn(self, request: Request, kind: type[B], act: Callable[[B], PendingResult]) -> Response:
        """A request to a run, which has its turn even if it is refused."""
        body = await json_body(request)
        try:
            return reply(act(bodies.read(kind, body)).reply())
        except ApiError as error:
            if error.final:
                self.service.refused(body.get("model_id"), body.get("seq_id"))
            raise

    async def create_sampler(self, request: Request) -> Response:
        sampler = self.service.samplers.create(bodies.read(bodies.CreateSampler, await json_body(request)))
        return reply({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def join_sampler(self, request: Request) -> Response:
        body = await json_body(request)
        sampler = body.get("sampling_session_id")
        if not isinstance(sampler, str) or self.service.store.sampler(sampler) is None:
            raise ApiError(f"there is no sampling session {str(sampler)[:200]!r}", 404)
        self._clones[sampler] = self._clones.get(sampler, 0) + 1
        return reply({"type": "join_sampling_session", "client_counter": self._clones[sampler]})

    async def sample(self, request: Request) -> Response:
        return reply(self.service.samplers.sample(bodies.read(bodies.Sample, await json_body(request))).reply())

    async def retrieve_future(self, request: Request) -> Response:
        request_id = bodies.read(bodies.Retrieve, await json_body(request)).request_id
        result = await self.service.result(request_id)
        if result is None:
            return reply({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        if isinstance(result, dict):
            return reply(result)
        if not isinstance(result, Failure) and PROTOBUF in request.headers.get("accept", ""):
            return Response(await asyncio.to_thread(result.as_proto), media_type=PROTOBUF)
        return reply(result.as_json())

    async def cancel_future(self, request: Request) -> Response:
        body = await json_body(request)
        given = body.get("request_ids", [body.get("request_id")])
        for request_id in given if isinstance(given, list) else []:
            if isinstance(request_id, str):
                self.service.futures.cancel(request_id)
        return Response(status_code=204)

    async def not_served(self, request: Request) -> Response:
        raise ApiError(f"{request.url.path} is not served here; docs/tinker.md lists what is", 404)


def add_routes(app: FastAPI, service: TinkerService) -> None:
    """Tinker's training and sampling routes."""
    routes = Routes(service)
    posts: dict[str, Handler] = {
        "/client/config": routes.client_config,
        "/client/dynamic_config": routes.dynamic_config,
        "/create_session": routes.create_session,
        "/session_heartbeat": routes.heartbeat,
        "/sessions/{session}/finish": routes.finish_session,
        "/telemetry": routes.telemetry,
        "/create_model": routes.create_model,
        "/load_weights": routes.load_weights,
        "/unload_model": routes.unload_model,
        "/get_info": routes.get_info,
        "/forward_backward": routes.forward_backward,
        "/forward": routes.forward,
        "/optim_step": routes.optim_step,
        "/save_weights": routes.save_weights,
        "/save_weights_for_sampler": routes.save_for_sampler,
        "/save_weights_external": routes.save_external,
        "/create_sampling_session": routes.create_sampler,
        "/join_sampling_session": routes.join_sampler,
        "/asample": routes.sample,
        "/retrieve_future": routes.retrieve_future,
        "/cancel_future": routes.cancel_future,
        "/create_custom_loss": routes.not_served,
        "/retrieve_futures": routes.not_served,
    }
    for path, handler in posts.items():
        app.add_route(PREFIX + path, answering(handler), methods=["POST"])


def answering(handler: Handler) -> Handler:
    """`handler` with every failure told as ``{"error", "category"}`` and a fitting status."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except (ApiError, ModelError) as error:
            status = error.status if isinstance(error, ApiError) else 400
            return refusal(str(error), status)
        except ClientDisconnect:
            return Response(status_code=499)
        except asyncio.CancelledError:  # only the end of the server cancels a call
            return refusal("the server is stopping", 503)
        except HTTPException:
            raise
        except Exception as error:
            logger.exception("%s failed", request.url.path)
            return refusal(f"{type(error).__name__}: {error}", 500)

    return answer


def refusal(message: str, status: int) -> Response:
    return reply({"error": message, "detail": message, "category": "user" if status < 500 else "server"}, status)


def reply(data: Any, status: int = 200) -> Response:
    return Response(json.dumps(data), status, media_type="application/json")


async def body_bytes(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(f"the body has more than {MAX_BODY_BYTES} bytes; send fewer rows at once", 413)
        parts.append(part)
    return b"".join(parts)


async def json_body(request: Request) -> dict[str, Any]:
    return parsed(await body_bytes(request))


def parsed(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; an empty body is an empty one."""
    try:
        body = strict_json(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


def _decoded(raw: bytes, request: Request) -> bytes:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return raw
    if encoding != "zstd":
        raise ApiError(f"content-encoding {encoding[:50]!r} is not served here; send the body as it is", 415)
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ApiError(
            "content-encoding zstd needs the package zstandard on the server; send the body as it is", 415
        ) from error
    try:
        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            unpacked = reader.read(MAX_BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise ApiError(f"the body is not zstd: {error}") from error
    if len(unpacked) > MAX_BODY_BYTES:
        raise ApiError(f"the body unpacks to more than {MAX_BODY_BYTES} bytes; send fewer rows at once", 413)
    return unpacked
