"""Text to token ids: one token per character for the tiny model, or the tokenizer of a user's checkpoint.

Unknown characters are errors, never dropped or replaced: a silently changed prompt is a wrong problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
_STORY_LETTERS = "àçéêëïôû"  # of the story that reasoning-gym takes words from; each occurs once or a few times
BASE_ALPHABET = "".join(chr(code) for code in range(ord(" "), ord("~") + 1)) + _STORY_LETTERS + _STORY_LETTERS.upper()
"""Printable ASCII and rare letters of reasoning-gym's words: a sample of problems misses them, a long run does not."""


class Tokenizer(Protocol):
    """What a task needs of a tokenizer."""

    pad_id: int
    bos_id: int | None
    eos_id: int
    vocab_size: int

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt, with the tokens that the model expects in front of it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` alone."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special tokens are written out, not dropped."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the tokenizer in Hugging Face format."""
        ...


class CharTokenizer:
    """One token per character, with `<pad>`=0, `<bos>`=1, `<eos>`=2.

    Plain dict lookups, equal to the Hugging Face tokenizer that `save` writes. `extra_characters` join BASE_ALPHABET.
    """

    def __init__(self, extra_characters: Iterable[str] = ()):
        extra = sorted(set(extra_characters) - set(BASE_ALPHABET))
        self._texts = [*SPECIAL_TOKENS, *BASE_ALPHABET, *extra]
        self._ids = {text: index for index, text in enumerate(self._texts)}
        self.pad_id: int = 0
        self.bos_id: int | None = 1
        self.eos_id: int = 2
        self.vocab_size = len(self._texts)

    @property
    def alphabet(self) -> str:
        """The characters, in the order of their ids."""
        return "".join(self._texts[len(SPECIAL_TOKENS) :])

    def encode_prompt(self, text: str) -> list[int]:
        """Returns `<bos>` and the characters' ids.

        Raises:
            ValueError: a character is not in the alphabet.
        """
        return [self._ids["<bos>"], *self.encode(text)]

    def encode(self, text: str) -> list[int]:
        """Returns the characters' ids.

        Raises:
            ValueError: a character is not in the alphabet.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise ValueError(
                f"character {character!r} (U+{ord(character):04X}) of {text!r} is not in the tokenizer's alphabet "
                f"of {len(self.alphabet)} characters"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special tokens are written out."""
        return "".join(self._texts[index] for index in ids)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which `AutoTokenizer.from_pretrained(folder)` reads."""
        fast = FastTokenizer(models.WordLevel(self._ids))  # no unknown token: an unknown character raises there, too
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        fast.decoder = decoders.Fuse()
        pad, bos, eos = SPECIAL_TOKENS
        fast.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, self._ids[bos])])
        PreTrainedTokenizerFast(
            tokenizer_object=fast,
            pad_token=pad,
            bos_token=bos,
            eos_token=eos,
            padding_side="left",
            clean_up_tokenization_spaces=False,
        ).save_pretrained(str(folder))


class CheckpointTokenizer:
    """The tokenizer of a Hugging Face folder, as a task uses it."""

    def __init__(self, folder: Path):
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.vocab_size = len(self._tokenizer)
        eos_id: int | None = self._tokenizer.eos_token_id
        if eos_id is None:
            raise ValueError(f"the tokenizer in {folder} has no eos_token: a response could not end")
        self.eos_id: int = eos_id
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.pad_id: int = eos_id if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt, with the special tokens that the tokenizer adds.

        Raises:
            ValueError: the tokenizer refuses a character.
        """
        return self._encode(text, special_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` alone.

        Raises:
            ValueError: the tokenizer refuses a character.
        """
        return self._encode(text, special_tokens=False)

    def _encode(self, text: str, *, special_tokens: bool) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=special_tokens)
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(f"the checkpoint's tokenizer cannot encode {text!r}: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special tokens are written out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Writes the tokenizer in Hugging Face format."""
        self._tokenizer.save_pretrained(str(folder))
