"""The composed configuration against verl's own dataclasses and checks; nothing is started."""

from pathlib import Path

import pytest
from verl.utils.config import _validate_router_replay_config, omega_conf_to_dataclass

from experiments import check
from experiments.check import ConfigError
from experiments.verl_backend.compose import lay_over, verl_defaults
from experiments.verl_backend.launch import ABSENT_IN_VERLS_YAML, Job, overrides, strategy_mode
from experiments.verl_backend.preflight import TESTED, _version
from tests.conftest import CONF, compose

EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
PRESETS = [name for name in EXPERIMENTS if compose(f"experiment={name}").backend.name == "verl"]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("strategy", ["slice_concat", "gated", "live"])
def test_every_preset_passes_verls_own_checks(preset: str, strategy: str, tmp_path: Path):
    node = compose(f"experiment={preset}", f"strategy={strategy}", "shadow.every=0")
    config = check.load(node)
    mode = strategy_mode(config)
    job = Job(config, node, strategy, tmp_path, "python run.py")
    verl = lay_over(verl_defaults(), overrides(job, mode), ABSENT_IN_VERLS_YAML)
    actor = omega_conf_to_dataclass(verl.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(verl.actor_rollout_ref.rollout)
    assert (actor.megatron.router_replay.mode, rollout.enable_rollout_routing_replay) == (mode.mode, mode.records_rows)
    assert actor.policy_loss.loss_mode == "bypass_mode"
    assert actor.policy_loss.rollout_correction["rollout_is"] is None
    _validate_router_replay_config(actor, verl.algorithm.rollout_correction)


def test_a_key_that_verl_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"has no actor_rollout_ref\.actor\.megatron\.grad_offload"):
        lay_over(verl_defaults(), {"actor_rollout_ref": {"actor": {"megatron": {"grad_offload": True}}}}, ())


def test_this_environment_has_the_tested_versions():
    assert {name: (_version(name) or "").partition("+")[0] for name in TESTED} == TESTED
