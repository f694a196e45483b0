# pyright: reportMissingImports=false
"""verl's rollouter, that fails when generation fails.

verl's own prints what an agent loop raised, sends the trainer the signal that all is generated, and returns: the run
would end as a completed one, many updates short.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter

# Ray keeps the class itself: what it exports cannot be subclassed.
Rollouter: Any = FullyAsyncRollouter.__ray_metadata__.modified_class  # pyright: ignore[reportFunctionMemberAccess]

RESOURCES = {"num_cpus": 10, "max_concurrency": 100}
"""What verl gives its rollouter."""


class RoutemergeRollouter(Rollouter):
    """verl's rollouter; `fit` raises what ended generation before its time."""

    _failure: Exception | None = None

    async def fit(self) -> None:
        """As verl's.

        Raises:
            Exception: what an agent loop raised, `MergeError` and `ReplyError` among them.
        """
        await super().fit()
        if self._failure is not None:
            raise self._failure

    async def _streaming_generation_main(self) -> None:
        try:
            await super()._streaming_generation_main()
        except Exception as failure:
            self._failure = failure
            raise
