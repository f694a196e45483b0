"""A task is an endless, repeatable stream of problems whose rewards are reasoning-gym's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from experiments.schema import DatasetConfig, TaskConfig, WarmStartConfig
from experiments.tasks.reasoning_gym_compat import MissingModule, reasoning_gym
from experiments.tasks.task import Split, Task

PRESETS = sorted(Path("conf/task").glob("*.yaml"))
WARM_START = WarmStartConfig(steps=2, batch_size=4, learning_rate=1e-3, seed=7, cache_dir=None)
SPELL = DatasetConfig(
    name="spell_backward", weight=1.0, params={"min_word_len": 3, "max_word_len": 10}, prompt="{word}="
)
REVERSAL = DatasetConfig(
    name="word_sequence_reversal", weight=3.0, params={"min_words": 2, "max_words": 3}, prompt="{words:, }>"
)


def make_task(*datasets: DatasetConfig, seed: int = 1) -> Task:
    return Task(TaskConfig(name="test", problems=0, datasets=list(datasets), warm_start=WARM_START), seed)


def preset(path: Path) -> TaskConfig:
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TaskConfig), OmegaConf.load(path)))
    return config


def test_a_problem_depends_on_seed_and_index_alone():
    first, second = make_task(SPELL, REVERSAL), make_task(SPELL, REVERSAL)
    backward = [second.problem(index) for index in reversed(range(20))][::-1]
    assert [first.problem(index).prompt for index in range(20)] == [problem.prompt for problem in backward]
    other = make_task(SPELL, REVERSAL, seed=2)
    assert [first.problem(index).prompt for index in range(20)] != [other.problem(index).prompt for index in range(20)]


def test_a_finite_task_passes_over_the_same_problems_in_a_new_order_every_time():
    cfg = TaskConfig(name="test", problems=5, datasets=[SPELL, REVERSAL], warm_start=WARM_START)
    task = Task(cfg, 1)
    prompts = [task.problem(index).prompt for index in range(15)]
    passes = [prompts[0:5], prompts[5:10], prompts[10:15]]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert not passes[0] == passes[1] == passes[2]
    assert [task.problem(index).index for index in range(15)] == list(range(15)), "groups stay apart"
    held_out = {task.problem(index, Split.held_out).prompt for index in range(40)}
    assert len(held_out) > 5


def test_splits_and_seeds_never_share_a_generator_seed():
    tasks = [make_task(SPELL, seed=seed) for seed in (6, 7, 8)]
    seeds = [
        task.problem(index, split).entry["metadata"]["source_index"]
        for task in tasks
        for split in Split
        for index in (0, 1, 2**32 - 1)
    ]
    distinct_streams = 3 + 2  # train follows the run's seed; warm start and held out follow the warm start's
    assert len(set(seeds)) == distinct_streams * 3
    with pytest.raises(ValueError, match="index must be in 0"):
        tasks[0].problem(2**32)


def test_the_mix_follows_the_weights():
    task = make_task(SPELL, REVERSAL)
    names = [task.problem(index).dataset for index in range(2000)]
    assert names.count("word_sequence_reversal") / len(names) == pytest.approx(0.75, abs=0.03)


def test_the_prompt_is_the_template_filled_from_the_entry():
    problem = make_task(REVERSAL).problem(0)
    words = problem.entry["metadata"]["words"]
    assert problem.prompt == ", ".join(words) + ">"
    assert problem.prompt_ids.dtype == np.int32


def test_the_reward_is_the_scorers_on_the_text_before_the_stop_token():
    task = make_task(SPELL)
    problem = next(p for p in map(task.problem, range(100)) if len(p.entry["answer"]) == 5)
    right = task.answer_ids(problem)
    encode = task.tokenizer.encode
    assert right[-1] == task.tokenizer.eos_id
    assert task.reward(problem, right) == 1.0
    assert task.reward(problem, np.append(right, encode("zz"))) == 1.0  # behind the stop token
    assert task.reward(problem, right[:-1]) == 1.0  # cut by the length limit
    assert task.reward(problem, right[:-2]) == pytest.approx(0.8)  # four of five letters in place
    assert task.reward(problem, [*encode("####"), int(right[4])]) == pytest.approx(0.2)
    assert task.reward(problem, [task.tokenizer.eos_id]) == 0.0
    assert task.reward(problem, []) == 0.0


def test_a_special_token_inside_an_answer_is_wrong_not_invisible():
    task = make_task(REVERSAL)
    problem = task.problem(0)
    assert task.reward(problem, [*task.answer_ids(problem)[:-1], task.tokenizer.pad_id]) < 1.0
    assert task.reward(problem, [task.tokenizer.pad_id, *task.answer_ids(problem)]) < 1.0


def test_a_scorer_that_fails_on_an_answer_stops_the_run_by_name():
    task = make_task(DatasetConfig(name="prime_factorization", weight=1.0, params={}, prompt="{number}="))
    with pytest.raises(RuntimeError, match=r"prime_factorization failed on the answer 'x'"):
        task.reward(task.problem(0), task.tokenizer.encode("x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "no_such"}, "'no_such' is not a dataset"),
        ({"params": {"max_word_length": 3}}, "has no parameter .*max_word_length"),
        ({"params": {"min_word_len": 9, "max_word_len": 3}}, "max_word_len must be >= min_word_len"),
        ({"params": {"seed": 3}}, "set by the task"),
        ({"prompt": "{wort}="}, r"names 'wort', the entry has .*'word'"),
        ({"weight": 0.0}, "must be positive"),
    ],
)
def test_a_wrong_dataset_is_refused_with_its_reason(change: dict[str, Any], message: str):
    fields = {"name": SPELL.name, "weight": 1.0, "params": SPELL.params, "prompt": SPELL.prompt} | change
    with pytest.raises(ValueError, match=message):
        make_task(DatasetConfig(**fields))


def test_an_enum_parameter_is_given_by_its_value():
    sorting = DatasetConfig(
        name="word_sorting", weight=1.0, params={"transformation": "uppercase"}, prompt="{transformed_words}"
    )
    prompt = make_task(sorting).problem(0).prompt
    assert prompt == prompt.upper()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_gives_its_own_answers_the_full_reward(path: Path):
    task = Task(preset(path), seed=1)
    problems = [task.problem(index) for index in range(200)]
    assert {task.reward(problem, task.answer_ids(problem)) for problem in problems} == {1.0}
    assert {problem.dataset for problem in problems} == {dataset.name for dataset in task.cfg.datasets}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_scores_any_text_without_failing(path: Path):
    task = Task(preset(path), seed=1)
    generator = np.random.default_rng(0)
    for index in range(200):
        ids = generator.integers(0, task.tokenizer.vocab_size, generator.integers(0, 30))
        assert 0.0 <= task.reward(task.problem(index), ids) < 1.0


def test_a_missing_module_is_silent_until_it_is_used():
    module = MissingModule("pycosat")
    assert not hasattr(module, "__path__")
    with pytest.raises(ImportError, match="pycosat is not installed"):
        module.itersolve([])


def test_the_stand_in_for_pycosat_is_seen_by_reasoning_gym_alone():
    assert importlib.util.find_spec("pycosat") is None, "this test needs an environment without pycosat"
    assert "pycosat" not in sys.modules
    assert "zebra_puzzles" in reasoning_gym.factory.DATASETS
