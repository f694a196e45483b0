"""A user's strategy that works only where every position has one row in all calls."""

import numpy as np

from strategies import Exact, MergeError, Replace, SliceConcat


class OneRow(SliceConcat):
    """As slice_concat; refuses a rollout in which a call, or the views of another rule, have other rows."""

    def __call__(self, rollout):
        views = super().__call__(rollout)
        for call in rollout.calls:
            if call.rows is not None and not np.array_equal(call.rows, views[0].rows[: call.end - 1]):
                raise MergeError(f"rollout {rollout.rollout_id}: request {call.request_id} used other rows")
        for rule in (Exact(), Replace()):
            if [view.rows.tolist() for view in rule(rollout)] != [view.rows.tolist() for view in views]:
                raise MergeError(f"rollout {rollout.rollout_id}: {rule} has other rows")
        return views
