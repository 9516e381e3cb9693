"""Order within a run, fairness between tenants: of training time and of places to sample."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rllm.serve.tinker.errors import ApiError
from rllm.serve.tinker.scheduler import FairSlots, Lane, Scheduler


def test_a_tenant_with_many_jobs_does_not_hold_up_one_with_few() -> None:
    scheduler, done = Scheduler(), []
    gate = threading.Event()
    scheduler.submit("first", gate.wait)

    def job(name: str) -> None:
        time.sleep(0.002)
        done.append(name)

    futures = [scheduler.submit("many", lambda: job("many")) for _ in range(40)]
    futures += [scheduler.submit("few", lambda: job("few")) for _ in range(4)]
    gate.set()
    for future in futures:
        future.result(timeout=10)
    scheduler.close()
    assert done.index("few") <= 2 and [i for i, name in enumerate(done) if name == "few"][-1] < 14


def test_one_that_comes_anew_while_another_is_at_work_does_not_go_before_it_for_long() -> None:
    scheduler, done, gate = Scheduler(), [], threading.Event()
    scheduler.submit("old", lambda: time.sleep(0.5)).result(timeout=10)
    scheduler.submit("old", gate.wait)
    time.sleep(0.05)  # under way, so nobody waits when the new one comes

    def job(name: str) -> None:
        time.sleep(0.01)
        done.append(name)

    futures = [scheduler.submit(name, lambda name=name: job(name)) for name in ["new"] * 10 + ["old"] * 10]
    gate.set()
    for future in futures:
        future.result(timeout=10)
    scheduler.close()
    assert done.index("old") < 8, done


def test_time_is_shared_evenly_whatever_jobs_cost() -> None:
    scheduler = Scheduler()
    jobs = {"long": 0.02, "short": 0.002}
    stop = time.monotonic() + 1.0

    def feed(name: str) -> None:
        while time.monotonic() < stop:
            for future in [scheduler.submit(name, lambda: time.sleep(jobs[name])) for _ in range(30)]:
                future.result(timeout=10)

    threads = [threading.Thread(target=feed, args=(name,)) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    served = scheduler.served_s()
    scheduler.close()
    assert max(served.values()) / min(served.values()) < 1.5, served


def test_jobs_of_a_tenant_keep_their_order_and_failures_are_their_own() -> None:
    scheduler, done = Scheduler(), []

    def fail() -> None:
        raise RuntimeError("no")

    failed = scheduler.submit("a", fail)
    futures = [scheduler.submit("a", lambda i=i: done.append(i)) for i in range(20)]
    futures[-1].result(timeout=10)
    with pytest.raises(RuntimeError, match="no"):
        failed.result(timeout=1)
    assert done == list(range(20))
    scheduler.close()
    with pytest.raises(ApiError, match="stopping"):
        scheduler.submit("a", fail)


def test_too_many_jobs_are_refused_with_a_word_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.serve.tinker.scheduler.MAX_WAITING", 2)
    scheduler, gate = Scheduler(), threading.Event()
    scheduler.submit("a", gate.wait)
    time.sleep(0.05)
    waiting = [scheduler.submit("a", lambda: 1) for _ in range(2)]
    with pytest.raises(ApiError, match="try again") as refused:
        scheduler.check_room()
    assert refused.value.status == 429
    scheduler.forget("a")
    assert all(future.cancelled() for future in waiting)
    gate.set()
    assert scheduler.submit("b", lambda: 5).result(timeout=5) == 5
    scheduler.close()


def test_a_lane_releases_in_order_whatever_the_order_of_arrival() -> None:
    lane, done = Lane(most_held=3), []
    for number in (3, 2, 5):
        lane.enter(number, lambda number=number: done.append(number))
    assert done == [] and lane.held == 3
    with pytest.raises(ApiError, match="wait for seq_id 1"):
        lane.enter(7, lambda: None)
    with pytest.raises(ApiError, match="used before"):
        lane.enter(3, lambda: None)
    lane.enter(1, lambda: done.append(1))
    assert done == [1, 2, 3]
    lane.skip(4)
    assert done == [1, 2, 3, 5] and lane.next == 6
    lane.enter(None, lambda: done.append(0))
    lane.skip(2)
    with pytest.raises(ApiError, match="the next is 6"):
        lane.enter(5, lambda: None)
    assert done[-1] == 0


def test_places_go_to_who_holds_the_fewest() -> None:
    async def scene() -> list[str]:
        slots, taken = FairSlots(2, most_waiting=100), []

        async def work(name: str) -> None:
            await slots.take(name)
            taken.append(name)
            await asyncio.sleep(0.001)
            slots.give_back(name)

        tasks = [asyncio.ensure_future(work("many")) for _ in range(20)]
        await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(work("few")) for _ in range(5)]
        gone = asyncio.ensure_future(work("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*tasks)
        assert slots.free == 2 and slots.waiting == 0
        with pytest.raises(ApiError) as refused:
            slots.check_room(103)
        assert refused.value.status == 429
        return taken

    taken = asyncio.run(scene())
    assert "gone" not in taken and [i for i, name in enumerate(taken) if name == "few"][-1] < 13
