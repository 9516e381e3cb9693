"""The gateway as a running thing: its own thread and event loop, so that no flow, however blocking, can stall it.

Knows threads, ports and sessions; routes are in `app.py`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rllm.backends.base import DEFAULT_ADAPTER, Backend
from rllm.errors import UserError
from rllm.gateway.chat import ChatModel
from rllm.gateway.recorder import Session
from rllm.types import AgentConfig

START_TIMEOUT_S = 30.0


class Gateway:
    """An OpenAI endpoint on loopback over `backend`. Use as ``with`` or call `start` and `stop`."""

    def __init__(
        self,
        backend: Backend,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_prompt_length: int | None = None,
        default_max_tokens: int = 512,
        models: Mapping[str, str] | None = None,
        roles: Sequence[str] = (),
    ):
        """`models`: what may be asked for outside of sessions, each with its adapter; the first answers where none is named.
        `roles` have an adapter of their own."""
        self.host, self.port = host, port
        self.model = ChatModel(backend, max_prompt_length, default_max_tokens)
        self.models = dict(models or {backend.model_name: DEFAULT_ADAPTER})
        self.roles = tuple(roles)
        self._sessions: dict[str, Session] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen; returns when requests are answered."""
        import uvicorn

        from rllm.gateway.app import create_app

        listener = bind(self.host, self.port)
        self.port = listener.getsockname()[1]
        app = create_app(self.model, self._sessions.get, self.models)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=3600, backlog=2048
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="rllm-gateway", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise UserError(f"the gateway did not start on {self.host}:{self.port}; its log above says why")
            time.sleep(0.005)

    def stop(self) -> None:
        """End the thread and free the port; calls under way are cancelled."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            self._thread.join()
        self._server = self._thread = None
        self._sessions.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def open_session(
        self,
        uid: str,
        *,
        seed: int = 0,
        is_validation: bool = False,
        sampling: Mapping[str, Any] | None = None,
        adapter: str = DEFAULT_ADAPTER,
    ) -> Session:
        """Begin recording under `uid` (which becomes part of a URL: letters, digits, ``.``, ``_``, ``-``)."""
        session = Session(uid, seed, is_validation, dict(sampling or {}), adapter, frozenset(self.roles))
        self._sessions[uid] = session
        return session

    def close_session(self, session: Session) -> None:
        """Its URLs answer 404 from now on; the record stays with the caller. A training session is counted in `take_counts`."""
        if self._sessions.pop(session.uid, None) is not None and not session.is_validation:
            with self._lock:
                self._counts.update(session.counts())

    def take_counts(self) -> dict[str, float]:
        """``gateway/calls|segments|rewritten`` of the training sessions closed since this was last asked: see `Session.counts`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {f"gateway/{name}": float(counts[name]) for name in ("calls", "segments", "rewritten")}

    def agent_config(self, session: Session, metadata: Mapping[str, Any] | None = None) -> AgentConfig:
        """What a flow is told about its session."""
        return AgentConfig(
            base_url=f"{self.url}/s/{session.uid}/v1",
            model=next(iter(self.models)),
            session_uid=session.uid,
            metadata=dict(metadata or {}),
            is_validation=session.is_validation,
            sampling_params=dict(session.sampling),
            roles=self.roles,
        )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or an error that names the port and the key."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise UserError(
            f"gateway.port={port}: cannot listen on {host}:{port} ({error.strerror}); choose another port, or 0 for any free one"
        ) from error
    return listener
