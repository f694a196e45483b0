"""verl's own trainer, made ours, through whole updates: its queue, batch assembly, advantages, loss and loggers.

Scripted are the message queue, the rollouter's counters and the actor workers, whose "model" reads log-probs off the
replayed rows; what runs in Ray actors otherwise runs in this process (test_ray.py has an actor keep the record).
"""

import asyncio
import dataclasses
import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, RayTaskError
from tensordict import TensorDict
from verl.experimental.fully_async_policy.detach_utils import RolloutSample
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric

from analysis import __main__ as analysis
from analysis.load import read_run
from analysis.runs import load_runs
from experiments import check
from experiments.metrics.registry import undeclared
from experiments.run_dir import write_composition
from experiments.summary import comparison_table, read_summary
from experiments.verl_backend import start as start_module
from experiments.verl_backend.agent_loops import ROLLOUT_FIELD
from experiments.verl_backend.compose import lay_over, verl_defaults
from experiments.verl_backend.launch import (
    ABSENT_IN_VERLS_YAML,
    Job,
    merging_node,
    overrides,
    strategy_mode,
    tracker_opener,
)
from experiments.verl_backend.recorder import Recorder
from experiments.verl_backend.settings import TrainerSettings
from experiments.verl_backend.start import RecordedRunner, supervise
from experiments.verl_backend.trainer import RoutemergeRunner, RoutemergeTrainer
from strategies import MergeError
from tests.conftest import compose
from tests.verl.kit import Reply
from tests.verl.test_agent_loops import merged_output, processed, worker

SCRIPTS = (
    lambda v: [Reply(3, v), Reply(4, v + 1, "stop")],  # interrupted by a sync
    lambda v: [Reply(7, v, "stop")],
)


class Queue:
    """verl's message queue with groups that were generated beforehand."""

    def __init__(self, samples: list[RolloutSample]):
        self.samples = [ray.cloudpickle.dumps(sample) for sample in samples]

    async def get_sample(self) -> Any:
        return (self.samples.pop(0), len(self.samples)) if self.samples else (None, 0)

    def get_queue_size_sync(self) -> int:
        return len(self.samples)


class Reference:
    """A Ray reference to a value that is here already."""

    def __init__(self, value: Any):
        self.value = value

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.value)
        return future


class InProcess:
    """The handle of an actor in this process."""

    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *args: Reference(method(*args)))


class Rollouter:
    """What verl's trainer asks of its rollouter."""

    def get_total_produced_samples(self) -> int:
        return 0

    def get_completed_steps(self) -> int:
        return 0

    def reset_staleness(self) -> dict[str, float]:
        return {"fully_async/rollouter/active_time": 1.0}


class Workers:
    """Actor workers of two data-parallel ranks. A token's log-prob falls by 0.1 for every version of the row that
    predicts it, and rises by 0.01 with every optimiser step; a live row counts as one of version 5.
    """

    world_size = 2

    def __init__(self) -> None:
        self.loss: Any = None
        self.steps, self.scored = 0, 0

    def set_loss_fn(self, loss: Any) -> None:
        self.loss = loss

    def save_model_to_cpu(self, number: int) -> None:
        """verl keeps the weights of the last sync for its old policy; these have none to keep."""

    def _log_probs(self, data: TensorDict) -> torch.Tensor:
        rows = data["routed_experts"]
        version = rows.values()[:, 0, 1].double() - 8
        version = torch.where(version < 0, 5.0, version)
        return torch.nested.nested_tensor_from_jagged(-1.0 - 0.1 * version + 0.01 * self.steps, rows.offsets())

    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        self.scored += 1
        scores = self._log_probs(data)
        out = TensorDict({"log_probs": scores, "entropy": torch.zeros_like(scores)}, batch_size=len(data))
        out.set_non_tensor("metrics", {"mfu": 0.0})
        return out

    def update_actor(self, data: TensorDict) -> TensorDict:
        size = tu.get(data, "mini_batch_size")
        collected: dict[str, list[Any]] = {}
        for start in range(0, len(data), size):
            ranks = [
                self._micro_batches(data, range(start + rank * size // 2, start + (rank + 1) * size // 2), size)
                for rank in range(2)
            ]
            for key in ranks[0]:
                collected.setdefault(key, []).append(Metric.aggregate_dp([rank[key] for rank in ranks]))
            self.steps += 1
        metrics = collected | {"mfu": 0.0, "grad_norm": [0.5] * (len(data) // size)}
        out = TensorDict({}, batch_size=[])
        out.set_non_tensor("metrics", metrics)
        return out

    def _micro_batches(self, data: TensorDict, rows: range, size: int) -> dict[str, Any]:
        collected: dict[str, Any] = {}
        for row in rows:
            part = tu.index_select_tensor_dict(data, [row])
            tu.assign_non_tensor(part, dp_size=2, batch_num_tokens=7 * size, global_batch_size=size)
            _, metrics = self.loss(model_output={"log_probs": self._log_probs(part)}, data=part)
            for key, value in metrics.items():
                if isinstance(value, Metric):
                    collected.setdefault(key, value.init_list()).append(value)
        return collected


def job_of(folder: Path, *arguments: str) -> Job:
    sizes = ("model.num_hidden_layers=2", "model.num_experts=32", "model.num_experts_per_tok=2")
    run = ("algorithm.batch_size=4", "algorithm.group_size=2", "algorithm.mini_batches=2", "steps=4")
    more = ("sampling.max_response_tokens=12", "backend.verl.data.max_prompt_length=8", "tracking=disabled")
    node = compose("experiment=qwen3_moe_tiny_verl", *sizes, *run, *more, *arguments)
    config = check.load(node)
    name = next(a.split("=")[1] for a in arguments if a.startswith("strategy="))
    return Job(config, node, name, folder, "python run.py")


def group(job: Job, number: int, version: int) -> RolloutSample:
    """Returns two trajectories of one prompt, the first interrupted, rewards 1 and 0, as agent loops send them."""
    merging = TrainerSettings.of(OmegaConf.create(settings(job))).merging
    w = worker()
    outputs = []
    for index, script in enumerate(SCRIPTS):
        output = merged_output(script(version), merging)
        rollout = output.extra_fields[ROLLOUT_FIELD]
        output.extra_fields[ROLLOUT_FIELD] = dataclasses.replace(rollout, rollout_id=f"{number}.{index}")
        output.reward_score = float(index == 0)
        outputs.append(processed(w, output))
    batch = w._postprocess(outputs)
    batch.non_tensor_batch["uid"] = np.array([f"uid{number}"] * 2, dtype=object)
    return RolloutSample(batch, str(number), 0, {})


def settings(job: Job) -> dict[str, Any]:
    return overrides(job, strategy_mode(job.config))["routemerge"]


def train(job: Job, updates: int) -> tuple[Workers, int]:
    """Runs verl's `fit` over `updates` updates of two groups; returns the workers and the exit code."""
    verl = lay_over(verl_defaults(), overrides(job, strategy_mode(job.config)), ABSENT_IN_VERLS_YAML)
    OmegaConf.resolve(verl)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    recorded = RecordedRunner(job.run_dir, tracker_opener(job, verl))
    workers = Workers()
    interval = job.config.schedule.sync_interval
    samples = [group(job, 2 * u + g, u // interval) for u in range(updates) for g in range(2)]

    def work() -> None:
        recorded.recorder = InProcess(Recorder(recorded.open_tracker))
        trainer = RoutemergeTrainer(
            config=verl,
            tokenizer=SimpleNamespace(pad_token_id=0),
            role_worker_mapping={},
            resource_pool_manager=SimpleNamespace(get_n_gpus=lambda: 2),
            recorder=recorded.recorder,
        )
        asyncio.run(fit(trainer, workers, samples, updates, interval))

    return workers, supervise(recorded, work)


async def fit(trainer: Any, workers: Workers, samples: list[RolloutSample], updates: int, interval: int) -> None:
    async def update_weights(global_steps: int) -> None:
        return None

    def init_models() -> None:
        trainer.actor_wg = trainer.actor_rollout_wg = workers

    nothing = lambda: None  # noqa: E731
    trainer._init_resource_pools = trainer._create_worker_classes = trainer._init_worker_groups = nothing
    trainer._init_models = init_models
    await trainer.init_workers()
    trainer.message_queue_client = Queue(samples)
    trainer.rollouter = InProcess(Rollouter())
    trainer.checkpoint_manager = SimpleNamespace(update_weights=update_weights)
    trainer._get_dp_size = lambda *a: 2
    trainer.current_param_version = 1  # as after a checkpoint: tokens of an interrupted trajectory are of versions 0, 1
    trainer.set_total_train_steps(updates // interval)
    await trainer.fit()


def rows_of_file(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def get(references: Any) -> Any:
        return [r.value for r in references] if isinstance(references, list) else references.value

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verl_metrics.jsonl"))
    return tmp_path / "run"


def test_a_run_leaves_the_record_of_a_local_run(folder: Path):
    job = job_of(folder, "strategy=slice_concat", "schedule.sync_interval=2", "shadow.every=2")
    workers, code = train(job, updates=5)
    assert code == 0
    assert workers.steps == 10
    rows = rows_of_file(folder / "metrics.jsonl")
    # The last sync and the update after it too, which verl's own log leaves out.
    assert [row["step"] for row in rows] == [4, 6, 7]
    assert undeclared(key for key in rows[0] if key != "step") == []
    summary = json.loads((folder / "summary.json").read_text())
    head = [summary[key] for key in ("status", "strategy", "seed", "steps", "engine", "error")]
    assert head == ["completed", "slice_concat", 0, 7, "verl", None]
    assert summary["versions"]["verl"] == "0.9.1"
    assert summary["config_hash"]
    # Rows of version 0 predict 3 + 7 tokens at 0, those of version 1 four at 0.1; four steps of 0.01 in a cycle.
    first = rows[0]
    assert first["gap/abs_by_segment/last"] > first["gap/abs_by_segment/first"]
    assert first["actor/ppo_kl_by_versions/multi"] > first["actor/ppo_kl_by_versions/single"]
    assert first["loop/counted_tokens"] == 4 * 2 * 7
    assert (first["replay/rollouts"], first["stale/segments_1"], first["stale/segments_2"]) == (8, 4, 4)
    assert (first["reward/mean"], first["fully_async/partial/partial_ratio"]) == (0.5, 0.5)
    assert first["actor/grad_norm"] == 0.5
    lines = rows_of_file(folder / "merge_errors.jsonl")
    assert {line["step"] for line in lines} == {4, 6, 7}
    assert {entry["strategy"] for entry in summary["decision"]["ranking"]} == {"slice_concat", "replace"}
    write_composition(folder, job.node)  # as launch.py does
    run = read_run(folder)
    assert (run.seed, run.statistic("actor/ppo_kl")) == (0, np.mean([row["actor/ppo_kl"] for row in rows]))
    assert set(run.segments["strategy"]) == {"slice_concat", "replace"}
    timings = rows_of_file(folder / "timings.jsonl")
    assert {"time/wall_s", "time/train_s", "time/score_s"} <= set(timings[0])


def test_runs_in_verl_are_read_as_local_runs_are(folder: Path):
    """By the loader, the report and the table; a row is a weight sync, here of two updates, and the last one of one."""
    jobs = [
        job_of(folder / rule, f"strategy={rule}", "schedule.sync_interval=2", "shadow.every=2", "steps=6")
        for rule in ("replace", "slice_concat")
    ]
    for job in jobs:
        assert train(job, updates=5)[1] == 0
        write_composition(job.run_dir, job.node)
    runs = load_runs(folder)
    assert runs.excluded.empty
    assert runs.history["step"].tolist() == [4, 6, 7] * 2
    assert runs.runs["status"].tolist() == ["completed"] * 2
    assert runs.runs["engine"].tolist() == ["verl"] * 2
    assert set(runs.segments["run"]) == {"replace-s0", "slice_concat-s0"}
    assert runs.versions["replace-s0"]["verl"] == "0.9.1"
    table = comparison_table([read_summary(job.run_dir) for job in jobs]).splitlines()
    assert [line.split()[:2] for line in table[1:3]] == [["replace", "0"], ["slice_concat", "0"]]
    assert all("-" not in line.split() for line in table[1:3])
    assert analysis.main(["report", str(folder), "--out", str(folder / "report")]) == 0
    page = (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert "slice_concat" in page
    assert (folder / "report" / "summary.md").is_file()


def test_gated_by_lag_is_merged_with_the_trainers_version(folder: Path):
    """At trainer version 1 and max_lag=0 the rows of version 0 are live, which costs their tokens 0.5 nats here."""
    arguments = ("strategy=gated", "strategy.max_lag=0", "strategy.max_churn=null", "shadow.every=0")
    job = job_of(folder, *arguments)
    _, code = train(job, updates=1)
    assert code == 0
    (row,) = rows_of_file(folder / "metrics.jsonl")
    assert row["gap/abs_by_lag/1"] == pytest.approx(0.5, abs=0.02)
    assert row["gap/abs_by_lag/0"] == pytest.approx(0.1, abs=0.02)
    assert merging_node(job.config, strategy_mode(job.config))["in_trainer"]


def test_decoupled_mode_scores_first_and_logs_the_gap(folder: Path):
    job = job_of(folder, "strategy=replace", "algorithm.old_log_prob=decoupled", "shadow.every=0")
    workers, code = train(job, updates=1)
    assert code == 0
    assert workers.scored == 1
    (row,) = rows_of_file(folder / "metrics.jsonl")
    assert row["actor/ppo_kl_by_mini_step/first"] == pytest.approx(0.0, abs=1e-6)
    assert row["gap/abs_by_versions/multi"] == pytest.approx(0.1, abs=1e-6)
    assert row["gap/abs_by_versions/single"] == pytest.approx(0.0, abs=1e-6)


def test_a_run_that_fails_says_so_in_its_record(folder: Path):
    job = job_of(folder, "strategy=slice_concat", "shadow.every=0")
    verl = OmegaConf.create(overrides(job, strategy_mode(job.config)))
    folder.mkdir()
    recorded = RecordedRunner(folder, tracker_opener(job, verl))

    def work() -> None:
        recorded.recorder = InProcess(Recorder(recorded.open_tracker))
        ray.get(recorded.recorder.log.remote(1, {"actor/ppo_kl": float("nan")}, []))

    assert supervise(recorded, work) == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "actor/ppo_kl=nan" in summary["error"]
    assert (folder / "traceback.txt").is_file()


def test_a_record_that_cannot_be_opened_is_the_reason_that_is_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """W&B out of reach: Ray says that an actor died, and nothing can be asked of the dead."""

    def died(reference: Any) -> Any:
        refused = RuntimeError("W&B cannot be reached")
        text = "ray::Recorder.__init__()\n  File recorder.py\nRuntimeError: W&B cannot be reached"
        raise ActorDiedError(RayTaskError("Recorder.__init__", text, refused))

    actor = SimpleNamespace(ready=SimpleNamespace(remote=lambda: None), finish=SimpleNamespace(remote=lambda *a: None))
    made = SimpleNamespace(options=lambda **o: SimpleNamespace(remote=lambda *a: actor))
    monkeypatch.setattr(ray, "remote", lambda **options: lambda cls: made)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0" * 56))
    monkeypatch.setattr(ray, "get", died)
    folder.mkdir()
    recorded = RecordedRunner(folder, open_tracker=lambda: pytest.fail("in another process"))
    assert supervise(recorded, recorded.remote) == 1
    assert capsys.readouterr().err.splitlines()[0] == "run.py: failed: RuntimeError: W&B cannot be reached"
    assert (folder / "traceback.txt").is_file()


def test_what_an_agent_loop_raised_is_named_through_rays_wrappers():
    error = MergeError("rollout r, call 1 (request r.1): rows expected\nand more")
    assert start_module.reason(RayTaskError("fit", "traceback", error)) == f"MergeError: {str(error).splitlines()[0]}"


def test_verl_is_started_with_our_runner_and_its_own_resources(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """`start` does what verl's own main does; the runner builds our trainer with the recorder."""
    job = job_of(folder, "strategy=slice_concat")
    verl = lay_over(verl_defaults(), overrides(job, strategy_mode(job.config)), ABSENT_IN_VERLS_YAML)
    recorded, started = RecordedRunner(folder, tracker_opener(job, verl)), []
    monkeypatch.setattr(start_module, "run_ppo", lambda config, task_runner_class: started.append(config))
    assert start_module.start(verl, recorded) == 0
    assert started[0].actor_rollout_ref.rollout.n_gpus_per_node == 1

    built: dict[str, Any] = {}

    def remote(**options: Any) -> Any:
        def wrap(cls: type) -> Any:
            def build(**arguments: Any) -> InProcess:
                built.update(cls=cls, **arguments)
                return InProcess(SimpleNamespace(init_workers=lambda: None))

            return SimpleNamespace(remote=build)

        return wrap

    monkeypatch.setattr(ray, "remote", remote)
    runner = RoutemergeRunner("recorder")
    roles = {Role.Actor: object, Role.Rollout: object}
    runner.components = {"role_worker_mapping": roles, "tokenizer": None, "ray_worker_group_cls": object}
    runner._create_trainer(started[0])
    assert (built["cls"], built["recorder"]) == (RoutemergeTrainer, "recorder")
    assert set(built["role_worker_mapping"]) == {Role.Actor}
    assert runner.components["trainer"] is not None


def test_ray_still_lets_the_actor_classes_out():
    for method in ("_fit_compute_log_prob", "_update_actor", "_fit_update_actor", "init_workers", "fit"):
        assert getattr(RoutemergeTrainer, method) is not getattr(RoutemergeTrainer.__mro__[1], method)
    for method in ("_fit_log_aggregated_training_metrics", "_fit_postprocess_step"):
        assert callable(getattr(RoutemergeTrainer.__mro__[1], method))
    assert callable(RoutemergeRunner.__mro__[1]._create_trainer)
