"""The page of `dynamo replay` in Chromium, at the width of a desktop and of a phone."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.console.browser import DESKTOP, PHONE, Browser, requires_chromium

from dynamo.replay.main import main

pytestmark = [pytest.mark.integration, requires_chromium]

LOAD = ["--input-tokens=2000", "--output-tokens=60", "--request-count=300", "--request-rate=30"]
SLA = ["--sla-ttft-ms=400", "--sla-itl-ms=25", "--sla-e2e-ms=60000"]
PAGES = {
    "one": [*LOAD, *SLA, "--num-workers=3", "--router-mode=balanced", "--fail=1@3+2", "--scale-at=2=5"],
    "compared": [*LOAD, *SLA, "--num-workers=4", "--router-mode=kv", "--compare=balanced", "--fail=1@3+2"],
    "disaggregated": [*LOAD, "--num-prefill-workers=2", "--num-decode-workers=2"],
}
OVERLAPS = """
return [...document.querySelectorAll("svg")].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll("text")].map((one) => [one.textContent, one.getBoundingClientRect()]);
  return boxes.flatMap(([text, a], at) => boxes.slice(at + 1)
    .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
    .map(([other]) => `${svg.getAttribute("aria-label")}: ${text} and ${other}`));
});
"""
OUTSIDE = """
return [...document.querySelectorAll("svg text")].filter((one) => {
  const [a, b] = [one.getBoundingClientRect(), one.ownerSVGElement.getBoundingClientRect()];
  return a.left < b.left - 2 || a.right > b.right + 2 || a.bottom > b.bottom + 2;
}).map((one) => `${one.ownerSVGElement.getAttribute("aria-label")}: ${one.textContent}`);
"""
HIDDEN = """
return [...document.querySelectorAll(".latencies")].some((one) => one.scrollWidth > one.parentElement.clientWidth + 1);
"""
CONTRAST = """
const light = (color) => { const [r, g, b] = color.match(/[\\d.]+/g).map(Number); return 0.3 * r + 0.59 * g + 0.11 * b; };
const back = getComputedStyle(document.documentElement).colorScheme.includes("dark")
  && matchMedia("(prefers-color-scheme: dark)").matches ? 18 : 255;
return Math.abs(light(getComputedStyle(document.body).color) - back);
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the addresses of the pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    for name, flags in PAGES.items():
        assert main([*flags, f"--report-html={folder / name}.html"]) == 0
    return {name: (folder / f"{name}.html").as_uri() for name in PAGES}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile"), "") as found:
        yield found


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_page_fits_the_width_and_its_texts_do_not_overlap(
    browser: Browser, pages: dict[str, str], name: str, size: tuple[int, int]
) -> None:
    browser.open(pages[name], size=size)
    script: Any = browser.driver.execute_script
    assert script("return document.documentElement.scrollWidth") <= size[0]
    assert script(OVERLAPS) == []
    assert script(OUTSIDE) == []
    assert not script(HIDDEN), "percentiles and objectives need no scrolling"
    assert browser.errors() == []
    assert not [one for one in browser.requested() if one.startswith("http")], "the page is one file"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_is_readable_in_both_themes(browser: Browser, pages: dict[str, str], theme: str) -> None:
    browser.open(pages["one"], theme=theme)
    assert browser.driver.execute_script(CONTRAST) > 120


def test_page_answers_the_questions_of_a_capacity_planner(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["one"])
    text = browser.text("body")
    for wanted in (
        "synthetic, 2000 prompt tokens, 60 output tokens: 300 requests", "3 workers", "TTFT 400 ms, ITL 25 ms, latency 60000 ms",
        "--fail 1@3+2", "--scale-at 2=5", "SLA attainment", "worker-seconds", "worker 1 fails", "aggregated: 3 to 5 workers",
    ):  # fmt: skip
        assert wanted in text
    latencies = browser.text(".latencies").split()
    assert latencies[:7] == ["ms", "p50", "p90", "p99", "mean", "SLA", "met"]
    figures = [one.get_attribute("aria-label") for one in browser.all("svg")]
    assert [one for one in figures if one and "queue" in one] == [
        "Waiting requests in the workers' queues",
        "Waiting requests in the router's queue",
    ]
    assert [one for one in figures if one and "by worker" in one] == ["Requests by worker", "KV blocks by worker"]
    marked = browser.all("svg[aria-label^='Imbalance'] .mark")
    titles = browser.driver.execute_script("return arguments[0].map((one) => one.textContent)", marked)
    assert titles == ["aggregated: 3 to 5 workers", "worker 1 fails"]
    objectives = browser.driver.execute_script(
        "return [...document.querySelectorAll(\"svg[aria-label$='share of requests'] .mark\")].map((one) => one.textContent)"
    )
    assert objectives == ["objective: 400 ms", "objective: 25 ms", "objective: 60000 ms"]
