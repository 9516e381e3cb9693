"""`rllm serve`: the OpenAI endpoint over a backend, until Ctrl-C.

Knows the gateway; nothing of training or of how the backend was made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

from rllm.backends.base import BASE, DEFAULT_ADAPTER, Backend
from rllm.gateway.server import Gateway

ADAPTER_NAME = "adapter"


def served_models(backend: Backend, adapters: Sequence[str]) -> dict[str, str]:
    """What clients may ask for, with the adapter of each: a shared adapter as ``adapter``, that of a role as ``base:role``, the base
    by its own name. The first answers where no model is named."""
    base = backend.model_name
    names = {ADAPTER_NAME if name == DEFAULT_ADAPTER else f"{base}:{name}": name for name in adapters}
    return names | {base: BASE}


def serve_openai(
    backend: Backend,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    adapters: Sequence[str] = (DEFAULT_ADAPTER,),
    max_tokens: int = 512,
    reasoning: Literal["content", "split"] = "content",
    say: Callable[[str], None] = print,
    until: threading.Event | None = None,
) -> None:
    """Serve until Ctrl-C (or until `until` is set), then free the port.

    `adapters` are served beside the model; none: only the model itself. `max_tokens` bounds a
    completion where a call does not, `reasoning` says where thoughts are told (``rollout.reasoning``). A port in use is a `UserError`.
    """
    names = served_models(backend, adapters)
    stop = until or threading.Event()
    with Gateway(
        backend, host=host, port=port, default_max_tokens=max_tokens, models=names, reasoning=reasoning
    ) as gateway:
        say(f"serving {' and '.join(names)} at {gateway.url}/v1 (OpenAI API); Ctrl-C stops")
        say(f'try: python examples/chat_client.py --base-url {gateway.url}/v1 "your question"')
        try:
            while not stop.wait(0.5):  # a wait without end would not hear Ctrl-C on every system
                pass
        except KeyboardInterrupt:
            say("stopped")
