"""Scores a recording: the shadow scoring of a run, on its recorded rollouts, without the run.

Under the weights that the trainer held (the default) and with the strategies of the run, the numbers are those that the
run wrote.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig

from experiments.decision import decision_table
from experiments.launch import Interrupt, Job, as_config_errors, interruptible, shadow_plan, supervise
from experiments.learner import needs_own_scores
from experiments.metrics.ratios import shadow_metrics
from experiments.recording import RecordedUpdate, Recording
from experiments.run_dir import write_composition
from experiments.schema import OldLogProb
from experiments.score_plan import ScorePlan, score_plan
from experiments.scoring import BatchScorer, freeze_live_rows, merge
from experiments.shadow import ShadowScorer
from experiments.shadow_report import Line, ShadowReport
from experiments.tracking import Tracker
from experiments.trainers.convert import check_supported
from experiments.trainers.megatron import MegatronTrainer
from experiments.trainers.runtime import resolve_device
from experiments.weight_history import WeightHistory

Tensors = dict[str, torch.Tensor]


def score(job: Job) -> int:
    """Scores the recording of `job.config` and returns the exit code.

    Raises:
        ConfigError: the recording, what is asked of it or the run directory do not fit.
    """
    plan = score_plan(job.config)
    torch.set_num_threads(plan.config.threads or os.cpu_count() or 1)
    with as_config_errors():
        model = Qwen3MoeConfig.from_dict(plan.recording.model)
        check_supported(model)
        tracker = Tracker(
            job.run_dir,
            plan.node,
            strategy=plan.recording.strategy,
            device=str(resolve_device(plan.config.trainer.device)),
            command=job.command,
            resume_after=None,
        )
        write_composition(job.run_dir, plan.node)
    with interruptible(Interrupt()):
        return supervise(tracker, lambda: _score(plan, model, tracker), lambda summary: _closing(plan, summary))


def _score(plan: ScorePlan, model: Qwen3MoeConfig, tracker: Tracker) -> None:
    recording, version = plan.recording, plan.version
    weights = _tensors(recording.weights_before(plan.steps[0]) if version is None else recording.weights(version))
    settings, temperature = plan.config.trainer, plan.config.sampling.temperature
    with MegatronTrainer(model, weights, settings=settings, temperature=temperature) as trainer:
        history = WeightHistory({})
        shadow = ShadowScorer(trainer, shadow_plan(plan.config, plan.strategies), history)
        for step in plan.steps:
            started = time.perf_counter()
            update = recording.update(step)
            _load(history, recording, update)
            if version is None:
                weights = _tensors(recording.weights_before(step))
            with trainer.using(weights):
                metrics, lines = _score_update(plan, trainer, shadow, update)
            tracker.log(step, metrics, {"time/score_s": time.perf_counter() - started}, lines)


def _score_update(
    plan: ScorePlan, trainer: MegatronTrainer, shadow: ShadowScorer, update: RecordedUpdate
) -> tuple[dict[str, float], list[Line]]:
    """Returns what shadow scoring reports of a batch, with the would-be ratios of the run's own strategy too.

    The order of the forwards is that of experiments/learner.py: which sequences share a micro-batch decides how sums
    round.
    """
    name, algorithm = plan.recording.strategy, plan.config.algorithm
    rollouts = [sample.rollout for sample in update.samples]
    own = {name: freeze_live_rows(trainer, rollouts, merge(plan.strategy, rollouts))}
    scorer = BatchScorer(trainer, rollouts)
    if needs_own_scores(algorithm):
        scorer.score(own)
    scores = shadow.score(update.step - 1, scorer, rollouts, own)
    decoupled = algorithm.old_log_prob is OldLogProb.decoupled
    report = ShadowReport(rollouts, update.trainer_version, scores, update.advantages, decoupled, algorithm)
    metrics = report.metrics(name, live_after=None) | shadow_metrics(report.tables[name], algorithm, name)
    return metrics, report.lines()


def _load(history: WeightHistory, recording: Recording, update: RecordedUpdate) -> None:
    """Makes the history hold the weights that sampled the batch, and no others."""
    history.keep(update.versions)
    for version in update.versions:
        if history.get(version) is None:
            history.publish(version, _tensors(recording.weights(version)))


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> Tensors:
    # Copies: torch aligns memory for its kernels, a file does not, and kernels may round by alignment.
    return {name: torch.from_numpy(array).clone() for name, array in arrays.items()}


def _closing(plan: ScorePlan, summary: Mapping[str, Any]) -> str:
    """Returns the ranking of the strategies, and where the numbers are."""
    weights = "the weights before each" if plan.version is None else f"weight version {plan.version}"
    head = f"{plan.recording.folder}: {summary['steps']} of {len(plan.steps)} updates scored under {weights}"
    decision = summary["decision"]
    table = (
        decision_table(decision)
        if decision
        else ["nothing to rank: only exact was scored, or no rollout has exact rows"]
    )
    return "\n".join(["", head, "", *table, "", f"folder   {summary['folder']}"])
