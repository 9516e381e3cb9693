"""An ASGI app as a running thing: its own thread and event loop, so that no flow, however blocking, can stall it.

Knows threads and ports; nothing of what is served.
"""

from __future__ import annotations

import abc
import socket
import threading
import time
from typing import Any, Self

from rllm.errors import UserError

START_TIMEOUT_S = 30.0


class AppThread(abc.ABC):
    """An app served on `host` and `port` (0: any free one, then known as `port`). Use as ``with`` or call `start` and `stop`."""

    def __init__(self, host: str, port: int):
        self.host, self.port = host, port
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @abc.abstractmethod
    def make_app(self) -> Any:
        """The ASGI app to serve."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen; returns when requests are answered."""
        import uvicorn

        listener = bind(self.host, self.port)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self.make_app(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=3600,
            backlog=2048,
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


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or an error that names the port and the key."""
    # With the protocol named, asyncio turns Nagle's algorithm off; else a client waits 40 ms for the body behind the head of an answer.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
