"""The model and the problems of `tiny.py`, as verl and the preflight of its preset read them."""

from pathlib import Path

from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils import hf_tokenizer

from experiments import check
from experiments.verl_backend import tiny
from experiments.verl_backend.compose import lay_over, verl_defaults
from experiments.verl_backend.launch import ABSENT_IN_VERLS_YAML, Job, overrides, strategy_mode
from experiments.verl_backend.preflight import checks, gather_facts
from tests.conftest import compose


def test_the_preset_finds_what_tiny_writes(tmp_path: Path):
    tiny.write(tmp_path)
    files = [
        f"backend.verl.data.{name}_files={tmp_path / file}.parquet"
        for name, file in (("train", "train"), ("val", "test"))
    ]
    node = compose(
        "experiment=qwen3_moe_tiny_verl", "strategy=slice_concat", f"model.checkpoint={tmp_path / 'model'}", *files
    )
    config = check.load(node)
    mode = strategy_mode(config)
    values = overrides(Job(config, node, "slice_concat", tmp_path / "run", "python run.py"), mode)
    verl = lay_over(verl_defaults(), values, ABSENT_IN_VERLS_YAML)
    failures = checks(config, verl, mode, gather_facts(config, verl))
    assert [failure for failure in failures if not failure.startswith(("GPUs", "CPUs"))] == []
    tokenizer = hf_tokenizer(str(tmp_path / "model"))
    problems = create_rl_dataset(verl.data.train_files, verl.data, tokenizer, None)
    assert len(problems) == 512
    first = problems[0]
    assert first["raw_prompt"][0]["role"] == "user"
    word = first["raw_prompt"][0]["content"].rstrip("=")
    assert tiny.compute_score(first["data_source"], word[::-1], first["reward_model"]["ground_truth"]) == 1.0
