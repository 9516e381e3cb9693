"""Calls in flight: bounded in tokens, bounded in time, and nothing kept of a call that was given up."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import openai
import pytest

from rllm.backends.base import Completion, SamplingParams
from rllm.gateway.server import Gateway
from rllm.rollouts.limits import LimitedBackend, TokenBudget


class Counting:
    """Counts the tokens of the calls that it answers at the same time."""

    def __init__(self, seconds: float = 0.01):
        self.seconds, self.now, self.most, self.calls = seconds, 0, 0, 0
        self.lock = threading.Lock()

    async def sample(self, prompt_ids: Any, params: SamplingParams, adapter: str = "default") -> Completion:
        size = len(prompt_ids) + params.max_tokens
        with self.lock:
            self.now += size
            self.most = max(self.most, self.now)
            self.calls += 1
        try:
            await asyncio.sleep(self.seconds)
        finally:
            with self.lock:
                self.now -= size
        return Completion([1], [0.0], [0], "stop")


def test_the_tokens_in_flight_stay_below_the_limit_over_several_event_loops() -> None:
    inner = Counting()
    backend = LimitedBackend(inner, TokenBudget(100), None)  # pyright: ignore[reportArgumentType]

    async def calls(seed: int) -> None:
        sizes = random.Random(seed)
        await asyncio.gather(
            *(backend.sample([0] * sizes.randint(1, 30), SamplingParams(sizes.randint(1, 60))) for _ in range(50))
        )

    threads = [threading.Thread(target=lambda i=i: asyncio.run(calls(i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert inner.calls == 200
    assert 60 < inner.most <= 100
    assert backend.budget is not None and backend.budget.taken == 0


def test_a_call_larger_than_the_limit_runs_alone_and_is_not_overtaken_for_ever() -> None:
    inner = Counting()
    backend = LimitedBackend(inner, TokenBudget(100), None)  # pyright: ignore[reportArgumentType]
    order: list[int] = []

    async def one(size: int) -> None:
        await backend.sample([0], SamplingParams(size))
        order.append(size)

    async def main() -> None:
        await asyncio.gather(one(60), one(500), *(one(9) for _ in range(20)))

    asyncio.run(main())
    assert order[:2] == [60, 500] and inner.most == 501


def test_calls_that_are_cancelled_give_back_what_they_took_or_waited_for() -> None:
    inner = Counting(3600)
    backend = LimitedBackend(inner, TokenBudget(100), None)  # pyright: ignore[reportArgumentType]

    async def main() -> None:
        tasks = [asyncio.ensure_future(backend.sample([0], SamplingParams(59))) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert inner.calls == 1
        for task in (tasks[1], tasks[0], tasks[2]):
            task.cancel()
        await asyncio.sleep(0.05)
        assert inner.calls == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert backend.budget is not None and backend.budget.taken == 0


def test_a_call_past_its_deadline_is_cancelled_and_the_client_told_so_once(tokenizer: Any, backend: Any) -> None:
    backend.delay = lambda text: 3600.0 if "slow" in text else 0.0
    with Gateway(LimitedBackend.over(backend, None, 0.3)) as gateway:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=3)
        started = time.monotonic()
        with pytest.raises(openai.APIStatusError, match=r"no answer within 0.3 s \(rollout.call_timeout_s\)") as raised:
            client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "slow"}])
        assert raised.value.status_code == 504 and raised.value.code == "call_timeout"
        assert time.monotonic() - started < 2 and len(backend.asked) == 1, "not tried again"
        assert backend.cancelled == 1
        client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "quick"}])


def test_without_limits_the_backend_is_used_as_it_is(backend: Any) -> None:
    assert LimitedBackend.over(backend, None, None) is backend
