"""The published weights that unfinished or untrained tokens were sampled under, by weight version.

Splitting a log-ratio into its causes, and auditing rows, needs the weights that generated a token. They are kept as
long as a token that waits for the trainer, or may still be sampled, refers to them: a few versions, whatever the length
of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Weights = Mapping[str, torch.Tensor]


class WeightHistory:
    """Published weights by version, transformers' state_dict layout. The tensors are shared with whoever published them
    and must not be written to.
    """

    def __init__(self, weights: Mapping[int, Weights]):
        self._weights = dict(weights)

    def publish(self, version: int, weights: Weights) -> None:
        """Adds the weights of a new version."""
        self._weights[version] = weights

    def keep(self, versions: Iterable[int]) -> None:
        """Drops every version that is not in `versions`."""
        wanted = set(versions)
        self._weights = {version: w for version, w in self._weights.items() if version in wanted}

    def get(self, version: int) -> Weights | None:
        """Returns the weights of `version`; None when they are not kept (or the version is not known)."""
        return self._weights.get(version)

    @property
    def versions(self) -> list[int]:
        """The kept versions, oldest first."""
        return sorted(self._weights)

    @property
    def nbytes(self) -> int:
        """Size of what is kept, bytes."""
        return sum(tensor.nbytes for weights in self._weights.values() for tensor in weights.values())

    def state_dict(self) -> dict[int, Weights]:
        """Returns what the constructor takes."""
        return dict(self._weights)
