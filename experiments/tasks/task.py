"""Problems without end and their rewards: a weighted mix of reasoning-gym datasets with reasoning-gym's own scorers.

A problem is a pure function of (task, seed, split, index). The prompt is a short template instead of the dataset's
English question: a small character-level model would spend most of its tokens on text that never changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from string import Formatter
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from experiments.schema import DatasetConfig, TaskConfig
from experiments.tasks.reasoning_gym_compat import reasoning_gym
from experiments.tasks.tokenizer import CharTokenizer, CheckpointTokenizer, Tokenizer

MAX_INDEX = 2**32
PROBED_ENTRIES = 200


class Split(Enum):
    """Streams of problems: no two share a generator seed of reasoning-gym, though a word may appear in both."""

    train = 0  # PPO; follows the run's seed
    warm_start = 1  # supervised steps; follows the warm start's seed, so that all runs share one cached model
    held_out = 2  # evaluation; follows the warm start's seed


@dataclass(frozen=True, eq=False)
class Problem:
    """One problem.

    Attributes:
        index: position in its stream.
        dataset: name of the reasoning-gym dataset.
        prompt: text of the prompt.
        prompt_ids: int32 `[P]`, what the model is fed.
        entry: reasoning-gym's record (`question`, `answer`, `metadata`), what its scorer reads.
    """

    index: int
    dataset: str
    prompt: str
    prompt_ids: NDArray[np.int32]
    entry: dict[str, Any]


class _PromptFormatter(Formatter):
    """`str.format` in which the format spec of a list is its separator: `{words: }` joins the words with a space."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list | tuple):
            return (format_spec or ", ").join(str(item) for item in value)
        return super().format_field(value, format_spec)


_FORMATTER = _PromptFormatter()


class _Dataset:
    """One reasoning-gym dataset and its prompt template."""

    def __init__(self, cfg: DatasetConfig):
        self.name = cfg.name
        self._template = cfg.prompt
        self._generator = _create_generator(cfg)

    def entry(self, key: int) -> dict[str, Any]:
        """Returns the entry of generator seed `key`: with dataset seed 0, reasoning-gym seeds entry i with i."""
        return self._generator[key]

    def prompt(self, entry: dict[str, Any]) -> str:
        """Returns the template filled from the entry's metadata and its `question`.

        Raises:
            ValueError: the template names a field that the entry lacks.
        """
        values = {"question": entry["question"], **entry["metadata"]}
        try:
            return _FORMATTER.vformat(self._template, (), values)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"task dataset {self.name}: the prompt {self._template!r} names {error}, the entry has {sorted(values)}"
            ) from error

    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Returns reasoning-gym's score of `answer`, 1.0 for a right one.

        Raises:
            RuntimeError: the scorer failed or returned no finite number.
        """
        try:
            score = float(self._generator.score_answer(answer, entry))
        except Exception as error:
            raise RuntimeError(
                f"reasoning-gym's scorer of {self.name} failed on the answer {answer!r} (right: {entry['answer']!r}): "
                "RL needs a dataset whose scorer takes any text"
            ) from error
        if not math.isfinite(score):
            raise RuntimeError(f"reasoning-gym's scorer of {self.name} returned {score} for the answer {answer!r}")
        return score


def _create_generator(cfg: DatasetConfig) -> Any:
    """Returns the reasoning-gym dataset with seed 0; names of an enum's values in `params` become its members."""
    if cfg.name not in reasoning_gym.factory.DATASETS:
        raise ValueError(f"task dataset {cfg.name!r} is not a dataset of reasoning-gym")
    if reserved := {"seed", "size"} & set(cfg.params):
        raise ValueError(f"task dataset {cfg.name}: {sorted(reserved)} in params is set by the task itself")
    config_class = reasoning_gym.factory.DATASETS[cfg.name][1]
    hints = get_type_hints(config_class)
    names = {field.name for field in fields(config_class)}
    if unknown := set(cfg.params) - names:
        raise ValueError(f"task dataset {cfg.name} has no parameter {sorted(unknown)}; it has {sorted(names)}")
    params = {
        name: hints[name](value) if isinstance(hints[name], type) and issubclass(hints[name], Enum) else value
        for name, value in cfg.params.items()
    }
    try:
        return reasoning_gym.create_dataset(cfg.name, seed=0, **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task dataset {cfg.name} refuses params {cfg.params}: {error}") from error


class Task:
    """An unlimited stream of problems and their rewards.

    Attributes:
        cfg: its configuration.
        tokenizer: encodes prompts and decodes responses.
    """

    def __init__(self, cfg: TaskConfig, seed: int, tokenizer: Tokenizer | None = None):
        """Builds the datasets. `seed` drives the train split; without a `tokenizer`, characters are the tokens.

        Raises:
            ValueError: no dataset, one listed twice, a weight that is not positive, or a dataset, parameter or template
                field that reasoning-gym lacks.
        """
        if not cfg.datasets:
            raise ValueError(f"task {cfg.name}: datasets is empty")
        for dataset in cfg.datasets:
            if not dataset.weight > 0:
                raise ValueError(f"task {cfg.name}: weight of {dataset.name} must be positive, came {dataset.weight}")
        self.cfg = cfg
        self._seeds = {Split.train: seed, Split.warm_start: cfg.warm_start.seed, Split.held_out: cfg.warm_start.seed}
        self._datasets = [_Dataset(dataset) for dataset in cfg.datasets]
        self._by_name = {dataset.name: dataset for dataset in self._datasets}
        if len(self._by_name) < len(self._datasets):
            raise ValueError(f"task {cfg.name}: a dataset is listed twice: {[d.name for d in self._datasets]}")
        self._weights = [dataset.weight for dataset in cfg.datasets]
        self.tokenizer = tokenizer if tokenizer is not None else CharTokenizer(self._probe_characters())

    def problem(self, index: int, split: Split = Split.train) -> Problem:
        """Returns problem `index` (0 <= index < 2**32) of a split; the same one whenever and wherever it is asked for.

        Raises:
            ValueError: the tokenizer does not know a character of the prompt.
        """
        if not 0 <= index < MAX_INDEX:
            raise ValueError(f"problem index must be in 0..{MAX_INDEX - 1}, came {index}")
        # Key ranges of two (seed, split) pairs do not overlap. The mix is drawn from a stream of its own: reasoning-gym
        # seeds Python's generator with the key, and equal draws would tie the dataset to the content of the problem.
        key = (self._seeds[split] * len(Split) + split.value) * MAX_INDEX + self._entry_index(index, split)
        dataset = random.Random(f"mix {key}").choices(self._datasets, self._weights)[0]
        entry = dataset.entry(key)
        prompt = dataset.prompt(entry)
        return Problem(index, dataset.name, prompt, self._encode(dataset.name, prompt, prompt=True), entry)

    def _entry_index(self, index: int, split: Split) -> int:
        """Returns which entry of its stream problem `index` is: the train split passes over the same ones again."""
        if split is not Split.train or self.cfg.problems == 0:
            return index
        epoch, place = divmod(index, self.cfg.problems)
        order = list(range(self.cfg.problems))
        random.Random(f"epoch {self._seeds[split]} {epoch}").shuffle(order)
        return order[place]

    def answer_ids(self, problem: Problem) -> NDArray[np.int32]:
        """Returns int32 `[n]`: the dataset's own answer and the stop token.

        Raises:
            ValueError: the tokenizer does not know a character of the answer.
        """
        ids = self._encode(problem.dataset, problem.entry["answer"], prompt=False)
        return np.append(ids, np.int32(self.tokenizer.eos_id))

    def reward(self, problem: Problem, output_ids: Sequence[int] | NDArray[np.integer[Any]]) -> float:
        """Returns reasoning-gym's score of a response: 1.0 for a right answer, partial credit as the dataset gives it.

        The answer ends before the first stop token; a response without one (cut by the length limit) is scored as it
        stands. Other special tokens are written out and so make the answer wrong.

        Raises:
            RuntimeError: the dataset's scorer failed.
        """
        ids = [int(index) for index in output_ids]
        if self.tokenizer.eos_id in ids:
            ids = ids[: ids.index(self.tokenizer.eos_id)]
        return self._by_name[problem.dataset].score(self.tokenizer.decode(ids), problem.entry)

    def _encode(self, dataset: str, text: str, *, prompt: bool) -> NDArray[np.int32]:
        try:
            ids = self.tokenizer.encode_prompt(text) if prompt else self.tokenizer.encode(text)
        except ValueError as error:
            raise ValueError(f"task dataset {dataset}: {error}") from error
        return np.array(ids, dtype=np.int32)

    def _probe_characters(self) -> set[str]:
        """Returns the characters of the first entries of every dataset."""
        characters: set[str] = set()
        for dataset in self._datasets:
            for key in range(PROBED_ENTRIES):
                entry = dataset.entry(key)
                characters.update(dataset.prompt(entry), entry["answer"])
        return characters


def load_task(cfg: TaskConfig, seed: int, checkpoint: str | None = None) -> Task:
    """Returns the task; a `checkpoint` (Hugging Face folder) brings its own tokenizer.

    Raises:
        ValueError: the checkpoint's tokenizer has no stop token, or does not give a text of the task back unchanged.
    """
    if checkpoint is None:
        return Task(cfg, seed)
    tokenizer = CheckpointTokenizer(Path(checkpoint).expanduser())
    task = Task(cfg, seed, tokenizer)
    for problem in (task.problem(index, Split.held_out) for index in range(PROBED_ENTRIES)):
        for text in (problem.prompt, problem.entry["answer"]):
            back = tokenizer.decode(tokenizer.encode(text))
            if back != text:
                raise ValueError(
                    f"the tokenizer in {checkpoint} does not cover task {cfg.name}: "
                    f"dataset {problem.dataset}, text {text!r} comes back as {back!r}"
                )
    return task
