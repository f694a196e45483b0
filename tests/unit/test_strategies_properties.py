"""Properties of the merge rules over random rollouts of a simulated engine.

The simulation keeps the KV cache as the list of (call, position) pairs that filled it, which is the truth about what
every call was routed through. A row holds the ids of its pair, so each merged row tells where it came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strategies import Exact, MergeError, MergeStrategy, NaiveConcat, Replace, ReplayView, Rollout, SliceConcat
from strategies.conformance import merge_twice
from strategies.reply import RawReply, RowShape, check_reply
from strategies.targets import all_configs, build

SHAPE = RowShape(num_layers=2, top_k=2, num_experts=1024)
PROFILE = settings(max_examples=200, deadline=None, derandomize=True, database=None)
STRATEGIES = {config.name: build(config.target, config.arguments) for config in all_configs()}

Origin = tuple[int, int]
"""The call that routed a position, and the position."""


def row_of(origin: Origin) -> list[list[int]]:
    index, position = origin
    first = 2 * (64 * index + position)
    return [[first, first + 1], [first + 1, first]]


@dataclass(frozen=True)
class World:
    """A rollout and, for every call that ran, the origin of each row it was routed through."""

    rollout: Rollout
    used: dict[int, list[Origin]]

    def returned(self, origin: Origin) -> bool:
        """Returns whether the call that routed a position also sent its row."""
        call = self.rollout.calls[origin[0]]
        return call.rows is not None and origin[1] >= call.row_start

    def matrix(self, origins: list[Origin]) -> np.ndarray:
        return np.array([row_of(origin) for origin in origins]).reshape(-1, 2, 2)

    def first_fed(self, count: int) -> list[Origin]:
        out: list[Origin] = []
        for index, call in enumerate(self.rollout.calls):
            if call.new_tokens:
                out += self.used[index][len(out) :]
        return out[:count]

    def newest(self, count: int) -> list[list[Origin]]:
        """Returns the rows that each call reaching `count` positions was routed through, oldest first."""
        calls = enumerate(self.rollout.calls)
        return [self.used[i][:count] for i, call in calls if call.new_tokens and call.end - 1 >= count]


@st.composite
def worlds(
    draw: st.DrawFn,
    max_calls: int = 6,
    kept: st.SearchStrategy[bool] = st.booleans(),  # noqa: B008
    gaps: bool = True,
) -> World:
    prompt = draw(st.integers(1, 4))
    length, cache, held = prompt, [], 0
    calls, used = [], {}
    for index in range(draw(st.integers(1, max_calls))):
        length += draw(st.integers(0, 2)) if calls else 0
        new = draw(st.integers(0, 3))
        ran = new > 0 or draw(st.booleans())
        keep = bool(used) and ran and draw(kept)
        start, rows = 0, None
        if ran:
            cache = cache[: len(cache) if keep else 0]
            cache = cache + [(index, position) for position in range(len(cache), length + new - 1)]
            used[index] = list(cache)
            start = draw(st.sampled_from([0, held] if keep or gaps else [0]))
            surplus = [(index, 63)] if draw(st.booleans()) else []
            rows = [row_of(origin) for origin in cache[start:] + surplus]
            held = length + new - 1
            if gaps and new and draw(st.integers(0, 9)) == 0:
                rows = None
        unscored = draw(st.integers(0, 9)) == 0
        raw = RawReply(
            request_id=f"w.{index}",
            input_len=length,
            output_ids=list(range(length, length + new)),
            finish="abort",
            log_probs=[None if unscored and i == 0 else -0.5 for i in range(new)],
            rows=rows,
            version=index,
            row_start=start,
            requested_start=start,
            kv_kept=keep,
            in_place=keep,
        )
        calls.append(check_reply(raw, SHAPE, "either").call)
        length += new
    end = draw(st.integers(max(prompt, length - 2), length + 2))
    rollout = Rollout(
        "w", np.arange(end, dtype=np.int32), prompt, tuple(calls), *SHAPE[:3], trainer_version=len(calls) - 1
    )
    return World(rollout, used)


def expect(strategy: MergeStrategy, world: World, needed: list[Origin]) -> list[ReplayView] | None:
    """Returns the views; None after checking that the strategy raised because a needed row was not sent."""
    if all(map(world.returned, needed)):
        return strategy(world.rollout)
    with pytest.raises(
        MergeError, match=r"rollout w, call \d+ \(request w\.\d+\): rows of positions \d+\.\.\d+ expected"
    ):
        strategy(world.rollout)
    return None


@PROFILE
@given(worlds())
def test_slice_concat_gives_the_row_of_the_call_that_first_fed_a_position_or_raises(world: World):
    assume(any(world.rollout.segments()))
    count = max(segment.last for segment in world.rollout.segments()) - 1
    views = expect(SliceConcat(), world, world.first_fed(count))
    if views is not None:
        assert np.array_equal(views[0].rows, world.matrix(world.first_fed(count)))


@PROFILE
@given(worlds())
def test_replace_gives_the_rows_of_the_newest_call_that_sent_them_or_raises(world: World):
    assume(any(world.rollout.segments()))
    count = max(segment.last for segment in world.rollout.segments()) - 1
    options = world.newest(count)
    complete = [option for option in options if all(map(world.returned, option))]
    chosen = (complete or options)[-1]
    views = expect(Replace(), world, chosen)
    if views is not None:
        assert np.array_equal(views[0].rows, world.matrix(chosen))


@PROFILE
@given(worlds())
def test_exact_predicts_every_token_through_the_rows_its_own_call_used_or_raises(world: World):
    counted = world.rollout.counted()
    segments = [s for s in world.rollout.segments() if counted[s.first : s.last].any()]
    views = expect(Exact(), world, [o for s in segments for o in world.used[s.call_index][: s.last - 1]])
    if views is None:
        return
    carried = sum(np.pad(view.loss_mask, (0, world.rollout.length - view.length)).astype(int) for view in views)
    assert np.array_equal(carried, counted.astype(int) if views else 0)
    for segment in segments:
        for token in range(segment.first, segment.last):
            for view in views:
                if token < view.length and view.loss_mask[token]:
                    assert np.array_equal(view.rows[:token], world.matrix(world.used[segment.call_index][:token]))


@PROFILE
@given(worlds())
def test_every_strategy_holds_the_contract_and_all_but_mask_stale_partition_the_response(world: World):
    for name, strategy in STRATEGIES.items():
        try:
            _, contract = merge_twice(strategy, world.rollout)
        except MergeError:
            continue
        assert not contract.failures, name
        assert contract.partition or name == "mask_stale", name


@PROFILE
@given(worlds(max_calls=1, gaps=False))
def test_with_one_call_exact_replace_slice_concat_and_naive_concat_agree(world: World):
    assume(world.rollout.counted().any())
    views = [strategy(world.rollout) for strategy in (Exact(), Replace(), SliceConcat(), NaiveConcat())]
    for (view,) in views:
        count = views[0][0].length - 1
        assert np.array_equal(view.rows[:count], views[0][0].rows)
        assert np.array_equal(np.flatnonzero(view.loss_mask), np.flatnonzero(views[0][0].loss_mask))


@PROFILE
@given(worlds(kept=st.just(True), gaps=False))
def test_with_a_kept_cache_exact_replace_and_slice_concat_agree_in_one_view(world: World):
    assume(world.rollout.counted().any())
    (exact,), (replace,), (slices,) = (strategy(world.rollout) for strategy in (Exact(), Replace(), SliceConcat()))
    assert np.array_equal(replace.rows, slices.rows)
    assert np.array_equal(exact.rows, slices.rows[: len(exact.rows)])
    assert np.array_equal(np.flatnonzero(exact.loss_mask), np.flatnonzero(slices.loss_mask))
