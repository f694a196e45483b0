"""The plain lookups of the loop and the Hugging Face tokenizer of the checkpoint are one tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from experiments.tasks.tokenizer import BASE_ALPHABET, SPECIAL_TOKENS, CharTokenizer, CheckpointTokenizer

TEXTS = [BASE_ALPHABET, "tête, 2 × 3  =  6", " leading and trailing ", "don't , stop .", "×"]


def test_the_saved_tokenizer_encodes_and_decodes_alike(tmp_path: Path):
    ours = CharTokenizer("×")
    ours.save(tmp_path)
    saved = AutoTokenizer.from_pretrained(str(tmp_path))
    assert len(saved) == ours.vocab_size
    assert (saved.pad_token_id, saved.bos_token_id, saved.eos_token_id) == (ours.pad_id, ours.bos_id, ours.eos_id)
    for text in TEXTS:
        ids = ours.encode(text)
        assert saved.encode(text) == ours.encode_prompt(text)
        assert saved.encode(text, add_special_tokens=False) == ids
        assert saved.decode(ids) == ours.decode(ids) == text
    everything = list(range(ours.vocab_size))
    assert saved.decode(everything) == ours.decode(everything) == "".join(SPECIAL_TOKENS) + ours.alphabet


def test_a_checkpoints_tokenizer_serves_a_task_alike(tmp_path: Path):
    ours = CharTokenizer("×")
    ours.save(tmp_path)
    loaded = CheckpointTokenizer(tmp_path)
    assert (loaded.vocab_size, loaded.eos_id, loaded.pad_id) == (ours.vocab_size, ours.eos_id, ours.pad_id)
    for text in TEXTS:
        assert loaded.encode_prompt(text) == ours.encode_prompt(text)
        assert loaded.decode(loaded.encode(text)) == text


def test_an_unknown_character_is_an_error_that_names_it(tmp_path: Path):
    ours = CharTokenizer()
    with pytest.raises(ValueError, match=r"'×' \(U\+00D7\) of '2×3'"):
        ours.encode("2×3")
    ours.save(tmp_path)
    with pytest.raises(Exception, match="UNK"):  # tokenizers raises plain Exception
        AutoTokenizer.from_pretrained(str(tmp_path)).encode("2×3")
