"""The one contract of a merge strategy."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from strategies.types import ReplayView, Rollout


@runtime_checkable
class MergeStrategy(Protocol):
    """A pure function from a recorded rollout to the views that the trainer replays.

    `single_view` says whether every rollout yields exactly one view. Losses that need all tokens of a rollout in one
    forward (a sequence-level importance ratio) accept only such strategies.

    A strategy may also declare `new_rows_only = True`: of a resumed call it needs the rows from position `s - 1` on
    alone (those of the tokens that the call fed first), so that an engine need not send the others.
    """

    single_view: ClassVar[bool]

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        """Returns the replay views of `rollout`; an empty list when it has no generated token and needs none.

        Raises:
            MergeError: rows that this strategy needs are missing or inconsistent. Never a guess, never zeros.
        """
        ...


def needs_new_rows_only(strategy: MergeStrategy) -> bool:
    """Says whether the strategy declares `new_rows_only`; it needs all rows of every call when it does not."""
    return bool(getattr(strategy, "new_rows_only", False))
