"""What the gateway costs and carries: overhead per call over the sampler alone, and many clients that stream at once.

    python bench/gateway.py                    # 512 clients, three rounds, CPU, the default model
    python bench/gateway.py --clients 64 --rounds 1

Clients run in a process of their own. Exits with 1 if a call failed, a record is missing, or a client read anything but what was
recorded. Overhead is a request's time in the app less the time of its `Backend.sample`; "seen by the client" is the client's time less that
of the sampling: the network, the server's HTTP and the client library included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

import rllm.gateway.app as app_module
from rllm.backends.local.backend import LocalBackend
from rllm.config.load import load_config
from rllm.gateway.server import Gateway

QUESTION = "Using the numbers [{}, 5, 7], make 26."
PAGE = os.sysconf("SC_PAGE_SIZE")


class TimedBackend:
    """A backend that keeps how long each call of `sample` took."""

    def __init__(self, backend: LocalBackend):
        self._backend, self.seconds = backend, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def sample(self, *args: Any, **how: Any) -> Any:
        started = time.perf_counter()
        try:
            return await self._backend.sample(*args, **how)
        finally:
            self.seconds.append(time.perf_counter() - started)


class TimedApp:
    """An ASGI app that keeps how long each request took, from its arrival to the last byte of its answer."""

    seconds: list[float]

    def __init__(self, app: Any):
        self._app, TimedApp.seconds = app, []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        started = time.perf_counter()
        await self._app(scope, receive, send)
        TimedApp.seconds.append(time.perf_counter() - started)


def overhead(gateway: Gateway, backend: TimedBackend, calls: int, tokens: int) -> dict[str, float]:
    """Milliseconds of a call beside its sampling, whole and streamed, alone on the server."""
    found: dict[str, float] = {}
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for stream in (False, True):
            session = gateway.open_session(f"overhead-{stream}")
            backend.seconds, TimedApp.seconds, seen = [], [], []
            for i in range(calls + 5):
                message = {"role": "user", "content": QUESTION.format(i % 10)}
                body = {"messages": [message], "max_tokens": tokens, "stream": stream}
                started = time.perf_counter()
                client.post(f"/s/{session.uid}/v1/chat/completions", json=body).raise_for_status()
                seen.append(time.perf_counter() - started)
            time.sleep(0.05)
            extra = [1e3 * (a - b) for a, b in zip(TimedApp.seconds, backend.seconds, strict=True)][5:]
            name = "streamed" if stream else "whole"
            found[f"{name}, median ms"] = statistics.median(extra)
            found[f"{name}, 90% ms"] = sorted(extra)[int(0.9 * len(extra))]
            outside = [1e3 * (a - b) for a, b in zip(seen, backend.seconds, strict=True)][5:]
            found[f"{name} as seen by the client, median ms"] = statistics.median(outside)
            gateway.close_session(session)
    return found


async def stream_all(url: str, names: list[str], turns: int, tokens: int) -> list[dict[str, Any]]:
    """Every client has a conversation of `turns`, all at the same time. What each read: (call id, text) of each turn."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)

    async def talk(client: httpx.AsyncClient, name: str, i: int) -> dict[str, Any]:
        messages, calls, first = [], [], 0.0
        for turn in range(turns):
            messages.append({"role": "user", "content": QUESTION.format(i % 10) if not turn else "And another way?"})
            text, call, started = "", "", time.perf_counter()
            body = {"messages": messages, "max_tokens": tokens, "stream": True}
            async with client.stream("POST", f"{url}/s/{name}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    return {"error": f"{response.status_code}: {(await response.aread()).decode()[:200]}"}
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return {"error": event["error"]["message"]}
                        first = first or time.perf_counter() - started
                        call = event["id"]
                        text += event["choices"][0]["delta"].get("content") or ""
            messages.append({"role": "assistant", "content": text})
            calls.append([call, text])
        return {"calls": calls, "first_s": first}

    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        return await asyncio.gather(*(talk(client, name, i) for i, name in enumerate(names)))


def many(gateway: Gateway, clients: int, turns: int, tokens: int, label: str) -> dict[str, Any]:
    """One round of clients in a process of their own, checked against what was recorded."""
    sessions = [gateway.open_session(f"{label}-{i}") for i in range(clients)]
    started = time.perf_counter()
    names = [session.uid for session in sessions]
    command = [sys.executable, __file__, "--as-clients", json.dumps([gateway.url, names, turns, tokens])]
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"the clients failed:\n{done.stderr[-2000:]}")
    read = json.loads(done.stdout)
    errors = [one["error"] for one in read if "error" in one]
    lost = sampled = segments = 0
    for session, one in zip(sessions, read, strict=True):
        recorded = [[call_id, call.output.content] for call_id, call in session.recorded().items()]
        lost += "calls" in one and one["calls"] != recorded
        sampled += sum(call.output.completion_length for call in session.recorded().values())
        segments += session.counts()["segments"]
        gateway.close_session(session)
    return {
        "clients": clients,
        "calls": clients * turns,
        "errors": len(errors),
        "first error": errors[0] if errors else "",
        "differing records": lost,
        "segments": segments,
        "wall s": wall,
        "tokens/s": sampled / wall,
        "first token, median s": statistics.median(one.get("first_s", 0.0) for one in read),
        "resident MiB after": resident_mib(),
    }


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def show(title: str, numbers: dict[str, Any]) -> None:
    told = [f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()]
    print(f"{title}: {', '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--calls", type=int, default=100, help="calls measured for the overhead")
    parser.add_argument("--as-clients", help=argparse.SUPPRESS)
    args = parser.parse_args()
    raise_file_limit()
    if args.as_clients:
        print(json.dumps(asyncio.run(stream_all(*json.loads(args.as_clients)))))
        return
    create_app: Any = app_module.create_app
    app_module.create_app = lambda *parts: TimedApp(create_app(*parts))  # pyright: ignore[reportAttributeAccessIssue]
    backend: Any = TimedBackend(LocalBackend.create(load_config(base=None, training=False).config))
    bad = 0
    with Gateway(backend) as gateway:
        show("overhead", overhead(gateway, backend, args.calls, args.tokens))
        show("before", {"resident MiB": resident_mib()})
        for i in range(args.rounds):
            found = many(gateway, args.clients, args.turns, args.tokens, f"round-{i}")
            show(f"round {i + 1}", found)
            bad += found["errors"] + found["differing records"]
    backend.close()
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
