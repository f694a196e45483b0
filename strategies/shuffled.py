"""The rule `shuffled`: a negative control. The right rows at the wrong positions show what replay is worth at worst."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.checks import check_rollout, one_view, prompt_view
from strategies.slice_concat import first_fed_rows
from strategies.types import ReplayView, Rollout


@dataclass(frozen=True)
class Shuffled:
    """One view: the rows of `slice_concat` permuted over positions on purpose; loss on all response tokens.

    Attributes:
        seed: with the rollout's id (its CRC-32) it fixes the permutation.
    """

    seed: int
    single_view: ClassVar[bool] = True
    new_rows_only: ClassVar[bool] = True
    misaligned: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        check_rollout(rollout)
        if not any(rollout.segments()):
            return prompt_view(rollout)
        rows = first_fed_rows(rollout)[1]
        random = np.random.default_rng([self.seed, zlib.crc32(rollout.rollout_id.encode())])
        return one_view(rollout, rows[random.permutation(len(rows))])
