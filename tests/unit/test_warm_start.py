"""The warm start is trained once per set of settings, repeatably, and a damaged or half-written cache is never used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import experiments.warm_start as warm_start
from experiments.schema import DatasetConfig, ModelConfig, TaskConfig, WarmStartConfig
from experiments.tasks.task import Split, Task, load_task
from experiments.warm_start import evaluate, prepare_model, sample_responses, train_warm_start

MODEL = ModelConfig(
    name="test",
    checkpoint=None,
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    initializer_range=0.05,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
)
SPELL = DatasetConfig(
    name="spell_backward", weight=1.0, params={"min_word_len": 3, "max_word_len": 4}, prompt="{word}="
)


def task_config(cache_dir: Path, *, steps: int = 3, seed: int = 0) -> TaskConfig:
    cfg = WarmStartConfig(steps=steps, batch_size=8, learning_rate=3e-3, seed=seed, cache_dir=str(cache_dir))
    return TaskConfig(name="test", problems=0, datasets=[SPELL], warm_start=cfg)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(task_config(tmp_path), seed=1)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per warm start that was really trained."""
    runs: list[str] = []
    train: Callable[..., object] = warm_start.train_warm_start

    def counted(model_cfg: ModelConfig, task: Task, *, progress: bool) -> object:
        runs.append(task.cfg.name)
        return train(model_cfg, task, progress=progress)

    monkeypatch.setattr(warm_start, "train_warm_start", counted)
    return runs


def test_the_same_settings_give_the_same_weights_and_leave_the_global_generator_alone(task: Task):
    state = torch.random.get_rng_state()
    first, second = train_warm_start(MODEL, task), train_warm_start(MODEL, task)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name
    assert torch.equal(torch.random.get_rng_state(), state)
    other = train_warm_start(MODEL, Task(task_config(Path(), seed=1), seed=1))
    assert not torch.equal(other.state_dict()["lm_head.weight"], first.state_dict()["lm_head.weight"])


def test_supervised_steps_teach_the_answers(tmp_path: Path):
    task = Task(task_config(tmp_path, steps=100), seed=1)
    problems = [task.problem(index, Split.held_out) for index in range(64)]
    untrained = train_warm_start(MODEL, Task(task_config(tmp_path, steps=0), seed=1))
    before = evaluate(untrained, task, problems, temperature=1.0, seed=0)
    after = evaluate(train_warm_start(MODEL, task), task, problems, temperature=1.0, seed=0)
    assert after.reward > 2 * before.reward
    assert after.truncated < before.truncated - 0.5  # learns to stop first


def test_responses_end_with_the_stop_token_and_greedy_ones_repeat(task: Task):
    model = train_warm_start(MODEL, task)
    problems = [task.problem(index, Split.held_out) for index in range(16)]
    greedy = [sample_responses(model, task, problems, temperature=0.0, seed=seed) for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    sampled = sample_responses(model, task, problems, temperature=1.0, seed=0)
    assert all(task.tokenizer.eos_id not in ids[:-1] for ids in sampled)
    alone = sample_responses(model, task, problems[3:4], temperature=0.0, seed=0)[0]
    assert alone[:5] == greedy[0][3][:5]  # padding on the left changes nothing


def test_the_second_call_reads_the_cache(task: Task, trained: list[str]):
    first = prepare_model(MODEL, task)
    second = prepare_model(MODEL, task)
    assert len(trained) == 1
    assert first.path == second.path
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name
        assert weight.dtype == torch.float32


def test_the_folder_is_a_hugging_face_checkpoint(task: Task):
    prepared = prepare_model(MODEL, task)
    model = AutoModelForCausalLM.from_pretrained(str(prepared.path))
    tokenizer = AutoTokenizer.from_pretrained(str(prepared.path))
    problem = task.problem(0)
    assert tokenizer(problem.prompt)["input_ids"] == problem.prompt_ids.tolist()
    assert model.config.eos_token_id == tokenizer.eos_token_id == task.tokenizer.eos_id
    assert set(model.state_dict()) == set(prepared.weights)
    evaluation = json.loads((prepared.path / "manifest.json").read_text())["evaluation"]
    assert 0.0 <= evaluation["exact"] <= evaluation["reward"] <= 1.0


@pytest.mark.parametrize("change", ["steps", "model", "dataset"])
def test_other_settings_are_another_entry(tmp_path: Path, task: Task, trained: list[str], change: str):
    prepare_model(MODEL, task)
    model, cfg = MODEL, task_config(tmp_path)
    if change == "steps":
        cfg = task_config(tmp_path, steps=2)
    elif change == "model":
        model = replace(MODEL, moe_intermediate_size=24)
    else:
        cfg.datasets = [replace(SPELL, prompt="{word}|")]
    prepare_model(model, Task(cfg, seed=1))
    assert len(trained) == 2


def test_the_runs_seed_and_the_model_name_share_an_entry(tmp_path: Path, task: Task, trained: list[str]):
    prepare_model(MODEL, task)
    prepare_model(replace(MODEL, name="renamed"), Task(task_config(tmp_path), seed=99))
    assert len(trained) == 1


@pytest.mark.parametrize("damage", ["flipped byte", "missing file", "no manifest", "broken manifest"])
def test_a_damaged_entry_is_rebuilt_with_a_message(
    task: Task, trained: list[str], caplog: pytest.LogCaptureFixture, damage: str
):
    prepared = prepare_model(MODEL, task)
    weights = prepared.path / "model.safetensors"
    if damage == "flipped byte":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "missing file":
        (prepared.path / "tokenizer.json").unlink()
    elif damage == "no manifest":
        (prepared.path / "manifest.json").unlink()
    else:
        (prepared.path / "manifest.json").write_text("{")
    rebuilt = prepare_model(MODEL, task)
    assert len(trained) == 2
    assert "is damaged" in caplog.text
    assert all(torch.equal(weight, rebuilt.weights[name]) for name, weight in prepared.weights.items())


def test_two_jobs_at_once_train_it_once(task: Task, trained: list[str], caplog: pytest.LogCaptureFixture):
    """Threads stand for processes, so they stop at the cache: `from_pretrained` patches transformers' classes while it
    loads, and two threads in it can leave them patched (no tied weights in any later model).
    """
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: warm_start.cached_warm_start(MODEL, task, progress=False), range(2)))
    assert len(trained) == 1
    assert paths[0] == paths[1]
    assert "another process is preparing it" in caplog.text


def test_a_failed_warm_start_leaves_nothing_behind(task: Task, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(warm_start, "evaluate", fail)
        with pytest.raises(RuntimeError, match="stopped"):
            prepare_model(MODEL, task)
    cache_dir = task.cfg.warm_start.cache_dir
    assert cache_dir is not None
    assert [path.suffix for path in Path(cache_dir).iterdir()] == [".lock"]
    prepare_model(MODEL, task)


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: list[str]):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cfg = task_config(tmp_path)
    cfg.warm_start.cache_dir = None
    assert prepare_model(MODEL, Task(cfg, seed=1)).path.parent == tmp_path / "routemerge"


def test_a_checkpoint_of_the_users_is_loaded_as_it_is(tmp_path: Path, task: Task, trained: list[str]):
    prepared = prepare_model(MODEL, task)
    model_cfg = replace(MODEL, checkpoint=str(prepared.path), hidden_size=999)
    loaded = prepare_model(model_cfg, load_task(task.cfg, 1, model_cfg.checkpoint))
    assert len(trained) == 1
    assert loaded.config.hidden_size == MODEL.hidden_size
    assert all(torch.equal(weight, loaded.weights[name]) for name, weight in prepared.weights.items())


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, task: Task):
    with pytest.raises(ValueError, match=r"found no config\.json"):
        prepare_model(replace(MODEL, checkpoint=str(tmp_path / "nowhere")), task)
    folder = prepare_model(MODEL, task).path
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    with pytest.raises(ValueError, match="token ids at least"):
        prepare_model(replace(MODEL, checkpoint=str(folder)), task)
    umlauts = replace(task.cfg, datasets=[replace(SPELL, prompt="ß{word}=")])
    with pytest.raises(ValueError, match="spell_backward: the checkpoint's tokenizer cannot encode 'ß"):
        load_task(umlauts, 1, str(folder))
