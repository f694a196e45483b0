"""Two clocks for one loop: virtual seconds for runs that repeat bit for bit, wall seconds for real concurrency.

Everything that takes time goes through `Clock.run`. On the virtual clock the work is computed at once, and its result
becomes visible after its configured cost in virtual seconds; coroutines that wait meanwhile run in the order that the
costs dictate, on any machine. On the wall clock the work runs in a thread and takes what it takes.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Time as the loop sees it, in seconds."""

    def now(self) -> float:
        """Returns seconds since the clock's zero."""
        ...

    async def run(self, work: Callable[[], T], cost_s: float) -> T:
        """Computes `work()` and returns its result once its cost has passed."""
        ...

    def run_loop(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs `main` to its end in an event loop of this clock; like `asyncio.run`."""
        ...


class _VirtualSelector(selectors.DefaultSelector):
    """Turns waiting for a timer into a jump of the virtual time.

    asyncio calls `select(timeout)` with the seconds until its next timer when no callback is ready; None means that no
    timer is set either.
    """

    def __init__(self, start_s: float):
        super().__init__()
        self.now_s = start_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise RuntimeError(
                "deadlock on the virtual clock: every coroutine waits and no work is scheduled "
                "(is the engine paused for ever, or the staleness threshold too low to fill one batch?)"
            )
        self.now_s += max(timeout, 0.0)
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop whose `time()` is the selector's virtual time."""

    def __init__(self, selector: _VirtualSelector):
        super().__init__(selector)
        self._virtual = selector

    def time(self) -> float:
        return self._virtual.now_s


class VirtualClock:
    """A discrete-event schedule: the same costs give the same order of events, bit for bit."""

    def __init__(self, start_s: float = 0.0):
        self._selector = _VirtualSelector(start_s)

    def now(self) -> float:
        return self._selector.now_s

    async def run(self, work: Callable[[], T], cost_s: float) -> T:
        result = work()
        await asyncio.sleep(cost_s)
        return result

    def run_loop(self, main: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=lambda: _VirtualLoop(self._selector)) as runner:
            return runner.run(main)


class WallClock:
    """Real time: engine and trainer work in threads at the same time; costs are ignored."""

    def __init__(self, start_s: float = 0.0):
        self._start_s = start_s
        self._zero: float | None = None
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="routemerge")

    def now(self) -> float:
        time = asyncio.get_running_loop().time()
        if self._zero is None:
            self._zero = time - self._start_s
        return time - self._zero

    async def run(self, work: Callable[[], T], cost_s: float) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def run_loop(self, main: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run(main)
        finally:
            self._pool.shutdown(wait=True)
