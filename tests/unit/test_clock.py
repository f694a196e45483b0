"""The virtual clock orders work by cost, repeats exactly and says when everything waits for ever."""

import asyncio
import time

import pytest

from experiments.clock import VirtualClock, WallClock


async def worker(clock, name, costs, log):
    for cost in costs:
        await clock.run(lambda: None, cost)
        log.append((name, round(clock.now(), 6)))


def run_two_workers():
    clock, log = VirtualClock(), []

    async def main():
        await asyncio.gather(worker(clock, "decode", [0.3] * 5, log), worker(clock, "update", [0.7, 0.7], log))

    clock.run_loop(main())
    return log


def test_results_become_visible_in_the_order_of_their_costs():
    assert run_two_workers() == [
        ("decode", 0.3),
        ("decode", 0.6),
        ("update", 0.7),
        ("decode", 0.9),
        ("decode", 1.2),
        ("update", 1.4),
        ("decode", 1.5),
    ]


def test_the_same_costs_give_the_same_order():
    assert run_two_workers() == run_two_workers()


def test_virtual_seconds_pass_without_waiting():
    clock = VirtualClock(start_s=100.0)
    started = time.perf_counter()

    async def main():
        await clock.run(lambda: None, 3600.0)
        return clock.now()

    assert clock.run_loop(main()) == pytest.approx(3700.0)
    assert time.perf_counter() - started < 5


def test_a_deadlock_on_the_virtual_clock_is_an_error_not_a_hang():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock on the virtual clock"):
        VirtualClock().run_loop(main())


def test_an_error_in_the_work_reaches_the_caller():
    def fail():
        raise ValueError("no")

    for clock in (VirtualClock(), WallClock()):

        async def main(clock=clock):
            await clock.run(fail, 1.0)

        with pytest.raises(ValueError, match="no"):
            clock.run_loop(main())


def test_the_wall_clock_runs_work_at_the_same_time():
    clock = WallClock()

    async def main():
        await asyncio.gather(*(clock.run(lambda: time.sleep(0.3), 99.0) for _ in range(3)))
        return clock.now()

    started = time.perf_counter()
    clock.run_loop(main())
    assert time.perf_counter() - started < 0.85  # one after the other would take 0.9 s
