"""The pages in a real browser: contrast, width, keys, and that every control is reached by Tab."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from batchgen.pages.report.write_report import make_report
from batchgen.pages.viewer.folder_site import FolderSite
from batchgen.pages.viewer.job_view import JobView
from batchgen.pages.viewer.pages import Site
from batchgen.storage.folder.read_job import JobFolderReader
from tests.support.jobs.browser import SCHEMES, SIZES, chromium, look, no_browser, not_reached
from tests.support.jobs.finished_job import finished_job, row
from tests.support.jobs.page_faults import (
    keys,
    looked_at,
    run_hostile_job,
    served,
    use_report,
    write_jobs,
)

pytestmark = [
    pytest.mark.skipif(no_browser() is not None, reason=str(no_browser())),
    pytest.mark.thorough,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where the pages of one job, of two, and of the folder of all are served."""
    folder = tmp_path_factory.mktemp("browser") / "jobs"
    jobs = write_jobs(folder, rows=16)
    finished_job(folder / "small", [row(i, text="*a* $b$"[: 2 + i]) for i in range(6)], graded=True)
    make_report(folder / "small")
    first, second, small = (
        JobView(JobFolderReader(job), job.name) for job in (*jobs, folder / "small")
    )
    sites: dict[str, Site | FolderSite] = {
        "one": Site([first]),
        "two": Site([first, second]),
        "small": Site([small]),
        "folder": FolderSite(folder, "jobs"),
    }
    with ExitStack() as stack:
        yield {name: stack.enter_context(served(site.respond)) for name, site in sites.items()}


PAGES = {
    "overview": ("one", ""),
    "list": ("one", "rows?mark=wrong"),
    "row": ("one", "row?n=1&tokens=yes"),
    "votes": ("one", "rows?mark=wrong&show=votes&sort=disagreeing"),
    "report": ("small", "report?job=0"),
    "compare": ("two", "row?n=1"),
    "flips": ("two", ""),
    "jobs": ("folder", ""),
    "leaderboard": ("folder", "leaderboard"),
    "sorted jobs": ("folder", "?sort=score&text=s"),
}


@pytest.mark.parametrize("name", PAGES)
def test_text_has_contrast_and_pages_fit_in_all_sizes_and_schemes(
    browser: Any, urls: dict[str, str], name: str
) -> None:
    site, target = PAGES[name]
    assert looked_at(browser, urls[site], target) == []


@pytest.mark.parametrize("name", PAGES)
def test_tab_reaches_every_control_and_shows_where_it_is(
    browser: Any, urls: dict[str, str], name: str
) -> None:
    site, target = PAGES[name]
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(urls[site] + target)
    assert not_reached(page) == []
    page.close()


def test_keys(browser: Any, urls: dict[str, str]) -> None:
    page = browser.new_page()
    assert keys(page, urls["one"]) == []
    page.close()


@pytest.mark.slow
def test_a_report_of_rows_that_try_to_break_out(browser: Any, tmp_path: Path) -> None:
    report = make_report(run_hostile_job(tmp_path))
    assert look(browser, report.as_uri(), then=use_report) == []


def test_pages_work_without_scripts(browser: Any, urls: dict[str, str]) -> None:
    """Filters, switches of texts and of colours, and the facts of a token by tap."""
    context = browser.new_context(java_script_enabled=False, has_touch=True)
    page = context.new_page()
    page.goto(urls["one"] + "rows")
    page.select_option("select[name=mark]", "wrong")
    page.click("button:text('Show')")
    assert "mark=wrong" in page.url and page.locator(".chip.wrong").count()
    page.goto(urls["one"] + "row?n=1&tokens=yes")
    token = page.locator(".toks .t").nth(3)
    before = token.screenshot()
    page.locator("label", has_text="none").click()
    assert token.screenshot() != before
    token.tap()
    assert page.locator(".toks .t:focus").count() == 1
    context.close()


def test_a_page_with_faults_has_them_found(browser: Any) -> None:
    """The checks themselves: each fault is told."""
    page = """data:text/html,<body style="background:white">
      <p style="color:%23999">faint</p><div style="width:2000px">wide</div>
      <button tabindex="-1">never</button><a href="x" style="outline:none">unseen</a>"""
    found = look(browser, page)
    assert sum("contrast 2.8" in fault for fault in found) == len(SIZES) * len(SCHEMES)
    assert sum("pixels wide" in fault for fault in found) == len(SIZES) * len(SCHEMES)
    opened = browser.new_page()
    opened.goto(page)
    assert [text.partition(" <")[0] for text in not_reached(opened)] == [
        "the focus is not seen on", "Tab does not reach",
    ]  # fmt: skip
    opened.close()
