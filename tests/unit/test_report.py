"""`python -m analysis report` on the recorded study: what it writes, what it says of poor sources, what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import yaml

from analysis.__main__ import main
from analysis.plan import Comparison, Plan
from analysis.report import charts
from analysis.report.content import report
from analysis.report.evidence import Evidence
from analysis.runs import load_runs
from analysis.study import SECONDARY

PLAN = {
    "arms": ["replace", "slice_concat", "naive_concat", "exact"],
    "seeds": [0, 1, 2],
    "primary": [{"metric": "gap/abs", "reduce": "mean", "pairs": [["slice_concat", "replace"]]}],
}
HOSTILE = "</pre><script>alert(1)</script> & _x_ | <!-- end -->"


class Page(HTMLParser):
    """Collects what a test asks of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def source(study_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded study with a hostile command, a run that differs in its learning rate, and one that failed."""
    folder = tmp_path_factory.mktemp("source") / "study"
    shutil.copytree(study_folder, folder)
    edit_summary(folder / "exact" / "seed0", command=HOSTILE)
    edit_summary(folder / "exact" / "seed2", status="failed", error="out of memory")
    config = folder / "naive_concat" / "seed1" / ".hydra" / "config.yaml"
    tree = yaml.safe_load(config.read_text())
    tree["trainer"]["learning_rate"] = 0.5
    config.write_text(yaml.safe_dump(tree))
    return folder


@pytest.fixture(scope="module")
def out(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on `source`."""
    folder = tmp_path_factory.mktemp("report")
    plan = folder / "plan.yaml"
    plan.write_text(yaml.safe_dump(PLAN))
    assert main(["report", str(source), "--plan", str(plan), "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def page(out: Path) -> Page:
    return Page((out / "report.html").read_text(encoding="utf-8"))


def edit_summary(run: Path, **values: object) -> None:
    path = run / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_every_figure_has_svg_png_and_its_numbers(out: Path) -> None:
    written = {path.stem for path in (out / "figures").glob("*.svg")}
    assert written >= {"ppo_kl", "ppo_kl_seeds", "gap", "paired", "ratio_percentiles", "ess", "F2", "merge_segment",
                       "merge_lag", "churn_layer", "reward", "staleness"}  # fmt: skip
    assert {path.stem for path in (out / "figures").glob("*.png")} == written
    assert {path.stem for path in (out / "data").glob("*.csv")} == written
    numbers = pd.read_csv(out / "data" / "ppo_kl.csv")
    assert set(numbers["strategy"]) == set(PLAN["arms"])
    assert numbers.loc[numbers["strategy"] == "replace", "step"].tolist() == list(range(1, 11))


def test_the_page_needs_nothing_but_itself(out: Path, page: Page) -> None:
    loading = [(tag, name, value) for tag, attrs in page.tags for name, value in attrs.items()
               if name in ("src", "srcset", "action", "data", "xlink:href", "href") and tag != "a"]  # fmt: skip
    assert [entry for entry in loading if not str(entry[2]).startswith(("#", "data:,"))] == []
    assert {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed", "base"} == set()
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    local = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert [link for link in local if link and not link.startswith("#") and not (out / link).is_file()] == []


def test_no_line_ends_inside_a_number(out: Path) -> None:
    text = (out / "report.html").read_text(encoding="utf-8")
    verdict = re.search(r'<p class="verdict">(.*?)</p>', text, re.DOTALL)
    assert verdict is not None
    assert re.search(r'<span class="unbroken">-?[\d.]+e-\d+</span>', verdict[1])
    assert "e-" not in re.sub(r"<span.*?</span>", "", verdict[1])


def test_ids_are_unique_and_references_hold(page: Page, out: Path) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    text = (out / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


def test_the_page_speaks_to_who_does_not_see_it(page: Page) -> None:
    assert dict(page.tags)["html"] == {"lang": "en"}
    figures = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(figures) == sum(tag == "figure" for tag, _ in page.tags) >= 12
    assert all(attrs["role"] == "img" and "replace" in str(attrs["aria-label"]) for attrs in figures)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_verdict_comes_first_and_claims_nothing_from_three_seeds(page: Page, out: Path) -> None:
    classes = [attrs.get("class") for _, attrs in page.tags]
    assert classes.index("verdict") < classes.index("warnings")
    assert "cannot be tested" in page.text
    assert "3 paired seeds" in page.text
    summary = (out / "summary.md").read_text(encoding="utf-8")
    assert summary.index("cannot be tested") < summary.index("## What was compared")


def test_an_arm_that_differs_in_more_than_its_strategy_is_flagged_before_any_result(page: Page) -> None:
    warning = page.text[: page.text.index("What was compared", page.text.index("Read this first"))]
    assert "trainer.learning_rate" in warning
    assert "What the arms differ in beside their strategy" in page.text
    assert "sglang None" not in page.text


def test_a_compared_metric_without_a_value_says_why(study_folder: Path) -> None:
    runs = load_runs(study_folder, strategies=["replace", "exact"])
    whole = runs.runs.assign(status="failed")
    left_out = dict(report(Evidence.of(dataclasses.replace(runs, runs=whole), None), "").left_out)
    reasons = {left_out[title] for title in left_out if "compared metric" in title}
    assert reasons == {"no whole run has mean gap/abs_by_versions/multi"}
    for key, _ in SECONDARY:
        if key in runs.history:
            del runs.history[key]
    left_out = dict(report(Evidence.of(runs, None), "").left_out)
    reasons = {left_out[title] for title in left_out if "compared metric" in title}
    assert reasons == {"no run logged a metric that a study compares"}


def test_seeds_of_two_experiments_are_flagged_though_every_pair_is_alike(study_folder: Path) -> None:
    runs = load_runs(study_folder, strategies=["replace", "exact"])
    for arm in ("replace", "exact"):
        runs.configs[f"{arm}-s1"]["trainer.learning_rate"] = 0.5
    warnings = report(Evidence.of(runs, None), "").warnings
    assert "The runs are of more than one experiment: between seeds they differ in trainer.learning_rate." in warnings


def test_a_criterion_of_collapse_that_no_run_logged_is_named(study_folder: Path) -> None:
    runs = load_runs(study_folder, strategies=["replace", "exact"])
    del runs.history["reward/mean"]
    assert "Collapse is not judged by reward/mean: no run logged it." in report(Evidence.of(runs, None), "").warnings


@pytest.mark.parametrize("damage", [{"status": 3}, {"strategy": None}, {"host": 3}, {"metrics": 4}], ids=str)
def test_a_run_with_a_damaged_summary_is_left_out(study_folder: Path, tmp_path: Path, damage: dict) -> None:
    for seed in ("seed0", "seed1"):
        shutil.copytree(study_folder / "replace" / seed, tmp_path / seed)
    edit_summary(tmp_path / "seed1", **damage)
    runs = load_runs(tmp_path)
    assert list(runs.runs["seed"]) == [0]
    assert "summary.json is none of this project" in runs.excluded["reason"].item()


def test_a_plan_of_other_runs_is_refused(study_folder: Path) -> None:
    plan = Plan(("replace", "exact"), (7, 8), (Comparison("gap/abs", "mean", "exact", "replace"),))
    with pytest.raises(ValueError, match="of the plan: expected arms replace, exact, seeds 7, 8, came arms "):
        Evidence.of(load_runs(study_folder), plan)


def test_a_file_in_the_place_of_the_folder_is_refused(
    study_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("mine")
    assert main(["report", str(study_folder), "--out", str(tmp_path / "out")]) == 2
    assert "expected a folder to write to, found a file" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_a_failed_run_is_named_and_enters_no_scalar(page: Page, out: Path) -> None:
    assert "2 incomplete" in page.text
    paired = pd.read_csv(out / "data" / "paired.csv")
    assert paired.loc[paired["strategy"] == "exact", "seed"].tolist() == [0, 1]


def test_what_comes_from_a_run_is_text(page: Page, out: Path) -> None:
    assert HOSTILE in page.text
    assert "script" not in {tag for tag, _ in page.tags}
    summary = (out / "summary.md").read_text(encoding="utf-8")
    places = re.findall(r"<!-- (table: \S+|end) -->", summary)
    assert places[1::2] == ["end"] * (len(places) // 2)


@pytest.mark.slow
def test_equal_runs_give_equal_bytes(source: Path, out: Path, tmp_path: Path) -> None:
    plan = out.parent / "plan.yaml"
    assert main(["report", str(source), "--plan", str(plan), "--out", str(tmp_path)]) == 0
    for path in sorted(out.rglob("*.*")):
        first, second = path.read_bytes(), (tmp_path / path.relative_to(out)).read_bytes()
        assert first.replace(str(out).encode(), b"OUT") == second.replace(str(tmp_path).encode(), b"OUT"), path.name


def test_the_marked_places_of_a_document_are_filled(study_folder: Path, tmp_path: Path) -> None:
    document = tmp_path / "docs" / "study.md"
    document.parent.mkdir()
    document.write_text(
        "# Mine\n\n<!-- table: verdict -->\n<!-- end -->\n\n<!-- table: figure-reward -->\n<!-- end -->\n"
    )
    out = tmp_path / "docs" / "figures_of_study"
    assert main(["report", str(study_folder / "replace"), "--out", str(out), "--write", str(document)]) == 0
    text = document.read_text()
    assert "No claim" in text
    assert "](figures_of_study/figures/reward.svg)" in text


def test_one_seed_has_curves_without_band_and_no_claim(study_folder: Path, tmp_path: Path) -> None:
    for arm in ("replace", "exact"):
        shutil.copytree(study_folder / arm / "seed0", tmp_path / "runs" / arm)
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "figures" / "survival.svg").write_text("of an earlier study")
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert "One run has no band and bears no claim." in page.text
    assert "Runs without collapse: no run collapsed" in page.text
    assert not (tmp_path / "out" / "figures" / "survival.svg").exists()
    assert pd.read_csv(tmp_path / "out" / "data" / "reward.csv")["low"].isna().all()
    assert pd.read_csv(tmp_path / "out" / "data" / "paired.csv")["strategy"].tolist() == ["exact", "replace"]
    assert "No plan declared this metric: it is shown by default." in page.text


def test_a_metric_that_no_run_logged_is_a_figure_left_out_with_the_reason(
    study_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "replace"
    shutil.copytree(study_folder / "replace" / "seed0", run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key != charts.ESS} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    (run / "merge_errors.jsonl").unlink()
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 0
    assert f"Effective sample size: no run logged {charts.ESS}" in capsys.readouterr().out
    assert not (tmp_path / "out" / "figures" / "ess.svg").exists()
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert f"no run logged {charts.ESS}" in page.text
    assert "no merge errors by segment" in page.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere"),
        (["STUDY", "--strategy", "unheard_of"], "unheard_of"),
        (["STUDY", "--plan", "no_plan.yaml"], "no_plan.yaml"),
        (["STUDY", "--write", "no_document.md"], "no_document.md"),
    ],
)
def test_what_cannot_be_used_ends_with_2_before_anything_is_written(
    arguments: list[str], said: str, study_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(study_folder) if word == "STUDY" else word for word in arguments]
    assert main(["report", *words, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_plan_of_other_arms_is_refused(
    study_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    primary = [{"metric": "gap/abs", "reduce": "mean", "pairs": [["live", "gated"]]}]
    plan.write_text(yaml.safe_dump({**PLAN, "arms": ["live", "gated"], "primary": primary}))
    assert main(["report", str(study_folder), "--plan", str(plan), "--out", str(tmp_path / "out")]) == 2
    assert "expected arms live, gated" in capsys.readouterr().err
