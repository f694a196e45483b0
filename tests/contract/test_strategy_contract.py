"""What holds for every conf/strategy/*.yaml found on disk and for a user's own class, built as a run builds it."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from strategies import EngineCall, MergeStrategy, Rollout
from strategies.__main__ import main
from strategies.base import needs_new_rows_only
from strategies.conformance import merge_twice

FILES = sorted((Path(__file__).parents[2] / "conf" / "strategy").glob("*.yaml"))
NEW_ROWS_ONLY = [path for path in FILES if needs_new_rows_only(instantiate(OmegaConf.load(path)))]

OWN = '''
from dataclasses import dataclass
from typing import ClassVar

from strategies import ReplayView, Rollout, SliceConcat


@dataclass(frozen=True)
class HalfLive:
    """slice_concat, live from a share of the rows on."""

    share: float
    single_view: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        views = SliceConcat()(rollout)
        for view in views:
            view.rows[int(self.share * len(view.rows)) :] = -1
        return views


class Shifted(HalfLive):
    def __call__(self, rollout):
        views = SliceConcat()(rollout)
        for view in views:
            view.rows[1:] = view.rows[:-1].copy()
        return views
'''


def rollout(*parts: int, layers: int = 3, top_k: int = 2, experts: int = 32) -> Rollout:
    """Returns a rollout of random rows with one call per part, each generating that many tokens."""
    random = np.random.default_rng(0)
    calls, length = [], 5
    for index, new in enumerate(parts):
        rows = np.argsort(random.random((length + new - 1, layers, experts)), axis=-1)[..., :top_k].astype(np.int16)
        ids = np.arange(length, length + new, dtype=np.int32)
        scores = np.full(new, -0.5, np.float32)
        versions = np.full(new, index, np.int32)
        calls.append(EngineCall(f"r.{index}", length, ids, scores, rows, versions, "abort"))
        length += new
    return Rollout("r", np.arange(length, dtype=np.int32), 5, tuple(calls), layers, top_k, experts, len(parts) - 1)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def strategy(request: pytest.FixtureRequest) -> MergeStrategy:
    return instantiate(OmegaConf.load(request.param))


def test_there_is_a_file_for_every_rule():
    assert {path.stem for path in FILES} >= {
        *("replace", "slice_concat", "naive_concat", "exact", "live"),
        *("recompute", "last_segment", "mask_stale", "gated", "shuffled"),
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_comment_says_in_two_lines_what_it_does_who_uses_it_and_when_it_is_exact(path: Path):
    first, second, third = path.read_text().splitlines()[:3]
    assert all(f"{key}: " in first for key in ("rows", "loss", "exact when"))
    assert second.startswith("# used by: ")
    assert third.startswith("_target_: ")


@pytest.mark.parametrize("parts", [(6,), (4, 3), (2, 0, 3, 1), (0, 5)])
def test_it_keeps_dtype_and_row_count_and_the_contract(strategy: MergeStrategy, parts: tuple[int, ...]):
    assert isinstance(strategy, MergeStrategy)
    of = rollout(*parts)
    views, contract = merge_twice(strategy, of)
    assert contract.failures == []
    for view in views:
        assert view.rows.dtype == np.int16
        assert view.rows.shape == (view.length - 1, 3, 2)
    assert max(view.length for view in views) == of.length


def test_with_one_call_it_replays_the_calls_own_rows_or_says_it_does_not(strategy: MergeStrategy):
    """With nothing to merge, rules differ only in what they leave live; the shuffled control permutes."""
    of = rollout(6)
    (view,) = strategy(of)
    assert view.loss_mask.tolist() == [False] * 5 + [True] * 6
    if type(strategy).__name__ == "Shuffled":
        recorded = of.calls[0].rows
        assert recorded is not None
        assert sorted(map(bytes, view.rows)) == sorted(map(bytes, recorded))
    else:
        assert ((view.rows == of.calls[0].rows) | (view.rows == -1)).all()


def test_a_users_own_class_needs_a_class_and_a_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "my_package.py").write_text(OWN)
    (tmp_path / "mine.yaml").write_text(
        textwrap.dedent("""\
        _target_: my_package.HalfLive
        share: 0.5
    """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = instantiate(OmegaConf.load(tmp_path / "mine.yaml"))
    assert isinstance(mine, MergeStrategy)
    assert merge_twice(mine, rollout(4, 3))[1].failures == []
    assert main(["check", "my_package.HalfLive", "share=0.5"]) == 0
    assert main(["check", "my_package:Shifted", "share=0.5"]) == 1
    assert "FAIL     two_calls: view 0, position 1: a live row or one that a call returned" in capsys.readouterr().out


@pytest.mark.parametrize("path", NEW_ROWS_ONLY, ids=lambda path: path.stem)
def test_who_declares_that_new_rows_are_enough_gives_the_same_views_from_them(path: Path):
    strategy = instantiate(OmegaConf.load(path))
    whole = rollout(4, 3, 1, 6)
    delta = []
    for call in whole.calls:
        start = call.input_len - 1 if delta else 0
        assert call.rows is not None
        delta.append(dataclasses.replace(call, rows=call.rows[start:], row_start=start))
    for expected, came in zip(strategy(whole), strategy(dataclasses.replace(whole, calls=tuple(delta))), strict=True):
        assert np.array_equal(expected.rows, came.rows)
        assert np.array_equal(expected.loss_mask, came.loss_mask)
