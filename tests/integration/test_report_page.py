"""The page of a report in a real browser (Debian's chromium): wide and narrow, light and dark, and on paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from analysis.__main__ import main

pytestmark = pytest.mark.slow

# Relative luminance and contrast of WCAG 2.2, over every element that has text of its own.
POOR_CONTRAST = """() => {
  const parts = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = e => { for (; e; e = e.parentElement) {
      const c = parts(getComputedStyle(e).backgroundColor);
      if (c.length && c[3] !== 0) return c; }
    return [255, 255, 255]; };
  return [...document.querySelectorAll('body *:not(svg *)')]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
    .map(e => { const a = light(parts(getComputedStyle(e).color)), b = light(paper(e));
      return [e.tagName, e.textContent.trim().slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; })
    .filter(([, , ratio]) => ratio < 4.5);
}"""


@pytest.fixture(scope="module")
def address(study_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report, as the address of a file."""
    out = tmp_path_factory.mktemp("page")
    assert main(["report", str(study_folder), "--out", str(out)]) == 0
    return (out / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "no chromium in PATH: the page must be seen in a browser; apt-get install -y chromium"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")], ids=str)
def seen(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[tuple[Page, list[str], list[str]]]:
    """The page as it is shown, what it asked for, and what it complained about."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, asked, complaints = context.new_page(), [], []
    page.on("request", lambda each: asked.append(each.url))
    page.on("console", lambda each: complaints.append(each.text))
    page.on("pageerror", lambda each: complaints.append(str(each)))
    page.goto(address)
    yield page, asked, complaints
    context.close()


def test_the_page_fits_asks_for_nothing_and_complains_about_nothing(
    seen: tuple[Page, list[str], list[str]], address: str
) -> None:
    page, asked, complaints = seen
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert asked == [address]
    assert complaints == []


def test_text_stands_out_and_figures_are_drawn(seen: tuple[Page, list[str], list[str]]) -> None:
    page, _, _ = seen
    assert page.evaluate(POOR_CONTRAST) == []
    boxes = page.evaluate("[...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect().toJSON())")
    assert len(boxes) >= 12
    assert all(box["width"] > 250 and box["height"] > 120 for box in boxes)


def test_figures_follow_the_scheme(seen: tuple[Page, list[str], list[str]]) -> None:
    page, _, _ = seen
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    paper = page.evaluate("getComputedStyle(document.querySelector('figure svg path')).fill")
    assert (paper == "rgb(255, 255, 255)") is not dark


def test_the_page_prints(browser: Browser, address: str, tmp_path: Path) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(address)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.querySelector('details table').getBoundingClientRect().height") > 0
    assert page.pdf(path=tmp_path / "page.pdf", format="A4").startswith(b"%PDF")
    page.close()
