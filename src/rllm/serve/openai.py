"""`rllm serve`: the OpenAI endpoint over a backend, until Ctrl-C.

Knows the gateway; nothing of training or of how the backend was made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rllm.backends.base import Backend
from rllm.gateway.server import Gateway

ADAPTER_NAME = "adapter"


def model_names(backend: Backend, adapter: str | None = ADAPTER_NAME) -> list[str]:
    """What clients may ask for: the adapter first (so it answers where no model is named), then the base by its own name."""
    return [adapter, backend.model_name] if adapter else [backend.model_name]


def serve_openai(
    backend: Backend,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    adapter: str | None = ADAPTER_NAME,
    max_tokens: int = 512,
    say: Callable[[str], None] = print,
    until: threading.Event | None = None,
) -> None:
    """Serve until Ctrl-C (or until `until` is set), then free the port.

    `adapter` is the name under which the adapter is served; None: there is none, only the model itself. `max_tokens` bounds a
    completion where a call does not. A port in use is a `UserError`.
    """
    names = model_names(backend, adapter)
    stop = until or threading.Event()
    with Gateway(backend, host=host, port=port, default_max_tokens=max_tokens, model_names=names) as gateway:
        say(f"serving {' and '.join(names)} at {gateway.url}/v1 (OpenAI API); Ctrl-C stops")
        say(f'try: python examples/chat_client.py --base-url {gateway.url}/v1 "your question"')
        try:
            while not stop.wait(0.5):  # a wait without end would not hear Ctrl-C on every system
                pass
        except KeyboardInterrupt:
            say("stopped")
