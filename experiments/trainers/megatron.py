"""The megatron-core trainer: GPTModel on one CPU or CUDA device, router replay, AdamW. It knows nothing of strategies.

Sequences are forwarded in padded micro-batches (batching.py) with their rows installed in this model's routers
(replay.py). Logits exist only for predicted positions: all of them when scoring, those with loss in an update.

Legend: `t` tokens of one sequence, `b` sequences and `s` fed tokens of a micro-batch, `n` predicted tokens, `L`
layers, `K` experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig

from experiments.schema import TrainerConfig
from experiments.trainers.base import (
    PolicyLoss,
    ReplayCounts,
    ReplaySequence,
    Score,
    TokenBatch,
    TrainSequence,
    UpdateResult,
)
from experiments.trainers.batching import Limits, MicroBatch, checked_train_sequences, micro_batches
from experiments.trainers.convert import to_huggingface, to_megatron
from experiments.trainers.model import build_model
from experiments.trainers.replay import ModelReplay
from experiments.trainers.runtime import megatron_on, process_groups, resolve_device


@dataclass(frozen=True)
class TrainerStats:
    """Totals since construction.

    Attributes:
        score_s, update_s: wall seconds inside `score` and `update`: batching, forwards, backwards, optimiser.
        model_s: those of them inside the model's forwards and backwards.
        score_tokens, update_tokens: fed tokens, padding not counted.
        padded_tokens: padding positions forwarded.
        swaps: `using` blocks entered.
    """

    score_s: float = 0.0
    update_s: float = 0.0
    model_s: float = 0.0
    score_tokens: int = 0
    update_tokens: int = 0
    padded_tokens: int = 0
    swaps: int = 0


class MegatronTrainer:
    """Implements `experiments.trainers.base.Trainer`.

    `weights` are in the layout of transformers' `Qwen3MoeForCausalLM.state_dict()` and are trained in float32.
    Log-probs are those of the distribution at `temperature`. Call `close` (or use `with`) when done: torch.distributed
    is process-wide.

    Raises:
        ValueError: an unsupported model configuration, weights that do not fit it, an unknown device, a temperature
            that is not positive.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        settings: TrainerConfig,
        temperature: float,
    ):
        if not temperature > 0:
            raise ValueError(f"sampling.temperature must be above 0 for training, got {temperature}")
        self._config = config
        self._settings = settings
        self._temperature = temperature
        self._device = resolve_device(settings.device)
        self._limits = Limits(
            num_layers=config.num_hidden_layers,
            top_k=config.num_experts_per_tok,
            num_experts=config.num_experts,
            vocab_size=config.vocab_size,
            max_fed=config.max_position_embeddings,
        )
        self._stats = TrainerStats()
        self._model_s = 0.0
        self._swapped = 0
        self._steps = 0
        process_groups.acquire(self._device)
        self._closed = False
        try:
            with megatron_on(self._device):
                self._model = build_model(
                    config, weights, self._device, recompute_activations=settings.recompute_activations
                )
            self._replay = ModelReplay(self._model, config.num_experts)
            self._named = dict(self._model.named_parameters())
            self._optimizer = torch.optim.AdamW(
                self._named.values(),
                lr=settings.learning_rate,
                betas=(settings.adam_beta1, settings.adam_beta2),
                weight_decay=settings.weight_decay,
                fused=True,
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MegatronTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the process group; the last trainer of the process takes it down. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            process_groups.release()

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._device

    def stats(self) -> TrainerStats:
        """Returns totals since construction."""
        return self._stats

    @torch.no_grad()
    def score(self, sequences: Sequence[ReplaySequence], *, entropy: bool = False, routes: bool = False) -> list[Score]:
        """Returns log-probs under the current weights with the rows replayed, in the order of `sequences`.

        With `routes`, `rows` are the experts that the forward used, ids ascending in each cell, and `margins` those of
        the live router.

        Raises:
            ValueError: rows or tokens that do not fit the model; names rollout, position and layer, before any forward.
            RuntimeError: a router did not execute its rows.
        """
        start = time.perf_counter()
        batches = self._micro_batches(sequences, counted_only=False)
        scores: list[Score | None] = [None] * len(sequences)
        for batch in batches:
            with self._replay.replaying(batch.rows, batch.fed, margins=routes), megatron_on(self._device):
                distribution = torch.log_softmax(self._logits(batch), dim=-1)  # [n, vocabulary]
                self._replay.check_executed(calls=1)
                log_probs = _per_sequence(_pick(distribution, batch.next_ids), batch)
                entropies = _per_sequence(_entropy(distribution), batch) if entropy else [None] * len(log_probs)
                used = _split_cells(self._replay.used_rows().to(torch.int16), batch) if routes else None
                margins = _split_cells(self._replay.margins(), batch) if routes else None
            for j, index in enumerate(batch.indices):
                scores[index] = Score(
                    log_probs=log_probs[j],
                    entropy=entropies[j],
                    rows=used[j] if used else None,
                    margins=margins[j] if margins else None,
                )
        self._account(batches, "score", start)
        return [score for score in scores if score is not None]

    def update(self, sequences: Sequence[TrainSequence], loss: PolicyLoss, *, entropy: bool) -> UpdateResult:
        """Takes one AdamW step on the sum of `loss` over all micro-batches and returns what it saw.

        `log_probs` of the result are NaN where a token carries no loss: its logits are never computed.

        Raises:
            ValueError: a sequence without counted tokens, counted tokens without finite numbers, rows that do not fit;
                before any forward.
            RuntimeError: a router did not execute its rows, or a loss or gradient is not finite; names the rollouts,
                before the step.
        """
        if self._swapped:
            raise RuntimeError("update inside `using`: those weights are borrowed for scoring; leave the block first")
        start = time.perf_counter()
        checked_train_sequences(sequences)
        batches = self._micro_batches(sequences, counted_only=True)
        self._optimizer.zero_grad(set_to_none=True)
        log_probs: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(sequences)
        total_loss, total_entropy, counts = 0.0, 0.0, ReplayCounts(0, 0, 0)
        norm = torch.zeros(())
        try:
            for batch in batches:
                tokens, share, replayed = self._forward_backward(batch, sequences, loss, entropy)
                norm = self._gradient_norm(batch)
                counts += replayed
                total_loss += share
                if tokens.entropy is not None:
                    total_entropy += tokens.entropy.detach().sum().item()
                for index, values in zip(batch.indices, _flat_split(tokens.log_probs.detach(), batch), strict=True):
                    log_probs[index] = np.full(len(sequences[index].token_ids), np.nan, np.float32)
                    log_probs[index][sequences[index].loss_mask] = values
            torch.nn.utils.clip_grads_with_norm_(self._named.values(), self._settings.max_grad_norm, norm)
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._steps += 1
        self._account(batches, "update", start)
        counted = sum(sum(batch.counts) for batch in batches)
        return UpdateResult(
            loss=total_loss,
            grad_norm=norm.item(),
            log_probs=log_probs,
            entropy=total_entropy / counted if entropy else None,
            replay=counts,
        )

    def _forward_backward(
        self, batch: MicroBatch, sequences: Sequence[TrainSequence], loss: PolicyLoss, entropy: bool
    ) -> tuple[TokenBatch, float, ReplayCounts]:
        """Returns the tokens of one micro-batch, its share of the loss and how it was routed, with gradients
        accumulated."""
        with self._replay.replaying(batch.rows, batch.fed), megatron_on(self._device):
            distribution = torch.log_softmax(self._logits(batch), dim=-1)  # [n, vocabulary]
            replayed = self._replay.check_executed(calls=1)
            tokens = self._token_batch(batch, sequences, distribution, entropy)
            share = loss(tokens)
            if share.shape != () or not share.requires_grad:
                raise RuntimeError(
                    f"the policy loss must return a scalar with gradient, got shape {list(share.shape)}, "
                    f"requires_grad={share.requires_grad}"
                )
            value = share.item()
            if not np.isfinite(value):
                raise RuntimeError(f"the policy loss is {value} on rollouts {list(batch.rollout_ids)}")
            started = time.perf_counter()
            share.backward()
            self._model_s += self._elapsed(started)
            if self._settings.recompute_activations:
                self._replay.check_executed(calls=2)
        return tokens, value, replayed

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        """Returns float32 `[n, vocabulary]`: logits of the predicted positions, divided by the temperature."""

        def predict(
            *, hidden_states: torch.Tensor, output_layer: torch.nn.Module, output_weight: torch.Tensor | None, **_: Any
        ) -> torch.Tensor:
            chosen = hidden_states.flatten(0, 1).index_select(0, batch.predictions)  # [n, H]
            logits, _bias = output_layer(chosen[:, None], weight=output_weight)
            return logits[:, 0]

        started = time.perf_counter()
        length = batch.token_ids.shape[1]
        positions = torch.arange(length, device=self._device).expand_as(batch.token_ids)
        logits = self._model(batch.token_ids, positions, None, output_processor=predict)
        self._model_s += self._elapsed(started)
        return logits.float() / self._temperature

    def _elapsed(self, started: float) -> float:
        """Returns the seconds since `started` at which the device had finished what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def _token_batch(
        self, batch: MicroBatch, sequences: Sequence[TrainSequence], distribution: torch.Tensor, entropy: bool
    ) -> TokenBatch:
        members = [sequences[index] for index in batch.indices]

        def gathered(name: str) -> torch.Tensor:
            values = [getattr(sequence, name)[sequence.loss_mask] for sequence in members]
            return torch.from_numpy(np.concatenate(values).astype(np.float32)).to(self._device)

        groups = np.repeat([sequence.group for sequence in members], batch.counts)
        return TokenBatch(
            log_probs=_pick(distribution, batch.next_ids),
            entropy=_entropy(distribution) if entropy else None,
            old_log_probs=gathered("old_log_probs"),
            advantages=gathered("advantages"),
            weights=gathered("weights"),
            ref_log_probs=gathered("ref_log_probs") if members[0].ref_log_probs is not None else None,
            group=torch.from_numpy(groups.astype(np.int64)).to(self._device),
        )

    def _gradient_norm(self, batch: MicroBatch) -> torch.Tensor:
        """Returns the global L2 norm of the gradient accumulated so far; finite, or the newest micro-batch is named."""
        gradients = [parameter.grad for parameter in self._named.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm is {norm.item()} after rollouts {list(batch.rollout_ids)}; no step was taken"
            )
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns detached float32 copies on the CPU, in the layout of transformers'
        `Qwen3MoeForCausalLM.state_dict()`."""
        return self._exported({name: parameter.detach() for name, parameter in self._named.items()})

    @contextmanager
    def using(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Scores under other weights inside the block; leaving it puts back the very tensors of before.

        Raises:
            ValueError: weights that do not fit the model.
        """
        borrowed = to_megatron(weights, self._config)
        own = {name: parameter.data for name, parameter in self._named.items()}
        self._stats = replace(self._stats, swaps=self._stats.swaps + 1)
        self._swapped += 1
        try:
            for name, parameter in self._named.items():
                parameter.data = borrowed[name].detach().to(self._device, torch.float32)
            yield
        finally:
            self._swapped -= 1
            for name, parameter in self._named.items():
                parameter.data = own[name]

    def state_dict(self) -> dict[str, Any]:
        """Returns `weights`, AdamW's `exp_avg` and `exp_avg_sq` (all in transformers' layout, CPU) and `steps`.

        The moments are empty dicts before the first step.
        """
        state: dict[str, Any] = {"weights": self.weights(), "exp_avg": {}, "exp_avg_sq": {}, "steps": self._steps}
        if self._steps:
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors = {name: self._optimizer.state[parameter][moment] for name, parameter in self._named.items()}
                state[moment] = self._exported(tensors)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict()` bit for bit.

        Raises:
            ValueError: tensors that do not fit the model; nothing was changed then.
        """
        weights = to_megatron(state["weights"], self._config)
        steps = int(state["steps"])
        moments = {m: to_megatron(state[m], self._config) for m in ("exp_avg", "exp_avg_sq")} if steps else {}
        self._optimizer.state.clear()
        for name, parameter in self._named.items():
            parameter.copy_(weights[name])
            if steps:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(steps), device=self._device),
                    **{m: moments[m][name].to(self._device, copy=True) for m in moments},
                }
        self._steps = steps

    def _exported(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        exported = to_huggingface(state, self._config)
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in exported.items()}

    def _micro_batches(self, sequences: Sequence[ReplaySequence], *, counted_only: bool) -> list[MicroBatch]:
        budget = self._settings.max_tokens_per_micro_batch
        return micro_batches(sequences, self._limits, budget, self._device, counted_only=counted_only)

    def _account(self, batches: Sequence[MicroBatch], kind: str, start: float) -> None:
        fed = sum(sum(batch.lengths) for batch in batches)
        stats = self._stats
        self._stats = replace(
            stats,
            model_s=self._model_s,
            padded_tokens=stats.padded_tokens + sum(batch.padded_tokens for batch in batches),
            **{
                f"{kind}_s": getattr(stats, f"{kind}_s") + self._elapsed(start),
                f"{kind}_tokens": getattr(stats, f"{kind}_tokens") + fed,
            },
        )


def _pick(distribution: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns `[n]`: the log-prob of each id under log-probs `[n, vocabulary]`."""
    return distribution.gather(1, ids[:, None])[:, 0]


def _entropy(distribution: torch.Tensor) -> torch.Tensor:
    """Returns `[n]`: -sum p ln p, nats, of log-probs `[n, vocabulary]`."""
    return -(distribution.exp() * distribution).sum(-1)


def _flat_split(values: torch.Tensor, batch: MicroBatch) -> list[NDArray[np.float32]]:
    return np.split(values.cpu().numpy(), np.cumsum(batch.counts)[:-1])


def _per_sequence(values: torch.Tensor, batch: MicroBatch) -> list[NDArray[np.float32]]:
    """Returns float32 `[t]` per sequence from `[n]` predictions of tokens 1..t-1; NaN at 0."""
    return [np.concatenate([np.full(1, np.nan, np.float32), part]) for part in _flat_split(values, batch)]


def _split_cells(cells: torch.Tensor, batch: MicroBatch) -> list[NDArray[Any]]:
    """Returns `[t-1, L, ...]` per sequence from `[L, N, ...]`."""
    length = batch.token_ids.shape[1]
    array = cells.reshape(cells.shape[0], length, -1, *cells.shape[2:]).cpu().numpy()  # [L, s, b, ...]
    return [np.ascontiguousarray(array[:, :fed, j].swapaxes(0, 1)) for j, fed in enumerate(batch.lengths)]
