"""What is asked of a recording is checked against it before anything is scored."""

import pytest

from experiments import check
from experiments.schema import Mode
from experiments.score_plan import refuse_unread_keys, score_plan
from strategies import Replace, SliceConcat
from tests.conftest import compose
from tests.unit.recording_cases import record


def plan(folder, *overrides):
    config = check.load(compose("mode=score", f"recording={folder}", *overrides))
    check.check(config, check.build_strategies(config)[0])
    return score_plan(config)


def test_model_and_trainer_come_from_the_recording_and_tracking_from_the_job(tmp_path):
    record(tmp_path)
    made = plan(tmp_path, "strategies=[slice_concat]", "tracking.project=mine", "trainer.device=cpu")
    assert made.config.mode is Mode.score
    assert (made.config.trainer.device, made.config.tracking.project, made.config.record) == ("cpu", "mine", False)
    assert isinstance(made.strategy, Replace)
    assert {name: type(s) for name, s in made.strategies.items()} == {"slice_concat": SliceConcat}
    assert (made.steps, made.version) == ([1, 2, 3, 4], None)


def test_a_users_own_rule_is_named_with_its_class(tmp_path):
    record(tmp_path)
    made = plan(tmp_path, "strategies=[{mine:{_target_:strategies.SliceConcat}}]")
    assert isinstance(made.strategies["mine"], SliceConcat)


@pytest.mark.parametrize(("weights", "version"), [("trainer", None), ("newest", 3), ("2", 2)])
def test_weights_are_the_trainers_the_newest_or_a_version(tmp_path, weights, version):
    record(tmp_path)
    assert plan(tmp_path, f"score.weights={weights}").version == version


def test_updates_are_scored_once_each_and_in_order(tmp_path):
    record(tmp_path)
    assert plan(tmp_path, "score.updates=[3,1,3]").steps == [1, 3]


def test_a_lost_update_is_not_passed_over(tmp_path):
    record(tmp_path)
    (file,) = tmp_path.rglob("update_*2.safetensors")
    file.unlink()
    with pytest.raises(check.ConfigError, match=r"updates up to 4, but not \[2\]; restore the files, or name"):
        plan(tmp_path)
    assert plan(tmp_path, "score.updates=[1,3]").steps == [1, 3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategies=[no_such]"], r"`strategies`: no conf/strategy/no_such\.yaml"),
        (["strategies=[exact]"], "exact is the reference and always scored"),
        (["strategies=[{replace:{_target_:strategies.Exact}}]"], "is always scored, give the other one another name"),
        (["strategies=[{mine:{_target_:nowhere.Rule}}]"], r"cannot build nowhere\.Rule"),
        (["score.weights=9"], r"or a weight version of the recording \(0, 1, 2, 3\), not 9"),
        (["score.weights=oldest"], "must be trainer, newest or a weight version"),
        (["score.updates=[2,7]"], r"the recording has updates 1 to 4, not \[7\]"),
        (["score.updates=[]"], "the recording has updates 1 to 4"),
    ],
)
def test_what_the_recording_does_not_hold_is_refused(tmp_path, overrides, message):
    record(tmp_path)
    with pytest.raises(check.ConfigError, match=message):
        plan(tmp_path, *overrides)


def test_a_truncated_file_is_found_before_anything_is_scored_and_only_if_it_is_needed(tmp_path):
    record(tmp_path)
    file = tmp_path / "rollouts" / "update_000004.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(check.ConfigError, match=r"`recording`: .*update_000004\.safetensors: .*truncated"):
        plan(tmp_path)
    assert plan(tmp_path, "score.updates=[1]").steps == [1]


@pytest.mark.parametrize(
    "override", ["strategy=exact", "+experiment=smoke", "trainer.learning_rate=1", "seed=1", "record=true"]
)
def test_keys_that_the_recording_settles_are_refused(override):
    with pytest.raises(check.ConfigError, match="has no meaning with mode=score"):
        refuse_unread_keys(["mode=score", "recording=x", override])


def test_keys_that_scoring_reads_are_not():
    keys = "mode recording strategies strategies.a._target_ score.weights tracking tracking.project trainer.device"
    refuse_unread_keys(
        [f"{key}=x" for key in [*keys.split(), "+strategies.b._target_", "hydra.run.dir", "hydra/launcher"]]
    )


@pytest.mark.parametrize("override", ["recording=x", "strategies=[replace]", "score.updates=[1]"])
def test_keys_of_scoring_are_refused_in_training(override):
    config = check.load(compose(override))
    with pytest.raises(check.ConfigError, match="is read with mode=score only"):
        check.check(config, check.build_strategies(config)[0])
