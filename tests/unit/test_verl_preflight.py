"""The cluster back end before it starts: what verl is told, memory, preflight, plan. Without verl."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments import check
from experiments.check import ConfigError
from experiments.verl_backend.launch import (
    Job,
    agent_loops,
    overrides,
    resumed_update,
    strategy_mode,
    worker_environment,
)
from experiments.verl_backend.plan import plan_text
from experiments.verl_backend.preflight import (
    TESTED,
    Facts,
    Node,
    checks,
    cluster_nodes,
    import_error,
    model_facts,
    strategy_classes,
    unchecked,
)
from experiments.verl_backend.resources import Layout, ModelSize, expected_memory
from experiments.verl_backend.settings import TrainerSettings
from strategies import Gated, Replace
from tests.conftest import ROOT, compose

QWEN3_30B = ModelSize(48, 2048, 32, 4, 128, 768, 128, 8, 151936)
GOOD = Facts((Node(16, 128),), None, TESTED, None, None, None, (), None)


def job(*arguments: str, folder: Path = Path("run")) -> Job:
    node = compose("experiment=qwen3_30b_a3b", *arguments)
    config = check.load(node)
    check.check(config, check.build_strategies(config)[0])
    name = next((a.split("=")[1] for a in arguments if a.startswith("strategy=")), "replace")
    return Job(config, node, name, folder, "python run.py")


def failures(of: Job, facts: Facts = GOOD, **changed: Any) -> list[str]:
    mode = strategy_mode(of.config)
    verl = OmegaConf.create(overrides(of, mode))
    for key, value in changed.items():
        OmegaConf.update(verl, key.replace("__", "."), value)
    return checks(of.config, verl, mode, facts)


def test_memory_of_qwen3_30b_by_hand():
    """30.5 G parameters; an eighth of the experts and all of the rest on a GPU; KV of 4 heads of 128, 48 layers."""
    assert pytest.approx(30.53e9, rel=1e-3) == QWEN3_30B.parameters
    assert QWEN3_30B.row_bytes == 768
    assert QWEN3_30B.kv_bytes == 2 * 2 * 48 * 4 * 128
    layout = Layout(8, 8, 1, 1, 1, 8, 1, 4, True, True, 20480, True, 18432, 0.8, 80)
    memory = expected_memory(QWEN3_30B, layout)
    on_a_gpu = QWEN3_30B.expert_parameters / 8 + QWEN3_30B.layer_parameters + QWEN3_30B.embedding_parameters
    assert memory.parameters == pytest.approx(2 * on_a_gpu / 2**30)
    assert memory.gradients == pytest.approx(2 * memory.parameters)
    assert memory.optimizer == 0
    kept = dataclasses.replace(layout, offload_optimizer=False)
    assert expected_memory(QWEN3_30B, kept).training == pytest.approx(memory.training + memory.host_optimizer)
    assert memory.batch_rows_per_trajectory == pytest.approx(13.5)
    assert memory.kv_tokens == int((64 - memory.rollout_weights) * 2**30 // (QWEN3_30B.kv_bytes / 4))


def test_the_preset_passes_the_preflight_of_a_fitting_machine():
    assert failures(job("strategy=slice_concat")) == []


def test_the_preflight_lists_all_failures_at_once():
    versions = TESTED | {"sglang": "0.5.9", "verl": None}
    facts = Facts((Node(0, 4),), None, versions, "no module", {"hidden_size": 1}, None, ("f",), None, "no credentials")
    of = job(
        "strategy=slice_concat",
        "backend.verl.trainer.n_gpus_per_node=6",
        "backend.verl.actor_rollout_ref.rollout.calculate_log_probs=false",
        "backend.verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
    )
    text = "\n".join(failures(of, facts, ray_kwargs__ray_init__runtime_env__env_vars__WANDB_MODE=None))
    for part in (
        "verl 0.9.1 expected, it is not installed",
        "sglang 0.5.12 expected (the tested version), 0.5.9",
        "calculate_log_probs` must be true, not false",
        "expert x expert-tensor x pipeline parallel size 8 must divide the 6 training GPUs",
        "GPUs: 14 expected (nodes x GPUs: trainer 1 x 6, rollout 1 x 8), this machine has 0 by node",
        "CPUs: 58 expected for verl's actors and pools, which wait for ever without, this machine has 4",
        "cannot import our packages",
        "there is no file",
        "is no MoE",
        "WANDB_MODE=offline expected",
        "tracking=online, and no credentials: `wandb login`",
        "below the longest sequence",
    ):
        assert part in text


def test_the_nodes_of_a_cluster_are_counted_not_the_one_that_asks():
    head = Node(0, 8)
    fits = dataclasses.replace(GOOD, nodes=(head, Node(8, 64), Node(8, 64)), ray_address="head:6379")
    assert failures(job(), fits) == []
    (failure,) = failures(job(), dataclasses.replace(fits, nodes=(head, Node(8, 128), Node(4, 64), Node(4, 64))))
    assert "the cluster at head:6379 has 0, 8, 4, 4 by node" in failure
    (failure,) = failures(job(), dataclasses.replace(fits, nodes=(), cluster_error="Connection refused"))
    assert failure == "RAY_ADDRESS=head:6379: no Ray cluster answers: Connection refused"


def test_a_cluster_that_cannot_be_asked_is_a_reason_and_no_traceback():
    nodes, error = cluster_nodes("127.0.0.1:1")  # in this environment Ray is missing, in the other nobody listens
    assert nodes == ()
    assert error


def test_replay_keys_that_disagree_with_the_strategy_are_found():
    keys = {
        "actor_rollout_ref__rollout__enable_rollout_routing_replay": False,
        "actor_rollout_ref__actor__megatron__router_replay__mode": "disabled",
        "actor_rollout_ref__actor__policy_loss__loss_mode": "vanilla",
    }
    assert len(failures(job("strategy=slice_concat"), **keys)) == 3


def test_a_checkpoint_of_another_size_is_found():
    for key in ("num_experts", "num_local_experts"):  # the latter is what transformers 5 writes
        facts = dataclasses.replace(GOOD, model_config={key: 64, "num_hidden_layers": 48})
        assert failures(job(), facts) == ["model: `num_experts` is 64 in its config.json, 128 in conf/"]


def test_r2_needs_decoupled_mode_in_verl():
    assert "algorithm.old_log_prob=decoupled" in failures(job("strategy=recompute"))[0]
    assert failures(job("strategy=recompute", "algorithm.old_log_prob=decoupled")) == []


def test_a_sequence_level_ratio_is_not_silently_ignored():
    assert "are of level token" in failures(job("algorithm.ratio_level=sequence"))[0]


def test_exact_is_refused_and_offered_as_a_shadow():
    with pytest.raises(ConfigError, match="Score it as a shadow instead"):
        strategy_mode(job("strategy=exact").config)


def test_live_rows_are_switched_on_by_what_needs_them():
    assert not strategy_mode(job("strategy=replace").config).live_rows
    needing = (["strategy=last_segment"], ["backend.on_missing_rows=live"])
    for arguments in (*needing, ["shadow.every=5", "shadow.strategies=[live]"]):
        assert strategy_mode(job(*arguments).config).live_rows
    with pytest.raises(ConfigError, match="live_rows=false"):
        strategy_mode(job("strategy=last_segment", "backend.live_rows=false").config)


def test_the_bypass_switch_and_the_libraries_are_set_at_launch(tmp_path: Path):
    of = job("strategy=last_segment", folder=tmp_path)
    values = overrides(of, strategy_mode(of.config))
    actor = values["actor_rollout_ref"]["actor"]
    assert actor["policy_loss"]["loss_mode"] == "bypass_mode"
    assert actor["policy_loss"]["rollout_correction"]["rollout_is"] is None
    assert (actor["ppo_mini_batch_size"], values["rollout"]["total_rollout_steps"]) == (32, 200 * 32)
    assert values["actor_rollout_ref"]["model"]["external_lib"] == [
        "experiments.verl_backend.sglang_rows",
        "experiments.verl_backend.live_rows",
    ]
    environment = values["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    assert environment["WANDB_MODE"] == "offline"
    assert environment["PYTHONPATH"].startswith(str(ROOT))


def test_the_agent_loop_file_builds_the_runs_merging():
    of = job("strategy=gated", "strategy.max_lag=null", "shadow.every=5", "shadow.strategies=[replace]")
    loops = agent_loops(of.config, strategy_mode(of.config))
    assert [loop.name for loop in loops] == ["single_turn_agent", "tool_agent"]
    built = instantiate(loops[0].merging)
    assert built.strategy == Gated(max_lag=None, max_churn=0.5)
    assert (built.num_layers, built.top_k, built.num_experts) == (48, 8, 128)
    assert (built.in_trainer, built.keeps_rows) == (False, True)


def test_the_trainer_reads_its_settings_from_verls_configuration():
    of = job("strategy=gated", "shadow.every=5", "shadow.strategies=[replace]")
    settings = TrainerSettings.of(OmegaConf.create(overrides(of, strategy_mode(of.config))["routemerge"]))
    assert settings.merging.strategy == Gated(max_lag=2, max_churn=0.5)
    assert settings.merging.in_trainer
    assert settings.algorithm == of.config.algorithm
    assert (settings.shadow.own, dict(settings.shadow.strategies)) == ("gated", {"replace": Replace()})
    assert [update for update in range(1, 12) if settings.shadow_due(update)] == [1, 6, 11]


def test_a_run_that_verl_continues_keeps_its_record(tmp_path: Path):
    of = job("backend.verl.trainer.resume_mode=auto", folder=tmp_path)
    verl = OmegaConf.create(overrides(of, strategy_mode(of.config)))
    assert resumed_update(of, verl) is None
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("20")
    assert resumed_update(of, verl) == 80  # a sync every four updates


def test_the_plan_names_strategy_resources_memory_failures_and_values():
    of = job("strategy=slice_concat")
    mode = strategy_mode(of.config)
    text = plan_text(of.config, "slice_concat", mode, overrides(of, mode), None, ["FAIL one thing"])
    for part in (
        "strategies.SliceConcat",
        "8 GPUs train",
        "2 engines of 4",
        "30.53 G",
        "FAIL one thing",
        "bypass_mode",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "0"),
        ("trainer.nnodes", "two"),
        ("rollout.n_gpus_per_node", "null"),
    ],
)
def test_a_size_that_is_no_positive_number_is_named(key: str, value: str):
    with pytest.raises(ConfigError, match=rf"backend\.verl\.{key}` must be a positive number, not {value}"):
        failures(job(f"backend.verl.{key}={value}"))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["sampling.temperature=0"], "sampling.temperature"),
        (["sampling.top_p=1.5"], "sampling.top_p"),
        (["trainer.learning_rate=-1"], "trainer.learning_rate"),
        (["record=true"], "record"),
        (["mode=score", "recording=somewhere"], "mode=score"),
    ],
)
def test_what_verl_would_read_wrongly_or_not_at_all_is_refused(arguments: list[str], key: str):
    with pytest.raises(ConfigError, match=f"`{key}`"):
        job(*arguments)


def test_workers_find_a_users_class_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`PYTHONPATH=. python run.py --config-dir ...`, as the README has it: workers start in another folder."""
    (tmp_path / "users_rules.py").write_text("from strategies import SliceConcat\n\n\nclass Mine(SliceConcat): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", str(ROOT)]))
    of = job("strategy=slice_concat")
    path = worker_environment(of)["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(ROOT), str(tmp_path)]
    assert import_error(path, ["users_rules.Mine", "strategies.Replace"]) is None
    assert "users_rules" in (import_error(str(ROOT), ["users_rules.Mine"]) or "")


def test_the_classes_that_workers_import_are_the_runs_and_the_shadows():
    mine = "shadow.strategies=[replace,{mine:{_target_:users_rules.Mine}}]"
    config = compose("experiment=qwen3_30b_a3b", "strategy=slice_concat", mine, "shadow.every=2")
    names = ["strategies.SliceConcat", "strategies.Replace", "users_rules.Mine"]
    assert strategy_classes(check.load(config)) == names
    config.shadow.every = 0
    assert strategy_classes(check.load(config)) == names[:1]


def test_what_cannot_be_a_checkpoint_is_found_and_an_id_is_said_to_be_unchecked(tmp_path: Path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for path, part in (
        ("data/nowhere/model", "there is no data/nowhere/model/config.json"),
        (str(tmp_path), "there is no"),
        (str(tmp_path / "broken"), "is no JSON"),
        (None, "is null"),
    ):
        config, error = model_facts(path)
        assert config is None
        assert part in (error or "")
        assert [part in line for line in failures(job(), dataclasses.replace(GOOD, model_error=error))] == [True]
    assert model_facts("nobody/has-this-model") == (None, None)
    assert model_facts("hdfs://cluster/model") == (None, None)
    of = job()
    assert unchecked(of.config, GOOD) == ["not checked: the sizes of Qwen/Qwen3-30B-A3B, which is not on this node yet"]
    assert unchecked(of.config, dataclasses.replace(GOOD, model_config={"num_experts": 128})) == []


def test_a_model_of_the_hub_is_looked_at_where_it_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--some--model"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc" / "config.json").write_text('{"num_experts": 7}')
    assert model_facts("some/model") == ({"num_experts": 7}, None)


def test_workers_get_absolute_paths_of_local_files_and_ids_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").touch()
    (tmp_path / "more.parquet").touch()
    of = job("backend.verl.data.train_files=train.parquet", "backend.verl.data.val_files=[more.parquet,none.parquet]")
    values = overrides(of, strategy_mode(of.config))
    assert values["data"]["train_files"] == str(tmp_path / "train.parquet")
    assert values["data"]["val_files"] == [str(tmp_path / "more.parquet"), "none.parquet"]
    assert values["actor_rollout_ref"]["model"]["path"] == "Qwen/Qwen3-30B-A3B"
    (tmp_path / "Qwen" / "Qwen3-30B-A3B").mkdir(parents=True)
    assert overrides(of, strategy_mode(of.config))["actor_rollout_ref"]["model"]["path"].startswith(str(tmp_path))
