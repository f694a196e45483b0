"""The rollout path of verl under a local Ray: its agent-loop worker, loop, client, balancer and batch assembly.

Only the engine is scripted. The loops come from the file that a run writes, the model folder from `tiny.py`.
"""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from omegaconf import OmegaConf
from verl.experimental.fully_async_policy.detach_utils import RolloutSample, assemble_batch_from_rollout_samples
from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncAgentLoopManager
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.router import get_router_handle

from experiments import check
from experiments.verl_backend import tiny
from experiments.verl_backend.agent_loops import ROLLOUT_FIELD
from experiments.verl_backend.compose import lay_over, verl_defaults
from experiments.verl_backend.launch import (
    ABSENT_IN_VERLS_YAML,
    Job,
    agent_loops,
    overrides,
    strategy_mode,
    tracker_opener,
)
from experiments.verl_backend.start import RecordedRunner, supervise
from strategies import ReplayView, Rollout, SliceConcat
from tests.conftest import ROOT, compose


class ScriptedServer:
    """Aborts after 3 tokens under version 0, ends with 4 more under version 1; rows show position and version."""

    def __init__(self) -> None:
        self.calls: dict[Any, int] = {}

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None):
        from verl.workers.rollout.replica import TokenOutput

        key = tuple(prompt_ids[:20])  # the prompts of the test differ within 20 tokens
        version = self.calls.get(key, 0)
        self.calls[key] = version + 1
        new = 3 if version == 0 else 4
        rows = np.zeros((len(prompt_ids) + new - 1, 4, 4), np.int32) + np.arange(4)
        rows[..., 0] = 8 + version
        return TokenOutput(
            token_ids=[10 + i for i in range(new)],
            log_probs=[-0.5] * new,
            routed_experts=rows,
            stop_reason="abort" if version == 0 else "stop",
            extra_fields={"global_steps": version},
        )


@pytest.fixture(scope="module")
def local_ray():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_model(folder, tiny.save_tokenizer(folder))
    return folder


def generate(model: Path, folder: Path, *arguments: str) -> DataProto:
    """Returns the group of two prompts that verl's agent-loop worker makes of `ScriptedServer`'s answers."""
    common = (f"model.checkpoint={model}", "sampling.max_response_tokens=12")
    node = compose("experiment=qwen3_moe_tiny_verl", *common, *arguments)
    config = check.load(node)
    mode = strategy_mode(config)
    OmegaConf.save(agent_loops(config, mode), folder / "agent_loops.yaml")
    values = overrides(Job(config, node, "mine", folder, "python run.py"), mode)
    verl = lay_over(verl_defaults(), values, ABSENT_IN_VERLS_YAML)
    server = ray.remote(ScriptedServer).remote()
    client = FullyAsyncLLMServerClient(config=verl, load_balancer_handle=get_router_handle(servers={"fake:0": server}))
    manager = FullyAsyncAgentLoopManager.create(config=verl, llm_client=client)
    messages = [[{"role": "user", "content": word}] for word in ("abcd", "efg")]
    batch = DataProto.from_single_dict({"raw_prompt": np.array(messages, dtype=object)})
    batch.non_tensor_batch["agent_name"] = np.array(["single_turn_agent"] * 2, dtype=object)
    return asyncio.run(manager.generate_sequences_single(batch))


def test_the_strategy_of_the_run_decides_the_rows_in_verls_training_batch(local_ray: None, model: Path, tmp_path: Path):
    out = generate(model, tmp_path, "strategy=slice_concat")
    for row in range(2):
        mask = out.batch["attention_mask"][row].bool()
        prompt = int(mask.sum()) - 7
        versions = (out.batch["routed_experts"][row, mask, 0, 0] - 8).tolist()
        assert versions == [0] * (prompt + 2) + [1] * 4 + [-8]  # verl's own padding row, which its mask leaves out
        assert [call.rows is None for call in out.non_tensor_batch[ROLLOUT_FIELD][row].calls] == [False, False]
    sample = ray.cloudpickle.loads(ray.cloudpickle.dumps(RolloutSample(out, "s", 0, {})))
    assembled = assemble_batch_from_rollout_samples([sample], None, None)
    assert assembled.meta_info["fully_async/partial/partial_ratio"] == 1.0
    versions = [r.versions()[r.prompt_len :].tolist() for r in assembled.non_tensor_batch[ROLLOUT_FIELD]]
    assert versions == [[0, 0, 0, 1, 1, 1, 1]] * 2


class Failing(SliceConcat):
    """A user's class with a fault."""

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        if rollout.rollout_id != "probe":  # run.py tries it on that one
            raise KeyError("my_table")
        return super().__call__(rollout)


def test_a_users_class_that_raises_in_a_worker_is_named_with_its_trajectory(
    local_ray: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recorded = RecordedRunner(tmp_path, open_tracker=lambda: pytest.fail("no record"))
    target = "strategy._target_=tests.verl.test_ray.Failing"
    assert supervise(recorded, lambda: generate(model, tmp_path, "strategy=slice_concat", target) and None) == 1
    text = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(
        r"run\.py: failed: RuntimeError: rollout [0-9a-f]{32}, strategy Failing: KeyError: 'my_table'", text
    )
    assert "merge_rows" in (tmp_path / "traceback.txt").read_text()


class Nothing:
    """In the place of verl's runner."""

    def __init__(self, recorder: Any):
        self.recorder = recorder

    def log(self, step: int, value: float) -> None:
        ray.get(self.recorder.log.remote(step, {"actor/ppo_kl": value, "perf/mfu": 0.5}, []))


def test_an_actor_on_this_node_keeps_the_record(local_ray: None, tmp_path: Path):
    """The trainer may run on any node; a value that the record refuses ends the run."""
    node = compose("experiment=qwen3_moe_tiny_verl", "strategy=slice_concat", "tracking=offline")
    config = check.load(node)
    job = Job(config, node, "slice_concat", tmp_path / "run", "python run.py")
    job.run_dir.mkdir()
    verl = lay_over(verl_defaults(), overrides(job, strategy_mode(config)), ABSENT_IN_VERLS_YAML)
    recorded = RecordedRunner(job.run_dir, tracker_opener(job, verl), runner=Nothing)

    def work() -> None:
        runner = recorded.remote()
        ray.get(runner.log.remote(1, 0.25))
        ray.get(runner.log.remote(2, float("nan")))

    assert supervise(recorded, work) == 1
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["engine"]) == ("failed", 1, "verl")
    assert "actor/ppo_kl=nan" in summary["error"]
    assert list((job.run_dir / "wandb").glob("offline-run-*"))
