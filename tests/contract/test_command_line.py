"""What a person types: help, mistakes, sweeps, own strategies, Ctrl-C. Each command is a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import CONF, ROOT, compose


def command(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "run.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **kwargs,
    )


def test_help_lists_the_groups():
    result = command("--help")
    assert result.returncode == 0
    assert "strategy: exact" in result.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nonsense=1"], "nonsense"),
        (["+nonsense=1"], "unknown key `nonsense`"),
        (["+algorithm.batchsize=1"], "unknown key `algorithm.batchsize`; did you mean `batch_size`?"),
        (["strategy=no_such"], "Could not find 'strategy/no_such'"),
        (["seed=abc"], "'abc' of type 'str' could not be converted to Integer"),
        (["strategy._target_=nowhere.Strategy"], "cannot build nowhere.Strategy"),
        (["strategy._target_=builtins.dict"], "is not a merge strategy"),
        (["+strategy.extra=1"], "unexpected keyword argument 'extra'"),
        (["algorithm.group_size=7"], "`algorithm.group_size` 7 does not divide"),
        (["mode=score"], "`mode=score` needs `recording`"),
        (["mode=score", "recording=nowhere"], "nowhere: expected a run directory with rollouts/index.json, found none"),
        (["mode=score", "recording=nowhere", "strategy=exact"], "`strategy` has no meaning with mode=score"),
        (["experiment=qwen3_30b_a3b", "backend.verl.trainer.nnods=2"], "is added with +: `+backend.verl"),
        (["-m", "mode=train,score"], "`mode=score` needs `recording`"),
        (["-m", "strategy=replace,exact", "algorithm.ratio_level=sequence"], "needs the whole response in one forward"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_configuration_exits_2_with_one_line(overrides, message):
    result = command(*overrides)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not result.stdout


@pytest.mark.parametrize("arguments", [["steps=0"], ["mode=score", "recording=nowhere"]], ids=" ".join)
def test_answers_come_before_torch_is_imported(arguments):
    probe = (
        f"import sys, runpy\nsys.argv = {['run.py', *arguments]}\n"
        "try:\n    runpy.run_path('run.py', run_name='__main__')\nexcept SystemExit as e:\n    code = e.code\n"
        "heavy = {'torch', 'transformers', 'megatron', 'wandb', 'reasoning_gym'} & set(sys.modules)\n"
        "print(code, sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "2 []"


@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_every_preset_composes_and_passes_the_check(preset):
    from experiments import check

    config = check.load(compose(f"experiment={preset}"))
    check.check(config, check.build_strategies(config)[0])


@pytest.mark.slow
def test_a_users_own_strategy_needs_no_edit_of_the_project(tmp_path):
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "mine.yaml").write_text("_target_: my_rules.Newest\n")
    (tmp_path / "my_rules.py").write_text("from strategies import Replace\n\n\nclass Newest(Replace):\n    pass\n")
    result = command(
        "--config-dir",
        str(tmp_path / "conf"),
        "experiment=smoke",
        "strategy=mine",
        "tracking=disabled",
        f"hydra.run.dir={tmp_path / 'run'}",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert "mine, seed 0: completed after 8 updates" in result.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["merge/mine/abs"]


@pytest.mark.slow
def test_a_sweep_scores_a_recording_in_several_ways(tmp_path):
    run = [
        "experiment=smoke",
        "steps=3",
        "threads=1",
        "record=true",
        "tracking=disabled",
        f"hydra.run.dir={tmp_path}/run",
    ]
    assert command(*run).returncode == 0
    sweep = [
        "-m",
        "mode=score",
        f"recording={tmp_path / 'run'}",
        "strategies=[slice_concat,live]",
        "score.weights=trainer,newest",
        f"hydra.sweep.dir={tmp_path / 'scores'}",
    ]
    result = command(*sweep)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("exact is the reference") == 2
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "scores").glob("*/summary.json")]
    assert [(s["mode"], s["status"], len(s["decision"]["ranking"])) for s in summaries] == [
        ("score", "completed", 3)
    ] * 2
    again = command(*sweep)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("completed before, skipped") == 2


@pytest.mark.slow
def test_the_default_run_is_interrupted_often_and_gives_the_command_that_made_it(tmp_path):
    """At least a third of the rollouts span two or more weight versions, some span three (README)."""
    result = command("strategy=slice_concat", "steps=12", "tracking=disabled", f"hydra.run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ratios = [row["fully_async/partial/partial_ratio"] for row in rows]
    assert sum(ratios) / len(ratios) >= 1 / 3
    assert max(row["fully_async/partial/max_partial_span"] for row in rows) >= 2
    assert sum(row["fully_async/count/stale_samples_processed"] for row in rows) > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["command"].startswith("python run.py strategy=slice_concat steps=12")


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_the_run_can_go_on(tmp_path):
    arguments = ["experiment=smoke", "tracking=offline", f"hydra.run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, "run.py", *arguments, "steps=2000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.stat().st_size > 0):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "resume=" in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    done = summary["steps"]
    result = command("experiment=smoke", "tracking=offline", f"resume={tmp_path / 'run'}", f"steps={done + 2}")
    assert result.returncode == 0, result.stderr
    again = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (again["status"], again["steps"]) == ("completed", done + 2)
    assert again["wandb_run_id"] == summary["wandb_run_id"]
