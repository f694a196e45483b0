"""The one contract of a merge strategy."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from strategies.types import ReplayView, Rollout


@runtime_checkable
class MergeStrategy(Protocol):
    """A pure function from a recorded rollout to the views that the trainer replays.

    `single_view` says whether every rollout yields exactly one view. Losses that need all tokens of a rollout in one
    forward (a sequence-level importance ratio) accept only such strategies.
    """

    single_view: ClassVar[bool]

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        """Returns the replay views of `rollout`; an empty list when it has no generated token and needs none.

        Raises:
            MergeError: rows that this strategy needs are missing or inconsistent. Never a guess, never zeros.
        """
        ...
