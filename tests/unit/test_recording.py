"""A recording gives back every rollout exactly, each weight once, and refuses what it cannot vouch for."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments import recording_file
from experiments.ppo import group_advantages
from experiments.recording import read_recording
from experiments.recording_file import RecordingError, pack, read, row_type, unpack, write
from tests.conftest import ROOT
from tests.unit.recording_cases import LAYERS, TOP_K, differences, random_samples, record


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_comes_back_exactly_whatever_its_calls_hold(tmp_path, seed):
    samples = random_samples(seed)
    columns = pack(samples, np.zeros(len(samples), np.float32))
    write(tmp_path / "u.safetensors", "update", columns, {})
    _, back = read(tmp_path / "u.safetensors", "update")
    assert differences(samples, unpack(tmp_path, back, (LAYERS, TOP_K, 16), version=4)) == []


def test_the_cases_hold_everything_that_a_call_can_hold():
    calls = [call for seed in range(20) for sample in random_samples(seed) for call in sample.rollout.calls]
    assert {call.finish for call in calls} == {"stop", "length", "abort"}
    for claim in (
        lambda call: call.new_tokens == 0,
        lambda call: call.rows is None,
        lambda call: call.rows is not None and len(call.rows) == 0,
        lambda call: call.row_start > 0,
        lambda call: call.surplus is not None,
        lambda call: call.kv_kept and not call.mixed_rows,
        lambda call: np.isnan(call.log_probs).any(),
        lambda call: (call.versions == -1).any(),
    ):
        assert any(claim(call) for call in calls)


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16)])
def test_rows_take_the_narrowest_type_for_the_expert_count(experts, dtype):
    samples = random_samples(3, experts=experts, dtype=np.int32)
    columns = pack(samples, np.zeros(len(samples), np.float32))
    assert row_type(experts) == columns["rows"].dtype == columns["surplus"].dtype == dtype
    back = unpack("", columns, (LAYERS, TOP_K, experts), version=4)
    assert differences(samples, back) == []


@pytest.mark.parametrize("bad", [-1, 16])
def test_an_expert_that_does_not_exist_is_refused_and_never_wrapped(bad):
    samples = random_samples(1)
    with_rows = next(s for s in samples for c in s.rollout.calls if c.rows is not None and c.rows.size)
    call = next(c for c in with_rows.rollout.calls if c.rows is not None and c.rows.size)
    call.rows[0, 0, 0] = bad
    with pytest.raises(ValueError, match=rf"request {call.request_id}: .* ids 0\.\.15 are expected"):
        pack(samples, np.zeros(len(samples), np.float32))


def test_a_recording_holds_batches_advantages_and_the_weights_before_every_update(tmp_path):
    batches = record(tmp_path, updates=4, sync_interval=2)
    recording = read_recording(tmp_path)
    assert (recording.strategy, recording.seed, recording.steps) == ("replace", 0, (1, 2, 3, 4))
    assert recording.config["algorithm"]["old_log_prob"] == "bypass"
    assert recording.packages["numpy"] == np.__version__
    for step, batch in zip(recording.steps, batches, strict=True):
        update = recording.update(step)
        version = (step - 1) // 2
        assert update.trainer_version == version
        fed = [replace(s, rollout=replace(s.rollout, trainer_version=version)) for s in batch]
        assert differences(fed, update.samples) == []
        rewards = np.array([sample.reward for sample in batch])
        groups = np.array([sample.problem_index for sample in batch])
        assert np.array_equal(update.advantages, group_advantages(rewards, groups, True))
        assert recording.weights_before(step)["w"].tolist() == [[step - 1.0] * 2] * 2
    assert recording.versions == (0, 1)
    assert recording.weights(1)["w"][0, 0] == 2.0


def test_weights_are_stored_once_and_only_unpublished_ones_have_a_file_of_their_own(tmp_path):
    record(tmp_path, updates=4, sync_interval=2)
    names = sorted(path.stem for path in (tmp_path / "rollouts" / "weights").iterdir())
    assert names == ["update_000002", "update_000004", "version_000000", "version_000001"]


def test_a_resumed_run_replaces_what_lies_beyond_its_checkpoint(tmp_path):
    record(tmp_path / "whole", updates=6, sync_interval=2)
    record(tmp_path / "part", updates=9, sync_interval=2)
    (tmp_path / "part" / "rollouts" / ".update_000007.safetensors.partial").write_bytes(b"cut")
    record(tmp_path / "part", updates=6, sync_interval=2, first=3)
    files = [
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("whole", "part")
    ]
    assert files[0] == files[1]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "u.safetensors"
    write(path, "weights", {"w": np.ones(2)}, {})
    with pytest.raises(TypeError):
        write(path, "weights", {"w": np.zeros(2)}, {"not": object()})
    assert read(path, "weights")[1]["w"].tolist() == [1.0, 1.0]


def test_reading_imports_no_torch():
    probe = "import sys\nfrom experiments.recording import read_recording\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "False", result.stderr


# --- files that are not what they should be --------------------------------------------------------------------------

FIRST = "update_000001.safetensors"


def rewritten(path, **header):
    with_header = json.dumps({"format": recording_file.FORMAT, "schema": recording_file.SCHEMA, **header})
    save_file({"w": np.ones(2)}, path, {recording_file.HEADER: with_header})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-5]), "expected a complete safetensors file .* found a truncated"),
        (lambda p: p.write_bytes(p.read_bytes()[:20]), "found a truncated or foreign one"),
        (lambda p: p.write_bytes(b""), "found a truncated or foreign one"),
        (lambda p: p.write_bytes(b"PK\x03\x04 something else" * 50), "found a truncated or foreign one"),
        (lambda p: save_file({"w": np.ones(2)}, p), "expected a file of format 'routemerge recording'"),
        (lambda p: rewritten(p, kind="update", schema=2), "expected schema version 1, found 2"),
        (lambda p: rewritten(p, kind="weights"), "expected update of a recording, found weights"),
        (lambda p: p.unlink(), "found no such file"),
    ],
)
def test_a_damaged_or_foreign_update_is_refused_by_name_without_reading_it(tmp_path, damage, message):
    record(tmp_path, updates=2)
    recording = read_recording(tmp_path)
    damage(tmp_path / "rollouts" / FIRST)
    for attempt in (lambda: recording.check([1]), lambda: recording.update(1)):
        with pytest.raises(RecordingError, match=f"{FIRST}: .*{message}"):
            attempt()
    recording.check([2])


def test_weights_of_a_version_that_a_token_needs_must_be_there(tmp_path):
    record(tmp_path, updates=5)
    recording = read_recording(tmp_path)
    sampled = recording.update(5).versions
    assert sampled[0] < 4, "the batch must hold older tokens than the trainer's version"
    (tmp_path / "rollouts" / "weights" / f"version_{sampled[0]:06d}.safetensors").unlink()
    with pytest.raises(RecordingError, match=rf"version_{sampled[0]:06d}\.safetensors: expected weights"):
        recording.check([5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("log_probs"), "expected an array 'log_probs'"),
        (lambda c: c.update(log_probs=c["log_probs"][:-1]), "'log_probs': expected"),
        (lambda c: c.update(reward=c["reward"][:-1]), "'reward': expected"),
        (lambda c: c["tokens.offsets"].__setitem__(1, 999), r"'tokens\.offsets': expected growing offsets"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(tmp_path, change, message):
    samples = random_samples(1)
    columns = pack(samples, np.zeros(len(samples), np.float32))
    change(columns)
    with pytest.raises(RecordingError, match=f"{tmp_path}: {message}"):
        unpack(tmp_path, columns, (LAYERS, TOP_K, 16), version=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:50], "expected a JSON object, found a damaged file"),
        (lambda text: "[]", "expected a file of format"),
        (lambda text: text.replace('"schema": 1', '"schema": 9'), "expected schema version 1, found 9"),
        (lambda text: text.replace('"packages"', '"others"'), "found none of packages"),
    ],
)
def test_a_damaged_index_is_refused_by_name(tmp_path, change, message):
    record(tmp_path, updates=1)
    index = tmp_path / "rollouts" / "index.json"
    index.write_text(change(index.read_text()))
    with pytest.raises(RecordingError, match=rf"index\.json: .*{message}"):
        read_recording(tmp_path)


def test_a_folder_without_a_recording_says_how_to_get_one(tmp_path):
    with pytest.raises(RecordingError, match="a run writes it with record=true"):
        read_recording(tmp_path)
    record(tmp_path, updates=0)
    with pytest.raises(RecordingError, match=r"expected files update_000001\.safetensors and so on, found none"):
        read_recording(tmp_path)
