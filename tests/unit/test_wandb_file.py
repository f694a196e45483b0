"""Our reader of `.wandb` files, on a file that wandb wrote: whole, cut short, damaged, empty."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from wandb.proto import wandb_internal_pb2 as messages

from analysis.wandb_file import read_wandb_file
from experiments.tracking import Tracker

CONFIG = Path(__file__).parents[1] / "data" / "tracking_config.yaml"
STEPS, KEYS = 30, 120  # about 10 kB a step: messages cross the 32 KiB blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = OmegaConf.merge(OmegaConf.load(CONFIG), {"tracking": {"mode": "offline"}})
    assert isinstance(config, DictConfig)
    tracker = Tracker(
        folder, config, strategy="replace", device="cpu", resume_after=None, command="python run.py strategy=x"
    )
    for step in range(1, STEPS + 1):
        tracker.log(step, {f"group/key_{k}": step + k / 7 for k in range(KEYS)}, {"time/train_s": step / 3})
    tracker.finish("completed")
    return folder


@pytest.fixture
def whole(folder: Path) -> Path:
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return path


def copy(whole: Path, folder: Path, data: bytes) -> Path:
    path = folder / whole.name
    path.write_bytes(data)
    return path


def test_every_step_and_key_of_metrics_jsonl_is_in_the_file(whole: Path, folder: Path) -> None:
    assert whole.stat().st_size > 4 * 32 * 1024
    run = read_wandb_file(whole)
    assert run.truncated_at is None
    for name in ("metrics.jsonl", "timings.jsonl"):
        logged = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert [{key: row[key] for key in line} for row, line in zip(run.history, logged, strict=True)] == logged
    assert run.summary["group/key_3"] == STEPS + 3 / 7


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_file_cut_short_gives_the_steps_before_the_cut_and_says_where(
    whole: Path, tmp_path: Path, share: float
) -> None:
    data = whole.read_bytes()
    size = int(len(data) * share)
    run = read_wandb_file(copy(whole, tmp_path, data[:size]))
    assert run.truncated_at is not None
    assert size - 20_000 < run.truncated_at <= size
    steps = [row["step"] for row in run.history]
    assert steps == list(range(1, len(steps) + 1))
    assert abs(len(steps) - share * STEPS) <= 2
    assert run.exit_code is None


def test_a_cut_at_any_place_is_read(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()[:8000]
    for size in [*range(7, 60), *range(60, len(data), 101)]:
        run = read_wandb_file(copy(whole, tmp_path, data[:size]))
        assert run.truncated_at is None or run.truncated_at <= size


def test_zeros_behind_a_crash_are_a_cut(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    run = read_wandb_file(copy(whole, tmp_path, data + bytes(100)))
    assert (len(run.history), run.truncated_at) == (STEPS, len(data))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_a_flipped_bit_is_an_error_that_names_file_and_byte(whole: Path, tmp_path: Path, share: float) -> None:
    data = bytearray(whole.read_bytes())
    data[int(len(data) * share)] ^= 0x10
    with pytest.raises(ValueError, match=rf"{whole.name}: damaged at byte \d+: checksum"):
        read_wandb_file(copy(whole, tmp_path, bytes(data)))


def test_a_foreign_and_an_empty_file_are_errors(whole: Path, tmp_path: Path) -> None:
    for data in (b"", b":W&B", b'{"step": 1}\n'):
        with pytest.raises(ValueError, match="expected the header"):
            read_wandb_file(copy(whole, tmp_path, data))


def fragment(kind: int, data: bytes) -> bytes:
    return struct.pack("<IHB", zlib.crc32(bytes([kind]) + data), len(data), kind) + data


def history(step: int, padding: int = 0) -> bytes:
    record = messages.Record()  # pyright: ignore[reportAttributeAccessIssue]
    record.history.item.add(nested_key=["note"], value_json=json.dumps("x" * padding))
    record.history.step.num = step
    return record.SerializeToString()


@pytest.mark.parametrize("left", range(10))
def test_the_end_of_a_block_is_padding_when_no_header_fits(whole: Path, tmp_path: Path, left: int) -> None:
    header, block = whole.read_bytes()[:7], 32 * 1024
    overhead = len(header) + len(fragment(1, history(1, 30_000))) - 30_000
    first = header + fragment(1, history(1, block - left - overhead))
    assert len(first) == block - left
    message = history(2)
    if left < 7:
        second = bytes(left) + fragment(1, message)
    else:
        second = fragment(2, message[: left - 7]) + fragment(4, message[left - 7 :])
    run = read_wandb_file(copy(whole, tmp_path, first + second))
    assert ([row["_step"] for row in run.history], run.truncated_at) == ([1, 2], None)


def test_fragments_out_of_order_and_foreign_messages_are_errors(whole: Path, tmp_path: Path) -> None:
    header = whole.read_bytes()[:7]
    for fragments, message in (
        (fragment(3, b"x"), "type 3 outside a message"),
        (fragment(2, b"x") + fragment(1, b"x"), "type 1 inside a message"),
        (fragment(9, b"x"), "type 9 with 1 bytes"),
        (fragment(1, b"\xff\xff"), "byte 7: not a message"),
    ):
        with pytest.raises(ValueError, match=message):
            read_wandb_file(copy(whole, tmp_path, header + fragments))
