"""Server-sent events, and work that ends when its caller hangs up.

Knows ASGI; nothing of OpenAI's shapes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
# What nginx answers for a caller that hung up; nobody reads it.
CLIENT_GONE = 499


async def while_connected(request: Request, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of `calls`, which are cancelled as soon as the caller hangs up: nobody waits for those tokens."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    answered = asyncio.gather(*tasks, return_exceptions=True)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((answered, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise ClientDisconnect
        results: list[T] = []
        for result in answered.result():
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results
    finally:
        for task in (*tasks, gone):
            task.cancel()


async def event_stream(
    request: Request, events: AsyncIterator[str], on_error: Callable[[Exception], str]
) -> EventStream:
    """The response that sends `events`. What fails before the first of them is raised, so that it has a status of its own."""
    return EventStream(await _first(request, events), events, on_error)


async def _first(request: Request, events: AsyncIterator[str]) -> str:
    try:
        [first] = await while_connected(request, [_next(events)])
    except BaseException:
        await events.aclose()  # pyright: ignore[reportAttributeAccessIssue] - always a generator
        raise
    return first


async def _next(events: AsyncIterator[str]) -> str:
    return await anext(events)


class EventStream(Response):
    """Sends events as they come; what they come from is closed when the caller hangs up, sent to or not."""

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncIterator[str], on_error: Callable[[Exception], str]):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._events, self._on_error = first, events, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, gone = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:  # the connection broke while something was sent
            pass
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._events.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        except OSError:
            raise
        except Exception as error:
            await send({"type": "http.response.body", "body": self._on_error(error).encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """(which stream, item) of all `streams` as they come. Closing it closes them."""
    if len(streams) == 1:
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await streams[0].aclose()  # pyright: ignore[reportAttributeAccessIssue]
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(i: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((i, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    pumps = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        ended = 0
        while ended < len(streams):
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                ended += 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def event(data: Any, name: str | None = None) -> str:
    """One server-sent event of JSON `data`."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"
