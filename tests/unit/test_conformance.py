"""Every case that ships is a test of every rule it covers, and the checker itself catches what it must."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from strategies import LIVE, Exact, MergeStrategy, ReplayView, Rollout, SliceConcat
from strategies.__main__ import main
from strategies.case_file import CASES_DIR, Case, build_sample, load_cases
from strategies.checks import row_dtype
from strategies.conformance import merge_twice, run_case
from strategies.targets import build, find

CASES = [case for path in sorted(CASES_DIR.glob("*.json")) for case in load_cases(path)]
ALL_RULES = ("replace", "slice_concat", "naive_concat", "exact")
OTHER_RULES = ("live", "recompute", "last_segment", "mask_stale", "gated")
COVERED = [
    pytest.param(case, rule, id=f"{case.case}-{rule}")
    for case in CASES
    for rule in ALL_RULES + OTHER_RULES
    if rule in case.expect or ("error" in case.expect and rule in ALL_RULES)
]


def strategy(name: str) -> MergeStrategy:
    return build(*find(name)[1:])


def case(name: str) -> Case:
    return next(c for c in CASES if c.case == name)


def test_the_cases_are_all_there():
    assert len(load_cases(CASES_DIR / "merge_cases.json")) == 55
    assert len({c.case for c in CASES}) == len(CASES)


@pytest.mark.parametrize(("case", "rule"), COVERED)
def test_case(case: Case, rule: str):
    result = run_case(case, strategy(rule), rule)
    assert not result.failures
    assert result.refused is None


@dataclasses.dataclass(frozen=True)
class Faulty:
    """slice_concat with one fault of choice."""

    fault: str
    single_view: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        view = SliceConcat()(rollout)[0]
        rows, mask = view.rows.copy(), view.loss_mask.copy()
        if self.fault == "shifted by one":
            rows = np.roll(rows, 1, axis=0)
        elif self.fault == "zero-filled":
            rows[-1] = 0
        elif self.fault == "one row short":
            rows = rows[:-1]
        elif self.fault == "loss on the prompt":
            mask[1] = True
        elif self.fault == "loss counted twice":
            return [view, view]
        elif self.fault == "writes into a call":
            rollout.calls[0].rows[0] = 9  # pyright: ignore[reportOptionalSubscript]
        elif self.fault == "hands out a call's memory":
            rows = rollout.calls[-1].rows
            assert rows is not None
        elif self.fault == "random":
            rows[np.random.default_rng().integers(2**31) % len(rows)] = LIVE
        elif self.fault == "crashes":
            raise IndexError("list index out of range")
        return [ReplayView(rows, mask)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shifted by one", "position 0: a live row or one that a call returned for this position expected"),
        (
            "zero-filled",
            r"position 7: a live row or one that a call returned for this position expected, \[\[0\]\] came",
        ),
        ("one row short", r"rows of shape \(8, 1, 1\) and a bool mask of at most 9 tokens expected, \(7, 1, 1\)"),
        ("loss on the prompt", "token 1: it carries loss in a view without being counted"),
        ("loss counted twice", "token 4: it carries loss in more than one view"),
        ("writes into a call", "the strategy wrote into the rollout"),
        ("hands out a call's memory", "a view shares memory with a recorded call"),
        ("crashes", "IndexError: list index out of range"),
    ],
)
def test_the_contract_catches_a_strategy_that(fault: str, message: str):
    failures = run_case(case("two_calls"), Faulty(fault), None).failures
    assert any(re.search(message, failure) for failure in failures), failures


def test_the_contract_catches_a_strategy_that_is_random():
    failures = [run_case(case("start_offset_ignored"), Faulty("random"), None).failures for _ in range(8)]
    assert any("two merges of one rollout differ" in text for found in failures for text in found)


def test_a_wrong_row_is_reported_with_its_position_and_both_rows():
    failures = run_case(case("two_calls"), strategy("replace"), "slice_concat").failures
    assert failures == ("view 0, position 0: row [[10]] expected, [[20]] came (6 of 8 rows differ)",)


def test_a_view_of_exact_with_another_calls_rows_is_reported():
    failures = run_case(case("two_calls"), strategy("replace"), "exact").failures
    assert failures == ("view 0 (expected view 0), position 0: row [[10]] expected, [[20]] came (6 of 6 rows differ)",)


def test_a_missing_error_is_reported():
    wrong = run_case(case("start_offset_honoured"), strategy("slice_concat"), "replace").failures
    assert "a MergeError expected" in wrong[0]


def test_an_accepted_bad_reply_is_reported():
    accepted = dataclasses.replace(case("payload_uint8"), calls=case("payload_int32_little_endian").calls)
    assert "a refusal at the engine boundary expected" in run_case(accepted, strategy("replace"), "replace").failures[0]


def test_an_expectation_about_the_rollout_can_fail():
    wrong = dataclasses.replace(case("two_calls"), expect_versions=[1, 1, 2, 2, 2])
    assert run_case(wrong, strategy("live"), None).failures == (
        "versions: [1, 1, 2, 2, 2] expected, [1, 1, 1, 2, 2] came",
    )


def test_misplaced_rows_of_a_declared_control_are_warnings():
    result = run_case(case("two_calls"), strategy("naive_concat"), None)
    assert not result.failures
    assert "position 6: a live row" in result.warnings[0]


def test_views_of_exact_may_be_cut_differently_than_expected():
    """Two expected views with one common prefix hold for the one view that exact makes of them."""
    sample = build_sample(case("delta_kept_kv"))
    assert len(merge_twice(Exact(), sample.rollout)[0]) == 1
    assert not run_case(case("delta_kept_kv"), Exact(), "exact").failures


@pytest.mark.parametrize("change", [{"colour": 1}, {"kv": "lost"}, {"calls": [{"new_tokens": 1}]}])
def test_a_file_with_an_unknown_or_missing_key_is_refused(tmp_path: Path, change: dict[str, object]):
    entries = json.loads((CASES_DIR / "merge_cases.json").read_text())
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([{**entries[0], **change}]))
    with pytest.raises(ValueError, match="case single_call"):
        load_cases(path)


def test_list_prints_every_strategy(capsys: pytest.CaptureFixture[str]):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "class", "views", "rows", "loss", "exact", "when"]
    assert len(lines) == 11
    assert not any(line.endswith(" -") for line in lines)


def test_check_by_name_passes(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "exact"]) == 0
    assert "0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["strategies.Gated", "strategies.gated:Gated"])
def test_check_takes_a_class_path_with_arguments(target: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check", target, "max_lag=1", "max_churn=null"]) == 0
    assert "against the contract" in capsys.readouterr().out


def test_check_of_another_rule_fails_with_positions(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "strategies.Replace", "--as", "slice_concat"]) == 1
    assert "FAIL     two_calls: view 0, position 0: row [[10]] expected, [[20]] came" in capsys.readouterr().out


def test_check_takes_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    entries = json.loads((CASES_DIR / "merge_cases.json").read_text())[:3]
    (tmp_path / "few.json").write_text(json.dumps(entries))
    assert main(["check", "replace", "--cases", str(tmp_path / "few.json")]) == 0
    assert "3 cases" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["check", "nonsense"], "one of exact, gated"),
        (["check", "strategies.Nonsense"], "cannot be imported"),
        (["check", "strategies.Gated"], "missing 2 required"),
        (["check", "gated", "max_churn=3"], "max_churn in 0..1 expected, 3 came"),
        (["check", "gated", "max_churn"], "key=value expected"),
        (["check", "strategies.Rollout"], "missing 7 required"),
        (["check", "pathlib.Path"], "a merge strategy has"),
        (["check", "replace", "--as", "nonsense"], "no case has expectations"),
        (["check", "replace", "--cases", "no_such_file.json"], "no_such_file.json"),
    ],
)
def test_bad_usage_exits_2_with_a_reason(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_the_command_starts_without_heavy_imports():
    code = (
        "import sys, strategies.__main__ as m; m.main(['list']); "
        "heavy = {'torch', 'transformers', 'megatron', 'hydra', 'experiments', 'analysis'} & set(sys.modules); "
        "sys.exit(len(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_rows_of_the_boundary_have_the_narrowest_type():
    assert row_dtype(build_sample(case("two_calls")).rollout) == np.int8
    assert row_dtype(build_sample(case("dtypes_differ")).rollout) == np.int16
