"""The way to a Tinker server: asked before the SDK starts, watched while somebody waits, its errors told in one line.

Knows HTTP and the SDK's futures; nothing of rows or losses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from rllm.config.schema_tinker import TinkerConfig
from rllm.errors import ConfigError, RunError

HOSTED = "https://tinker.thinkingmachines.dev/services/tinker-prod"
# The key that is shown to a server on this machine where none is given: the SDK wants one.
LOCAL_KEY = "tml-local"
# The SDK retries for minutes what does not answer; the two requests before it starts are given up after so long each.
ASK_S = 5.0
START_S = 60.0
PULSE_S = 3.0
LOOK_S = 0.5
# How long the end of a session is waited for, where the server answers and where it does not.
CLOSE_S, DROP_S = 10.0, 0.5


@dataclass(frozen=True)
class Server:
    """A server that answered. `about` is what ``rllm serve`` tells of itself, None for any other."""

    url: str
    key: str
    about: dict[str, Any] | None = None

    @property
    def alpha(self) -> float | None:
        """LoRA alpha of runs for which none is stated; None: not told."""
        return None if self.about is None else float(self.about["lora_alpha"])


def load_sdk() -> Any:
    """The module `tinker`."""
    try:
        import tinker
    except ImportError as error:
        raise ConfigError(
            f"backend=tinker: the tinker SDK cannot be imported ({error}); pip install 'rllm[tinker]'"
        ) from error
    return tinker


def find_server(config: TinkerConfig, sdk_version: str) -> Server:
    """The server that `config` names, if it answers, speaks the API and takes the key. Raises `ConfigError` within `ASK_S` a request."""
    url = (config.base_url or os.environ.get("TINKER_BASE_URL") or HOSTED).rstrip("/")
    key = _key(config, url)
    where = f"tinker.base_url={url}"
    health = _ask("GET", f"{url}/api/v1/healthz", where, key=key)
    if health.status_code in (401, 403):
        raise ConfigError(f"{where}: the server refuses the API key in ${config.api_key_env} ({_told(health)})")
    if health.status_code != 200:
        raise ConfigError(
            f"{where}: no Tinker server (GET /api/v1/healthz: {health.status_code}); give the address of the service, or that of "
            "`rllm serve`, without a path"
        )
    answer = _ask("POST", f"{url}/api/v1/client/config", where, json={"sdk_version": sdk_version}, key=key)
    if answer.status_code in (401, 403):
        raise ConfigError(f"{where}: the server refuses the API key in ${config.api_key_env} ({_told(answer)})")
    try:
        told = answer.json()
    except ValueError:
        told = None
    if answer.status_code != 200 or not isinstance(told, dict):
        raise ConfigError(
            f"{where}: the server does not know this SDK, tinker {sdk_version} (client/config: {answer.status_code}, {_told(answer)})"
        )
    about = told.get("rllm")
    return Server(url, key, about if isinstance(about, dict) else None)


def _key(config: TinkerConfig, url: str) -> str:
    key = os.environ.get(config.api_key_env)
    if not key:
        if urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
            return LOCAL_KEY
        raise ConfigError(
            f"tinker.api_key_env={config.api_key_env}: that environment variable is not set, and {url} wants an API key"
        )
    if not key.startswith(("tml-", "eyJ")):
        raise ConfigError(f"tinker.api_key_env={config.api_key_env}: the key in it must begin with tml-")
    return key


def _ask(method: str, url: str, where: str, key: str, json: Any = None) -> httpx.Response:
    try:
        return httpx.request(method, url, json=json, headers={"X-API-Key": key}, timeout=ASK_S)
    except httpx.TimeoutException as error:
        raise ConfigError(f"{where}: no answer within {ASK_S:g} s; is it the right address?") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(
            f"{where}: nothing answers there ({error}); start a server (rllm serve --model ... --port ...), or mend the address"
        ) from error


def _told(answer: httpx.Response) -> str:
    """What an error answer says, in a line."""
    try:
        body = answer.json()
        text = str(body.get("error") or body.get("detail") or body) if isinstance(body, dict) else str(body)
    except ValueError:
        text = answer.text
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:300] or "no message"


class Pulse:
    """Whether the server still answers, asked in a thread of its own while anybody waits for it."""

    def __init__(self, server: Server, patience_s: float):
        self.server, self.patience_s = server, patience_s
        self.silent_since: float | None = None
        self._waiting = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="tinker-pulse", daemon=True).start()

    @property
    def gone(self) -> bool:
        """Whether it did not answer for longer than it is waited for."""
        return self.silent_since is not None and time.monotonic() - self.silent_since > self.patience_s

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        headers = {"X-API-Key": self.server.key}
        with httpx.Client(timeout=max(ASK_S, self.patience_s / 3), headers=headers) as http:
            while not self._closed.wait(PULSE_S):
                if not self._waiting:
                    continue
                asked = time.monotonic()
                try:
                    answered = http.get(f"{self.server.url}/api/v1/healthz").status_code < 500
                except httpx.HTTPError:
                    answered = False
                self.silent_since = None if answered else self.silent_since or asked


@dataclass
class Connection:
    """An open session with a server. `advice` says how to go on when it is lost."""

    server: Server
    sdk: Any
    client: Any
    pulse: Pulse
    advice: Callable[[], str] = field(default=lambda: "")

    @classmethod
    def open(cls, config: TinkerConfig) -> Connection:
        sdk = load_sdk()
        server = find_server(config, getattr(sdk, "__version__", "0"))
        pulse = Pulse(server, config.patience_s)
        client = sdk.ServiceClient(project_id=config.project, base_url=server.url, api_key=server.key)
        return cls(server, sdk, client, pulse)

    def begin(self, ask: Callable[[], Any], doing: str) -> Any:
        """The result of the first call, in which the SDK makes its session, and blocks: so it has a limit. Raises `ConfigError`."""
        try:
            return self.wait(self.wait(_in_thread(ask), doing, START_S), doing, START_S)
        except RunError as error:
            raise ConfigError(str(error)) from error

    def wait(self, future: Any, doing: str, limit_s: float | None = None) -> Any:
        """The result of one of the SDK's futures. Raises `RunError` that says what failed while `doing`, or that the server is gone."""
        inner = future.future() if hasattr(future, "future") else future
        end = None if limit_s is None else time.monotonic() + limit_s
        with self.pulse.watching(), self.telling(doing):
            while True:
                done, _ = concurrent.futures.wait([inner], timeout=LOOK_S)
                if done:
                    return inner.result()
                self._check(doing)
                if end is not None and time.monotonic() > end:
                    raise RunError(
                        f"{doing}: the Tinker server at {self.server.url} did not do it within {limit_s:g} s"
                    )

    async def wait_async(self, future: Any, doing: str) -> Any:
        """`wait` for an event loop; cancelling it cancels the request."""
        task = asyncio.wrap_future(future.future())
        try:
            with self.pulse.watching(), self.telling(doing):
                while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                    self._check(doing)
                return task.result()
        finally:
            if not task.done():
                task.cancel()

    def _check(self, doing: str) -> None:
        if self.pulse.gone:
            raise RunError(
                f"{doing}: the Tinker server at {self.server.url} has not answered for {self.pulse.patience_s:g} s "
                f"(tinker.patience_s). {self.advice()}".rstrip()
            )

    @contextlib.contextmanager
    def telling(self, doing: str) -> Iterator[None]:
        """Errors of the SDK as a `RunError`."""
        try:
            yield
        except (self.sdk.TinkerError, httpx.HTTPError, ValueError, RuntimeError) as error:
            # What it knew before it does not know now: it was started anew, or ended the session.
            lost = getattr(error, "status_code", None) in (404, 410)
            told = f"{doing}: the Tinker server at {self.server.url} says: {_line(error)}"
            raise RunError(f"{told}. {self.advice()}" if lost else told) from error

    def close(self) -> None:
        """End the session, saying how it went, and the SDK's tasks for it; a server that does not answer is not waited for."""
        kind = sys.exc_info()[0]
        how = "success" if kind is None else "errored" if issubclass(kind, Exception) else "interrupted"
        self.pulse.close()
        limit = CLOSE_S if self.pulse.silent_since is None else DROP_S
        # In a thread: while the SDK still tries to make the session, for minutes, even asking for its end blocks.
        asked = _in_thread(lambda: self.client.close(how).future())
        with contextlib.suppress(concurrent.futures.TimeoutError):
            ending = asked.result(timeout=DROP_S)
            with contextlib.suppress(Exception):
                ending.result(timeout=limit)
            # Where it could not be told the SDK would try for minutes; cancelled, it drops the session and its heartbeat.
            ending.cancel()


def _line(error: BaseException) -> str:
    """The message of an SDK error: the server's own words where it has them."""
    body = getattr(error, "body", None)
    if isinstance(body, dict) and (text := body.get("error") or body.get("detail")):
        return " ".join(str(text).split())
    return " ".join(str(error).split()) or type(error).__name__


def _in_thread(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """`work` in a thread that does not keep the process alive."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="tinker-start", daemon=True).start()
    return future
