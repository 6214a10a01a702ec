"""The report in a real browser: its plots are drawn, its one control works, nothing is fetched, no script fails."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2flow.apps.report import write_report
from m2flow.apps.testing import example_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = [pytest.mark.large, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = example_run(tmp_path_factory.mktemp("report") / "run")
    write_report(run)
    return run.report


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "playwright.Browser", page_file: Path) -> Iterator["playwright.Page"]:
    page, problems = browser.new_page(viewport={"width": 1000, "height": 1400}), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: problems.append(request.url) if request.url != page_file.as_uri() else None)
    page.goto(page_file.as_uri())
    yield page
    page.close()
    assert problems == []


@pytest.mark.parametrize("part", ["reward-curve", "evaluation", "stage-times", "prediction", "timeline"])
def test_a_plot_is_drawn(page: "playwright.Page", part: str) -> None:
    plot = page.locator(f"#{part} svg:visible").first
    box = plot.bounding_box()
    assert box is not None
    assert box["width"] > 500
    assert box["height"] > 60
    mark = page.locator(f"#{part} svg:visible :is(polyline, rect)").first.bounding_box()
    assert mark is not None
    assert mark["height"] > 5
    assert box["x"] <= mark["x"] <= box["x"] + box["width"]


def test_the_reward_curve_rises_on_the_screen(page: "playwright.Page") -> None:
    circles = page.locator("#reward-curve circle")
    first, last = circles.first.bounding_box(), circles.last.bounding_box()
    assert circles.count() == 12
    assert last["y"] < first["y"] - 50
    assert last["x"] > first["x"] + 400


def test_another_iteration_is_shown_on_demand(page: "playwright.Page") -> None:
    assert page.locator("#timeline .iteration:visible").get_attribute("data-iteration") == "12"
    page.select_option("#iteration", "2")
    assert page.locator("#timeline .iteration:visible").count() == 1
    assert page.locator("#timeline .iteration:visible").get_attribute("data-iteration") == "2"


def test_causes_and_samples_are_tables(page: "playwright.Page") -> None:
    assert page.locator("#idle-causes tr").count() == 3
    assert page.locator("#samples table").count() == 3
    assert "12+1=" in page.locator("#samples").inner_text()
