"""The policy that PPO starts from: a checkpoint of the user's, or one trained on the task's own answers and cached.

A random model never succeeds and so teaches PPO nothing. A few hundred supervised steps bring it to a policy that
sometimes succeeds. The result depends only on what the cache key holds; runs of a sweep share it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

from experiments.qwen3_moe import build_qwen3_moe, qwen3_moe_config
from experiments.schema import ModelConfig
from experiments.tasks.task import Problem, Split, Task
from experiments.user_cache import cache_root, locked

log = logging.getLogger(__name__)

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
VERSIONED_PACKAGES = ("torch", "transformers", "tokenizers", "reasoning-gym")

ROUTER_AUX_LOSS_COEF = 0.01
LEARNING_RATE_WARMUP = 0.05  # share of the steps
LENGTH_GROUP = 4  # batches whose examples are sorted by length together; 8 pads less, but learns slower per step
MAX_GRAD_NORM = 1.0
EVALUATED_PROBLEMS = 256
EVALUATION_SLACK_TOKENS = 8  # a response may run this far beyond the longest right answer


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A policy to start from.

    Attributes:
        path: its Hugging Face folder (config, safetensors, tokenizer).
        config: transformers' configuration.
        weights: fp32, layout of `Qwen3MoeForCausalLM.state_dict()`.
    """

    path: Path
    config: Qwen3MoeConfig
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Evaluation:
    """Sampled responses to held-out problems: means over `problems`; `exact` is the share with reward 1."""

    problems: int
    reward: float
    exact: float
    response_tokens: float
    truncated: float


def prepare_model(model_cfg: ModelConfig, task: Task, *, progress: bool = False) -> PreparedModel:
    """Returns the policy to start from: `model_cfg.checkpoint`, else the warm start, trained now if it is not cached.

    Raises:
        ValueError: the checkpoint is no folder of a Qwen3-MoE, or its vocabulary is smaller than the task's tokenizer.
    """
    if model_cfg.checkpoint is not None:
        path = Path(model_cfg.checkpoint).expanduser()
        if not (path / "config.json").is_file():
            raise ValueError(f"model.checkpoint={path}: expected a Hugging Face folder, found no config.json there")
        qwen3_moe_config(model_cfg, task.tokenizer.vocab_size)
    else:
        path = cached_warm_start(model_cfg, task, progress=progress)
    return _load(path)


def _load(path: Path) -> PreparedModel:
    with _quiet_transformers():
        model = Qwen3MoeForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return PreparedModel(path, model.config, weights)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Holds back transformers' progress bars for files that load in milliseconds."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


# --- cache -----------------------------------------------------------------------------------------------------------


def warm_start_settings(model_cfg: ModelConfig, task: Task) -> dict[str, Any]:
    """Returns everything that determines the warm-started weights."""
    model = asdict(model_cfg)
    warm_start = asdict(task.cfg.warm_start)
    for name in ("name", "checkpoint"):
        del model[name]
    del warm_start["cache_dir"]
    return {
        "format": FORMAT_VERSION,
        "model": model,
        "datasets": [asdict(dataset) for dataset in task.cfg.datasets],
        "warm_start": warm_start,
        "versions": {package: version(package) for package in VERSIONED_PACKAGES},
    }


def cached_warm_start(model_cfg: ModelConfig, task: Task, *, progress: bool) -> Path:
    """Returns the folder of the warm start; a second process that wants the same one waits for the first."""
    settings = warm_start_settings(model_cfg, task)
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    root = cache_root(task.cfg.warm_start.cache_dir)
    root.mkdir(parents=True, exist_ok=True)
    entry = root / f"warm_start-{key}"
    with locked(root / f"warm_start-{key}.lock", "warm start"):
        if entry.exists():
            fault = _fault(entry)
            if fault is None:
                log.info("warm start: cached in %s", entry)
                return entry
            log.warning("warm start: %s is damaged (%s): training it again", entry, fault)
            shutil.rmtree(entry)
        for abandoned in root.glob(f"{entry.name}.building-*"):  # its writer was killed: nobody else holds the lock
            shutil.rmtree(abandoned)
        building = Path(tempfile.mkdtemp(prefix=f"{entry.name}.building-", dir=root))
        try:
            _build(model_cfg, task, settings, building, progress=progress)
            building.rename(entry)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return entry


def _fault(entry: Path) -> str | None:
    """Returns what is wrong with a cache entry, None when every file is as the manifest says."""
    manifest_path = entry / MANIFEST
    if not manifest_path.is_file():
        return f"no {MANIFEST}"
    try:
        files = json.loads(manifest_path.read_text())["files"]
    except (json.JSONDecodeError, KeyError) as error:
        return f"{MANIFEST} is unreadable: {error!r}"
    for name, digest in files.items():
        if not (entry / name).is_file():
            return f"{name} is missing"
        if _sha256(entry / name) != digest:
            return f"{name} differs from the manifest"
    return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(model_cfg: ModelConfig, task: Task, settings: dict[str, Any], folder: Path, *, progress: bool) -> None:
    """Trains the warm start, evaluates it and writes it to `folder`, the manifest last."""
    seed = task.cfg.warm_start.seed
    model = train_warm_start(model_cfg, task, progress=progress)
    problems = [task.problem(index, Split.held_out) for index in range(EVALUATED_PROBLEMS)]
    evaluation = evaluate(model, task, problems, temperature=1.0, seed=seed)
    log.info(
        "warm start: mean reward %.3f, exact %.3f, %.1f response tokens over %d held-out problems",
        *(evaluation.reward, evaluation.exact, evaluation.response_tokens, evaluation.problems),
    )
    with _quiet_transformers():
        model.save_pretrained(str(folder))
    task.tokenizer.save(folder)
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    manifest = {"settings": settings, "evaluation": asdict(evaluation), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Example:
    """int32 `[T]` tokens: prompt, answer, stop token; the loss covers those from `prompt_len` on."""

    tokens: NDArray[np.int32]
    prompt_len: int


def train_warm_start(model_cfg: ModelConfig, task: Task, *, progress: bool = False) -> Qwen3MoeForCausalLM:
    """Returns a model after `task.cfg.warm_start.steps` supervised steps on the task's answers, in eval mode.

    Cross-entropy on the answer tokens and the stop token plus the router's load-balancing loss (Switch Transformers,
    arXiv 2101.03961, as in transformers' `load_balancing_loss_func`); AdamW with linear warm-up and cosine decay.
    The same settings and versions give the same weights bit for bit on one kind of processor: one CPU thread is used.
    """
    cfg = task.cfg.warm_start
    model = _random_model(model_cfg, task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    batches = _batches(task, cfg.steps, cfg.batch_size)
    bar = tqdm(batches, total=cfg.steps, desc="warm start", unit="step", disable=None if progress else True)
    model.train()
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # how sums round depends on it: every machine and every `threads` must start from one policy
    try:
        _take_steps(model, optimizer, bar, task)
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def _take_steps(
    model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, bar: tqdm[list[_Example]], task: Task
) -> None:
    cfg = task.cfg.warm_start
    for step, batch in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = cfg.learning_rate * _schedule(step, cfg.steps)
        loss = _step(model, optimizer, batch, task.tokenizer.pad_id)
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        if not math.isfinite(loss):
            raise RuntimeError(f"warm start: loss {loss} at step {step}; lower task.warm_start.learning_rate")


def _random_model(model_cfg: ModelConfig, task: Task) -> Qwen3MoeForCausalLM:
    """Returns a model with seeded random weights whose configuration names the tokenizer's stop and start tokens.

    It does not name the padding token: transformers would give it an embedding of zeros and never train it. A policy
    may sample it, and RMSNorm multiplies the gradient of a zero vector by 1 / sqrt(eps) = 1000.
    """
    config = qwen3_moe_config(model_cfg, task.tokenizer.vocab_size)
    config.eos_token_id = task.tokenizer.eos_id
    config.bos_token_id = task.tokenizer.bos_id
    model = build_qwen3_moe(config, dtype=torch.float32, device=torch.device("cpu"), seed=task.cfg.warm_start.seed)
    model.set_experts_implementation("grouped_mm")  # batched_mm has no backward here
    return model


def _schedule(step: int, steps: int) -> float:
    """Returns the learning rate's factor: linear warm-up, then a cosine from 1 to 0.1."""
    warmup = max(1, round(LEARNING_RATE_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def _batches(task: Task, steps: int, batch_size: int) -> Iterator[list[_Example]]:
    """Yields `steps` batches; examples of similar length share one, and the batches of a group come in random order."""
    shuffle = random.Random(f"batches {task.cfg.warm_start.seed}")
    for first in range(0, steps, LENGTH_GROUP):
        count = min(LENGTH_GROUP, steps - first)
        indices = range(first * batch_size, (first + count) * batch_size)
        examples = sorted((_example(task, index) for index in indices), key=lambda example: len(example.tokens))
        group = [examples[i * batch_size : (i + 1) * batch_size] for i in range(count)]
        shuffle.shuffle(group)
        yield from group


def _example(task: Task, index: int) -> _Example:
    problem = task.problem(index, Split.warm_start)
    return _Example(np.concatenate([problem.prompt_ids, task.answer_ids(problem)]), len(problem.prompt_ids))


def _step(
    model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, batch: Sequence[_Example], pad_id: int
) -> float:
    """Takes one optimiser step and returns the mean cross-entropy per answer token, nats."""
    longest = max(len(example.tokens) for example in batch)
    tokens = torch.full((len(batch), longest), pad_id)  # [B, T]
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    counted = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, example in enumerate(batch):
        tokens[row, : len(example.tokens)] = torch.from_numpy(example.tokens)
        mask[row, : len(example.tokens)] = 1
        counted[row, example.prompt_len : len(example.tokens)] = True
    output = model(input_ids=tokens, attention_mask=mask, use_cache=False, output_router_logits=True)
    predicted = output.logits[:, :-1][counted[:, 1:]]  # [answer tokens, V]
    loss = torch.nn.functional.cross_entropy(predicted, tokens[:, 1:][counted[:, 1:]])
    optimizer.zero_grad()
    (loss + ROUTER_AUX_LOSS_COEF * output.aux_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return loss.item()


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(
    model: Qwen3MoeForCausalLM, task: Task, problems: Sequence[Problem], *, temperature: float, seed: int
) -> Evaluation:
    """Returns reward and length of one sampled response per problem; temperature 0 decodes greedily."""
    responses = sample_responses(model, task, problems, temperature=temperature, seed=seed)
    rewards = np.array([task.reward(problem, ids) for problem, ids in zip(problems, responses, strict=True)])
    return Evaluation(
        problems=len(problems),
        reward=float(rewards.mean()),
        exact=float((rewards == 1.0).mean()),
        response_tokens=float(np.mean([len(ids) for ids in responses])),
        truncated=float(np.mean([ids[-1] != task.tokenizer.eos_id for ids in responses])),
    )


def sample_responses(
    model: Qwen3MoeForCausalLM, task: Task, problems: Sequence[Problem], *, temperature: float, seed: int
) -> list[list[int]]:
    """Returns one response per problem: ids up to and including the stop token, if it came."""
    tokenizer = task.tokenizer
    longest = max(len(problem.prompt_ids) for problem in problems)
    tokens = torch.full((len(problems), longest), tokenizer.pad_id)  # [B, P], padded on the left
    mask = torch.zeros(len(problems), longest, dtype=torch.long)
    for row, problem in enumerate(problems):
        tokens[row, longest - len(problem.prompt_ids) :] = torch.from_numpy(problem.prompt_ids)
        mask[row, longest - len(problem.prompt_ids) :] = 1
    settings = GenerationConfig(
        max_new_tokens=max(len(task.answer_ids(problem)) for problem in problems) + EVALUATION_SLACK_TOKENS,
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 0} if temperature > 0 else {}),
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        output = cast(Any, model).generate(input_ids=tokens, attention_mask=mask, generation_config=settings)
    return [_until_stop(row, tokenizer.eos_id) for row in output[:, longest:].tolist()]


def _until_stop(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id) + 1] if eos_id in ids else ids
