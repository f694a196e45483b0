"""A user's strategy that never has the rows that it needs."""

from strategies import MergeError


class AlwaysFails:
    single_view = True

    def __call__(self, rollout):
        raise MergeError(f"rollout {rollout.rollout_id}: rows of every call expected, none wanted")
