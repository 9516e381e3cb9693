"""`rllm serve`: Tinker's API and OpenAI's over one local backend, on one port, until Ctrl-C.

Knows HTTP apps and threads; what the APIs do is in `gateway/` and `serve/tinker/`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rllm.backends.base import (
    BASE,
    DEFAULT_ADAPTER,
    Backend,
    Completion,
    OnToken,
    SamplingParams,
    Scored,
    refuse_impossible,
)
from rllm.config.schema import Config
from rllm.errors import ConfigError
from rllm.gateway.chat import ChatModel
from rllm.gateway.errors import RequestError
from rllm.gateway.thread import AppThread

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rllm.serve.tinker.service import TinkerService

ADAPTER_NAME = "adapter"
APIS = ("tinker", "openai")
DEFAULT_STATE, DEFAULT_ALPHA, DEFAULT_MAX_RANK = Path("runs/serve"), 32.0, 512
NAMES_KEPT_S = 1.0
"""How long a name may be served after its checkpoint has expired."""
OPEN_PATHS = ("/healthz", "/api/v1/healthz", "/api/v1/files/")
"""Answered without a key: whether the server lives, and signed links."""


def served_models(base: str, adapters: Sequence[str]) -> dict[str, str]:
    """What clients may ask for, with the adapter of each: a shared adapter as ``adapter``, that of a role as ``base:role``, the base
    by its own name. The first answers where no model is named."""
    names = {ADAPTER_NAME if name == DEFAULT_ADAPTER else f"{base}:{name}": name for name in adapters}
    return names | {base: BASE}


class CheckpointModels(Mapping[str, str]):
    """`fixed` names, and for every sampler checkpoint of a Tinker server ``base:NAME`` (the newest of that name) and its full path."""

    def __init__(self, fixed: Mapping[str, str], service: TinkerService):
        self.fixed, self.service = dict(fixed), service
        self._known: tuple[float, int, dict[str, str]] = (0.0, -1, {})

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, str]:
        read_at, revision, names = self._known
        if revision == self.service.store.revision and time.monotonic() - read_at < NAMES_KEPT_S:
            return names
        self._known = (time.monotonic(), self.service.store.revision, self._read())
        return self._known[2]

    def _read(self) -> dict[str, str]:
        saved = [one for one in self.service.store.checkpoints()[0] if one.kind == "sampler_weights"]
        paths = {one.path: one.path for one in saved if one.about["fingerprint"] == self.service.base["fingerprint"]}
        names = {f"{self.service.name}:{one.name}": one.path for one in saved if one.path in paths}
        return {**self.fixed, **{name: path for name, path in names.items() if name not in self.fixed}, **paths}


class ChatBackend:
    """What the OpenAI side needs of a backend: its sampling waits its turn among all tenants, and reads checkpoints when asked for."""

    def __init__(self, service: TinkerService):
        backend = self._backend = service.backend
        self.sampler, self.model_name = service.sampler, service.name
        self.tokenizer, self.max_model_len = backend.tokenizer, backend.max_model_len

    async def sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        adapter: str = DEFAULT_ADAPTER,
        on_token: OnToken | None = None,
    ) -> Completion:
        path = None if adapter == BASE else adapter
        return await self.sampler.complete("openai", path, tuple(prompt_ids), params, on_token)

    def score(self, ids: Sequence[int], adapter: str) -> Scored:
        """What the base says of a prompt; checkpoints are scored through Tinker's API."""
        if adapter != BASE:
            raise RequestError(
                "echo and prompt_logprobs: only of the base model here; use Tinker's prompt_logprobs", "model"
            )
        return self._backend.score(ids, BASE)


class ModelServer(AppThread):
    """The APIs that are asked for: OpenAI's with `models`, Tinker's with `service`. `key`: what clients must show, if anything."""

    def __init__(
        self,
        backend: Any,
        host: str,
        port: int,
        *,
        models: Mapping[str, str] | None = None,
        service: TinkerService | None = None,
        key: str | None = None,
        max_tokens: int = 512,
        reasoning: Literal["content", "split"] = "content",
    ):
        super().__init__(host, port)
        check_key(host, key, tinker=service is not None)
        self.models, self.service, self.key = models, service, key
        self._chat = ChatModel(backend, default_max_tokens=max_tokens, reasoning=reasoning) if models else None

    def make_app(self) -> Any:
        from fastapi import FastAPI

        if self._chat is not None and self.models is not None:
            from rllm.gateway.app import create_app

            app = create_app(self._chat, lambda uid: None, self.models)
        else:
            app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        if self.service is not None:
            from rllm.serve.tinker.rest import add_rest_routes
            from rllm.serve.tinker.routes import add_routes

            add_routes(app, self.service)
            add_rest_routes(app, self.service)
        return Door(app, self.key, self.service)


class Door:
    """An ASGI app that lets in who shows the key (``X-API-Key``, or ``Authorization: Bearer``)."""

    def __init__(self, app: FastAPI, key: str | None, service: TinkerService | None):
        self.app, self.key, self.service = app, key, service
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (
            self.service is not None and self._watch is None
        ):  # needs the server's event loop, so not before the first call
            self._watch = asyncio.get_running_loop().create_task(self.service.watch())
        if scope["type"] != "http" or self.key is None or self._admits(scope):
            await self.app(scope, receive, send)
            return
        message = "a valid API key is missing: send it as X-API-Key or as Authorization: Bearer"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
        told: Any = {"error": error}
        if scope["path"].startswith("/api/"):
            told = {"error": message, "detail": message, "category": "user"}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})

    def _admits(self, scope: Any) -> bool:
        assert self.key is not None
        headers = dict(scope["headers"])
        shown = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        free = scope["path"] in OPEN_PATHS or (scope["path"].startswith(OPEN_PATHS[-1]) and scope["method"] == "GET")
        return free or hmac.compare_digest(shown, self.key.encode())


def check_key(host: str, key: str | None, tinker: bool) -> None:
    """Raises `ConfigError` where a server that others can reach would have no key, or clients could not send it."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines could reach the server, so clients must have a key; put one into an environment variable and "
            "name it with --api-key-env, or listen on 127.0.0.1"
        )
    if key is not None and (not key.isascii() or not key.isprintable() or len(key) < 8):
        raise ConfigError("the API key must be at least 8 printable ASCII characters")
    if key is not None and tinker and not key.startswith("tml-"):
        raise ConfigError(
            'the API key must begin with "tml-": Tinker\'s client refuses others (or leave tinker out of --api)'
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    backend: Backend,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    adapters: Sequence[str] = (DEFAULT_ADAPTER,),
    service: TinkerService | None = None,
    openai: bool = True,
    key: str | None = None,
    max_tokens: int = 512,
    reasoning: Literal["content", "split"] = "content",
    say: Callable[[str], None] = print,
    until: threading.Event | None = None,
) -> None:
    """Serve until Ctrl-C (or until `until` is set), then free the port.

    `adapters` are served beside the model; none: only the model itself. `service`: Tinker's API too. `max_tokens` bounds a completion of
    the OpenAI side where a call does not, `reasoning` says where thoughts are told (``rollout.reasoning``). A port in use, or an address that needs a key and has none, is a `UserError`.
    """
    base = service.name if service is not None else backend.model_name
    names: Mapping[str, str] = served_models(base, adapters)
    if service is not None:
        names = CheckpointModels(names, service)
    stop = until or threading.Event()
    chat = ChatBackend(service) if service is not None else backend
    server = ModelServer(
        chat,
        host,
        port,
        models=names if openai else None,
        service=service,
        key=key,
        max_tokens=max_tokens,
        reasoning=reasoning,
    )
    with server:
        if openai:
            told = list(names)[:8]
            say(f"serving {' and '.join(told)} at {server.url}/v1 (OpenAI API); Ctrl-C stops")
            say(f'try: python examples/chat_client.py --base-url {server.url}/v1 "your question"')
        if service is not None:
            say(
                f"training and sampling {base!r} at {server.url} (Tinker API); state in {service.store.folder}; Ctrl-C stops"
            )
            say(
                f"try: TINKER_BASE_URL={server.url} TINKER_API_KEY={'...' if key else 'tml-local'} python your_script.py"
            )
        try:
            while not stop.wait(0.5):  # a wait without end would not hear Ctrl-C on every system
                pass
        except KeyboardInterrupt:
            say("stopped")


def chosen_apis(text: str) -> frozenset[str]:
    """Of ``--api``. Raises `ConfigError`."""
    chosen = frozenset(part.strip() for part in text.split(","))
    if not chosen <= frozenset(APIS):
        odd = sorted(chosen - frozenset(APIS))[0]
        raise ConfigError(
            f"--api {text}: {odd!r} is not one of {', '.join(APIS)}; write --api {','.join(APIS)} for both"
        )
    return chosen


def serve_model(
    config: Config,
    host: str,
    port: int,
    *,
    apis: Collection[str],
    name: str | None,
    state: Path | None,
    alpha: float | None,
    max_rank: int | None,
    key: str | None,
) -> None:
    """`serve` the model (and the adapter) that a config names; `state` is Tinker's folder, `alpha` and `max_rank` those of its runs."""
    from rllm.backends.local.backend import LocalBackend
    from rllm.lora.files import match_config_to_adapter

    given = config.lora.adapter_path is not None
    for option, value in (("--state", state), ("--alpha", alpha), ("--max-rank", max_rank)):
        if value is not None and "tinker" not in apis:
            raise ConfigError(
                f"{option} {value}: it is for Tinker's API, which --api leaves out; add tinker, or leave {option} out"
            )
    config = match_config_to_adapter(config) if given else config
    if "tinker" in apis and not config.lora.adapters():
        raise ConfigError("lora.rank=0: Tinker's runs train adapters over a frozen model; leave lora.rank out")
    refuse_impossible(config, training=False)
    adapters = list(config.lora.adapters()) if given else []
    store = None
    if "tinker" in apis:
        from rllm.serve.tinker.service import TinkerService
        from rllm.serve.tinker.store import Store

        store = Store(state or DEFAULT_STATE)
    backend = LocalBackend.create(config)
    service = None
    try:
        if store is not None:
            service = TinkerService(
                backend,
                store,
                name=name or config.model.path,
                alpha=DEFAULT_ALPHA if alpha is None else alpha,
                max_rank=DEFAULT_MAX_RANK if max_rank is None else max_rank,
            )
        elif name is not None:
            backend.model_name = name
        serve(
            backend, host, port, adapters=adapters, service=service, openai="openai" in apis, key=key,
            reasoning=config.rollout.reasoning,
        )  # fmt: skip
    finally:
        if service is not None:
            service.close()
        backend.close()
