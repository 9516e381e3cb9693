"""A flow that blocks the event loop is ended, however many there are."""

import asyncio
import time

from rllm.rollouts.watchdog import LEAST_S, BlockedLoop, Watchdog


def test_flows_that_block_one_after_the_other_in_one_turn_of_the_loop_are_all_ended():
    async def block():
        ends = time.monotonic() + 5 * LEAST_S
        while time.monotonic() < ends:
            time.sleep(0.01)
        return "ran to its end"

    async def main():
        with Watchdog(LEAST_S):
            tasks = [asyncio.create_task(block()) for _ in range(2)]
            return await asyncio.gather(*tasks, return_exceptions=True)

    began = time.monotonic()
    ended = asyncio.run(main())
    assert [type(one) for one in ended] == [BlockedLoop, BlockedLoop]
    assert time.monotonic() - began < 4.5 * LEAST_S
