"""Routing-merge strategies: from a recorded rollout to the rows that the trainer replays. Imports numpy only."""

from strategies.base import MergeStrategy
from strategies.exact import Exact
from strategies.gated import Gated
from strategies.last_segment import LastSegment
from strategies.live import Live
from strategies.mask_stale import MaskStale
from strategies.naive_concat import NaiveConcat
from strategies.recompute import Recompute
from strategies.replace import Replace
from strategies.shuffled import Shuffled
from strategies.slice_concat import SliceConcat
from strategies.types import LIVE, UNKNOWN_VERSION, EngineCall, MergeError, ReplayView, Rollout, Rows, Segment

__all__ = [
    "LIVE",
    "UNKNOWN_VERSION",
    "EngineCall",
    "Exact",
    "Gated",
    "LastSegment",
    "Live",
    "MaskStale",
    "MergeError",
    "MergeStrategy",
    "NaiveConcat",
    "Recompute",
    "Replace",
    "ReplayView",
    "Rollout",
    "Rows",
    "Segment",
    "Shuffled",
    "SliceConcat",
]
