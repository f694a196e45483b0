"""Groups sequences of different lengths into padded micro-batches and checks their rows before any forward.

Padding stands at the end of a sequence, where the causal mask hides it from every real token; it is routed live,
predicts nothing and counts nowhere.

Legend: `t` tokens of a sequence, `s` fed tokens of the longest sequence of a micro-batch (padding included), `b`
sequences, `N = s * b` cells per layer, `L` layers, `K` experts per token, `E` experts, `n` predicted tokens. Flat order
is sequence-major like megatron's activations `[s, b, H]`: fed position i of sequence j is row `i * b + j`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.trainers.base import ReplaySequence, TrainSequence
from strategies.types import LIVE


@dataclass(frozen=True)
class Limits:
    """What the model accepts: the shape and range of a row, the vocabulary, the longest input."""

    num_layers: int
    top_k: int
    num_experts: int
    vocab_size: int
    max_fed: int


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward.

    Attributes:
        indices: positions of its sequences in the caller's list.
        rollout_ids: their ids, for errors.
        token_ids: int64 `[b, s]`.
        rows: int64 `[L, N, K]`, ids ascending in each cell; LIVE in live and padding cells.
        fed: bool `[N]`, False at padding.
        predictions: int64 `[n]`, flat positions whose next token is predicted, sequence by sequence.
        next_ids: int64 `[n]`, those next tokens.
        counts: predictions of each sequence; they sum to n.
        lengths: fed tokens of each sequence, `t - 1`.
    """

    indices: tuple[int, ...]
    rollout_ids: tuple[str, ...]
    token_ids: torch.Tensor
    rows: torch.Tensor
    fed: torch.Tensor
    predictions: torch.Tensor
    next_ids: torch.Tensor
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def padded_tokens(self) -> int:
        """Padding positions."""
        return self.token_ids.numel() - sum(self.lengths)


def group_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Returns groups of indices, longest first, such that `len(group) * longest(group) <= max_tokens`.

    A sequence longer than `max_tokens` forms a group of its own. Equal lengths keep their order.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def micro_batches(
    sequences: Sequence[ReplaySequence], limits: Limits, max_tokens: int, device: torch.device, *, counted_only: bool
) -> list[MicroBatch]:
    """Returns micro-batches of at most `max_tokens` padded tokens that predict every token, or only those with loss.

    All sequences are checked before the first tensor is made.

    Raises:
        ValueError: a sequence is too short or too long, an id is outside the vocabulary, rows have the wrong shape or
            dtype, or a cell holds an id out of range, the same expert twice, or -1 beside an expert; the message names
            rollout, position and layer.
    """
    rows = [_checked_rows(sequence, limits) for sequence in sequences]
    groups = group_by_length([len(sequence.token_ids) - 1 for sequence in sequences], max_tokens)
    return [_pack(group, sequences, rows, device, counted_only) for group in groups]


def _checked_rows(sequence: ReplaySequence, limits: Limits) -> NDArray[np.int16]:
    """Returns the rows as int16 `[t-1, L, K]`, ids ascending in each cell."""
    who = f"rollout {sequence.rollout_id!r}"
    fed, ids = len(sequence.token_ids) - 1, sequence.token_ids
    if not 1 <= fed <= limits.max_fed:
        raise ValueError(f"{who}: {fed + 1} tokens; a forward needs 2..{limits.max_fed + 1}")
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        position = int(np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))[0])
        raise ValueError(f"{who}, position {position}: token id {ids[position]} is outside 0..{limits.vocab_size - 1}")
    expected = (fed, limits.num_layers, limits.top_k)
    if sequence.rows.shape != expected or not np.issubdtype(sequence.rows.dtype, np.integer):
        raise ValueError(
            f"{who}: expected integer rows of shape [t-1, L, K] = {list(expected)}, "
            f"got {sequence.rows.dtype} {list(sequence.rows.shape)}"
        )
    ascending = np.sort(sequence.rows, axis=-1)
    least, most = ascending[..., 0], ascending[..., -1]
    repeated = ((ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] != LIVE)).any(-1)
    wrong = repeated | (least < LIVE) | (most >= limits.num_experts) | ((least == LIVE) & (most != LIVE))  # [t-1, L]
    if wrong.any():
        position, layer = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"{who}, position {position}, layer {layer}: expected {limits.top_k} different experts in "
            f"0..{limits.num_experts - 1}, or {LIVE} in the whole cell, got {sequence.rows[position, layer].tolist()}"
        )
    return ascending.astype(np.int16)


def _pack(
    group: list[int],
    sequences: Sequence[ReplaySequence],
    rows: Sequence[NDArray[np.int16]],
    device: torch.device,
    counted_only: bool,
) -> MicroBatch:
    width, longest = len(group), len(sequences[group[0]].token_ids) - 1
    layers, top_k = rows[group[0]].shape[1:]
    token_ids = np.zeros((width, longest), np.int64)
    packed = np.full((longest, width, layers, top_k), LIVE, np.int16)
    fed = np.zeros((longest, width), bool)
    predictions, next_ids = [], []
    for j, index in enumerate(group):
        sequence = sequences[index]
        length = len(sequence.token_ids) - 1
        token_ids[j, :length] = sequence.token_ids[:-1]
        packed[:length, j] = rows[index]
        fed[:length, j] = True
        counted = np.arange(length)
        if counted_only:
            assert isinstance(sequence, TrainSequence)
            counted = np.flatnonzero(sequence.loss_mask[1:])
        predictions.append(counted * width + j)
        next_ids.append(sequence.token_ids[counted + 1])

    def tensor(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        indices=tuple(group),
        rollout_ids=tuple(sequences[index].rollout_id for index in group),
        token_ids=tensor(token_ids),
        rows=tensor(packed.reshape(-1, layers, top_k)).permute(1, 0, 2).long(),
        fed=tensor(fed.reshape(-1)),
        predictions=tensor(np.concatenate(predictions)),
        next_ids=tensor(np.concatenate(next_ids).astype(np.int64)),
        counts=tuple(len(ids) for ids in next_ids),
        lengths=tuple(len(sequences[index].token_ids) - 1 for index in group),
    )


def checked_train_sequences(sequences: Sequence[TrainSequence]) -> None:
    """Refuses an update that could only be wrong: nothing to train on, or a counted token without its numbers.

    Raises:
        ValueError: the list is empty, a sequence has no counted token, an array has another length than the tokens, or
            a value that the loss reads is not finite; the message names the rollout, and the position where there is
            one.
    """
    if not sequences:
        raise ValueError("an update needs at least one sequence")
    for sequence in sequences:
        who, length = f"rollout {sequence.rollout_id!r}", len(sequence.token_ids)
        arrays = {name: getattr(sequence, name) for name in ("loss_mask", "old_log_probs", "advantages", "weights")}
        if sequence.ref_log_probs is not None:
            arrays["ref_log_probs"] = sequence.ref_log_probs
        for name, values in arrays.items():
            if values.shape != (length,):
                raise ValueError(f"{who}: {name} has shape {list(values.shape)}, expected [t] = [{length}]")
        mask = sequence.loss_mask
        if mask[0] or not mask.any():
            raise ValueError(
                f"{who}: the loss mask must count at least one token, and not token 0 (it has no prediction)"
            )
        for name, values in arrays.items():
            wrong = np.flatnonzero(mask & ~np.isfinite(values))
            if len(wrong):
                raise ValueError(f"{who}, position {wrong[0]}: {name} of a counted token is {values[wrong[0]]}")
    if len({sequence.ref_log_probs is None for sequence in sequences}) > 1:
        without = [sequence.rollout_id for sequence in sequences if sequence.ref_log_probs is None]
        raise ValueError(f"some sequences have ref_log_probs and some have none: {without[:8]}")
