"""From a command line with -m to jobs and their folders."""

import os

import hydra
import pytest
from omegaconf import OmegaConf

from experiments import command_line
from experiments.check import ConfigError


@pytest.fixture(autouse=True)
def _registered():
    command_line.register()


def plan(*arguments):
    sweep = command_line.precheck(["-m", *arguments])
    assert sweep is not None
    return sweep


def folders(*arguments):
    return [str(job.run_dir.relative_to(os.getcwd())) for job in plan(*arguments).jobs]


def test_the_preset_of_the_study_names_its_jobs_and_its_folders_hold_nothing_else():
    sweep = plan("experiment=pr6046", "tracking.progress=false", "task.warm_start.cache_dir=elsewhere")
    assert len(sweep.jobs) == 24
    first = [str(job.run_dir.relative_to(os.getcwd())) for job in sweep.jobs[:5]]
    rules = ("replace", "slice_concat", "naive_concat", "exact")
    assert first == [*(f"outputs/pr6046/{rule}/seed0" for rule in rules), "outputs/pr6046/replace/seed1"]


def test_the_command_line_replaces_what_the_preset_sweeps():
    assert folders("experiment=pr6046", "seed=7", "strategy=live") == ["outputs/pr6046/live/seed7"]


def test_what_else_is_swept_makes_a_level_of_its_own():
    assert folders("experiment=smoke", "steps=2,3") == [
        "outputs/smoke/replace/seed0/steps=2",
        "outputs/smoke/replace/seed0/steps=3",
    ]
    assert folders("steps=2", "threads=1") == folders("threads=1", "steps=2")


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiment=smoke,pr6046", "strategy=replace", "seed=0"),
        ("experiment=smoke,pr6046", "strategy=replace", "seed=0", "hydra.sweep.dir=elsewhere"),
        ("experiment=smoke,pr6046", "strategy=replace", "seed=0", "experiment_name=same"),
        ("strategy._target_=strategies.Replace,strategies.Exact",),
        ("strategy=replace,exact", "seed=0,1", "trainer.learning_rate=1e-3,2e-3"),
        ("sampling=default", "+task.datasets.0.params.min_words=1,2"),
    ],
    ids=" ".join,
)
def test_no_two_jobs_share_a_folder_whatever_is_swept(arguments):
    found = folders(*arguments)
    assert len(set(found)) == len(found) > 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["seed=3", "strategy=exact", "experiment=pr6046"],
        ["+task.datasets.0.params.min_words=1", "engine=sglang", "steps=7", "task=spell_backward"],
        ["experiment=smoke", "++schedule.cost.sync_s=2", "+strategy.extra='a=b'", "shadow.strategies=[live]"],
    ],
    ids=" ".join,
)
def test_a_job_is_planned_as_hydra_will_compose_it(overrides):
    of_hydra = ["hydra.sweep.dir=elsewhere", command_line.MULTIRUN]
    with command_line.composing():
        composer = command_line.Composer("config", of_hydra)
        composer.compose([o for o in overrides if "strategy" not in o])
        ours = composer.compose(overrides)
        theirs = hydra.compose("config", overrides=[*of_hydra, *overrides], return_hydra_config=True)
    assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)


def test_two_jobs_of_one_folder_are_refused():
    with pytest.raises(ConfigError, match=r"jobs 0 and 1 would share .*elsewhere/one"):
        plan("seed=0,1", "hydra.sweep.dir=elsewhere", "hydra.sweep.subdir=one")
    with pytest.raises(ConfigError, match="jobs 0 and 2 would share"):
        plan("seed=0,1,0")


def test_a_folder_that_is_named_by_the_jobs_number_is_known_beforehand():
    assert folders("seed=0,1", "hydra.sweep.dir=x", "hydra.sweep.subdir=${hydra:job.num}") == ["x/0", "x/1"]


def test_values_that_no_file_system_takes_are_cut_and_stay_apart():
    names = {command_line.folder_name("recording=a/b"), command_line.folder_name("recording=a-b")}
    assert len(names) == 2
    assert not any("/" in name for name in names)
    long = {command_line.folder_name("x" * 300), command_line.folder_name("x" * 301)}
    assert len(long) == 2
    assert max(map(len, long)) < 140


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resume=somewhere",), "`resume`"),
        (("hydra.sweep.dir=a,b",), "cannot be swept"),
        (("experiment=pr6046", "algorithm.ratio_level=sequence"), "needs the whole response in one forward"),
        (("seed=0,-1",), "`seed` must not be negative"),
        (("hydra.sweep.subdir=a=b",), r"`hydra.sweep.subdir=a=b`: .*; a value with = .* needs quotes"),
    ],
    ids=str,
)
def test_a_mistake_in_any_job_is_found_before_the_first_starts(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan(*arguments)


def test_the_preset_without_m_is_one_run():
    assert command_line.precheck(["experiment=pr6046"]) is None


def test_joblib_uses_the_cores_and_no_more():
    cores = command_line.usable_cores()
    for threads in (1, 2):
        config = plan("hydra/launcher=joblib", f"threads={threads}", "seed=0,1").config
        assert config.hydra.launcher.n_jobs == max(1, cores // threads)
    assert command_line.jobs_at_once(0) == 1
    assert plan("hydra/launcher=joblib", "hydra.launcher.n_jobs=9", "seed=0,1").config.hydra.launcher.n_jobs == 9


@pytest.mark.parametrize(
    ("launcher", "package", "command"),
    [
        ("submitit_slurm", "hydra_submitit_launcher", "uv sync --extra launch-slurm"),
        ("ray", "hydra_ray_launcher", "uv pip install hydra-ray-launcher"),
    ],
)
def test_a_launcher_that_is_not_installed_is_one_line_with_the_command(launcher, package, command, monkeypatch):
    find_spec = command_line.importlib.util.find_spec
    monkeypatch.setattr(
        command_line.importlib.util, "find_spec", lambda name: None if name.endswith(package) else find_spec(name)
    )
    with pytest.raises(ConfigError, match=f"launcher={launcher}` is not installed: {command}"):
        plan(f"hydra/launcher={launcher}", "seed=0,1")
