"""A checkpoint keeps open and finished rollouts exactly, replaces the old one atomically, refuses what is not one."""

import numpy as np
import pytest

from experiments import checkpoint
from experiments.buffer import Sample
from experiments.rollout import OpenGroup, OpenRollout
from strategies.types import EngineCall, Rollout


def call(finish, rows):
    return EngineCall(
        "r0.0",
        3,
        np.array([5, 6], np.int32),
        np.array([-0.5, np.nan], np.float32),
        rows,
        np.array([1, -1], np.int32),
        finish,
    )


def groups():
    rows = np.arange(4 * 2 * 2, dtype=np.int8).reshape(4, 2, 2)
    prompt = np.array([1, 2, 3], np.int32)
    return [
        OpenGroup(7, [OpenRollout("r14", 99, prompt, 2, [call("abort", rows), call("abort", None)], retractions=1)]),
        OpenGroup(8, [OpenRollout("r16", 98, prompt, 3)]),
    ]


def same(a, b):
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f") and a.dtype == b.dtype


def test_unfinished_rollouts_come_back_exactly(tmp_path):
    checkpoint.save(tmp_path, {"open_groups": checkpoint.pack_groups(groups())})
    back = checkpoint.unpack_groups(checkpoint.load(tmp_path)["open_groups"])
    for old, new in zip(groups(), back, strict=True):
        assert old.problem_index == new.problem_index
        for a, b in zip(old.rollouts, new.rollouts, strict=True):
            assert (a.rollout_id, a.sample_seed, a.version_started) == (b.rollout_id, b.sample_seed, b.version_started)
            assert (a.retractions, a.finished) == (b.retractions, b.finished)
            assert same(a.tokens(), b.tokens())
            for x, y in zip(a.calls, b.calls, strict=True):
                assert (x.request_id, x.finish, x.row_start) == (y.request_id, y.finish, y.row_start)
                assert same(x.log_probs, y.log_probs)
                assert same(x.versions, y.versions)
                assert (x.rows is None) == (y.rows is None)
                assert x.rows is None or same(x.rows, y.rows)


def test_the_queue_comes_back_exactly(tmp_path):
    opened = groups()[0].rollouts[0]
    rollout = Rollout("r14", opened.tokens(), 3, tuple(opened.calls), num_layers=2, top_k=2, num_experts=16)
    sample = Sample(rollout, 7, "spell", 0.25, version_started=2, retractions=1)
    checkpoint.save(tmp_path, {"queue": checkpoint.pack_samples([[sample]])})
    ((back,),) = checkpoint.unpack_samples(checkpoint.load(tmp_path)["queue"])
    assert (back.problem_index, back.dataset, back.reward, back.retractions) == (7, "spell", 0.25, 1)
    assert isinstance(back.rollout.calls, tuple)
    assert same(back.rollout.tokens, rollout.tokens)
    assert same(back.rollout.log_probs(), rollout.log_probs())


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path):
    checkpoint.save(tmp_path, {"value": 1})
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save(tmp_path, {"value": lambda: None})
    assert checkpoint.load(tmp_path)["value"] == 1


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_what_is_not_a_checkpoint_is_refused_with_its_path(tmp_path, content):
    if content is not None:
        path = tmp_path / checkpoint.FILE
        path.parent.mkdir()
        path.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match=str(checkpoint.FILE)):
        checkpoint.load(tmp_path)


def test_another_format_is_refused(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {})
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    with pytest.raises(checkpoint.CheckpointError, match="has format 2, expected 3"):
        checkpoint.load(tmp_path)
