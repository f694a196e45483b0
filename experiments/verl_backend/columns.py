"""What the actor workers must know of every response token, as one column of verl's batch.

The loss sees micro-batches of padded columns. Segment, number of segments, version lag and whether the rollout has
several versions travel in one integer a token, so that its statistics have the splits of the local loop.

Legend: `B` trajectories, `R` response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics.tokens import NO_BOUNDARY, UNKNOWN_LAG, TokenTable
from strategies.types import UNKNOWN_VERSION, ReplayView, Rollout

Int = NDArray[np.int64]

BITS, MASK = 16, 0xFFFF
"""Lag + 1, segment and number of segments take 16 bits each; the flag of several versions is above them."""


def token_column(rollouts: Sequence[Rollout], width: int, trainer_version: int) -> Int:
    """Returns int64 `[B, width]`, one code per response token; 0 where no call generated one with a log-prob.

    Raises:
        RuntimeError: a token is newer than the trainer.
    """
    codes = np.zeros((len(rollouts), width), np.int64)
    nothing = [[np.zeros(rollout.length)] for rollout in rollouts]
    views = [[ReplayView(np.zeros((0, 1, 1), np.int8), rollout.counted())] for rollout in rollouts]
    table = TokenTable.from_views(
        rollouts, views, nothing, old_log_probs=None, advantages=None, trainer_version=trainer_version
    )
    prompt = np.array([rollout.prompt_len for rollout in rollouts], np.int64)
    lag = np.minimum(table.lag - UNKNOWN_LAG, MASK)
    code = lag | table.segment << BITS | table.segments << 2 * BITS | table.multi_version.astype(np.int64) << 3 * BITS
    codes[table.rollout, table.position - prompt[table.rollout]] = code
    return codes


def token_table(
    codes: Int, sequence: Int, log_probs: Any, old_log_probs: Any, rollout_log_probs: Any, advantages: Any
) -> TokenTable:
    """Returns the table of counted tokens `[N]`, in order of sequences; positions and versions are not in it.

    Args:
        codes: of `token_column`. sequence: index of each token's sequence, 0, 1, ...
        log_probs, old_log_probs, rollout_log_probs, advantages: float `[N]`.

    Raises:
        RuntimeError: one of them is not finite.
    """
    names = tuple(f"sequence {i} of the micro-batch" for i in range(int(sequence.max(initial=-1)) + 1))
    return TokenTable(
        rollout_log_probs=np.asarray(rollout_log_probs, np.float64),
        log_probs=np.asarray(log_probs, np.float64),
        old_log_probs=np.asarray(old_log_probs, np.float64),
        advantages=np.asarray(advantages, np.float64),
        rollout=sequence,
        position=np.zeros_like(codes),
        segment=codes >> BITS & MASK,
        segments=codes >> 2 * BITS & MASK,
        version=np.full_like(codes, UNKNOWN_VERSION),
        lag=(codes & MASK) + UNKNOWN_LAG,
        boundary=np.full_like(codes, NO_BOUNDARY),
        multi_version=(codes >> 3 * BITS).astype(bool),
        trainer_version=0,
        rollout_ids=names,
    )
