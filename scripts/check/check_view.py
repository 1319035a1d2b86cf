"""Look at the pages of `batchgen view` in a real browser, and save pictures of them.

    python scripts/check/check_view.py [OUT [OUT2]] [--pictures FOLDER]

Without folders of jobs, two small ones are written whose answers try to break out of the page.
Every page is opened in headless Chromium at the size of a phone and of a desk, light and dark. The
exit code is 1 if the browser's console has an error, a page asks for anything outside the server, a
page is wider than the window, or a text that tries to be a script becomes one. Without Chromium and
playwright (`pip install playwright`; its own browsers are not needed) nothing is checked.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from synthetic_job import grade_job, write_job

from batchgen.output.read_job import JobFolderReader
from batchgen.viewer.job_view import JobView
from batchgen.viewer.pages import Site
from batchgen.viewer.server import ViewServer

SIZES = {"phone": (375, 800), "desk": (1400, 900)}
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_PAGES = {
    "overview": "",
    "rows": "rows",
    "disagree": "rows?disagree=yes",
    "row": "row?n=1",
    "tokens": "row?n=1&tokens=yes",
    "nothing": "rows?text=no+such+text",
    "missing": "row?n=1000000",
}
_TEXTS = (
    "<script>window.broken_out = 1</script> so it is",
    '"><img src=x onerror="window.broken_out = 1"> and',
    "</pre></title></style><svg onload=window.broken_out=1> ]]> --> then",
    "\u202eesrever si siht\u202c\x00\x1b[31m and \N{ZERO WIDTH SPACE}then",
    "' onmouseover='window.broken_out=1 {{ 7 * 7 }} {% raw %} &lt;b&gt;",
    "Thirty-one long words of an answer. " * 40,
    "javascript:window.broken_out=1",
)
"""What answers say that try to break out of the page."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", type=Path)
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        browser = None
    if browser is None:
        print("nothing was checked: this needs Chromium and playwright")
        return 0
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        jobs = given.jobs or write_jobs(Path(folder))
        pictures = given.pictures or Path(folder, "pictures")
        pictures.mkdir(parents=True, exist_ok=True)
        chromium = playwright.chromium.launch(executable_path=browser, args=list(_FLAGS))
        faults: list[str] = []
        for some in (jobs[:1], jobs) if len(jobs) > 1 else (jobs,):
            with _served(some) as url:
                faults += _look(chromium, url, len(some), pictures)
        chromium.close()
    print(*faults, f"{len(faults)} faults", sep="\n")
    return bool(faults)


def write_jobs(folder: Path) -> list[Path]:
    """Two small jobs with the same questions."""
    jobs = [folder / "first", folder / "second"]
    for seed, job in enumerate(jobs):
        write_job(job, 120, 4, rows_per_shard=50, texts=_TEXTS, seed=seed)
        grade_job(job, scored=True)
    return jobs


@contextmanager
def _served(jobs: list[Path]) -> Iterator[str]:
    site = Site([JobView(JobFolderReader(job), job.name) for job in jobs])
    with ViewServer(site.respond) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


def _look(chromium: Any, url: str, jobs: int, pictures: Path) -> list[str]:
    """Open all pages in all ways, save pictures, and return what is wrong."""
    faults: list[str] = []
    pages = _PAGES if jobs == 1 else {**_PAGES, "flips": "flips", "flip": "flip?i=0"}
    for size, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            view = {"width": width, "height": height}
            context = chromium.new_context(viewport=view, color_scheme=scheme)
            for name, target in pages.items():
                page = context.new_page()
                told = _listening(page, url)
                status = page.goto(url + target, wait_until="networkidle").status
                # A browser tells its console of every page that is not there.
                told = [text for text in told if status == 200 or "status of 404" not in text]
                if page.evaluate("document.documentElement.scrollWidth") > width:
                    told.append("wider than the window")
                if page.evaluate("window.broken_out !== undefined"):
                    told.append("a text became a script")
                faults += [f"{name} {size} {scheme}: {text}" for text in told]
                page.screenshot(path=str(pictures / f"{name}-{jobs}-{size}-{scheme}.png"))
                page.close()
            if size == "desk":
                faults += _keys(context.new_page(), url)
            context.close()
    return faults


def _listening(page: Any, url: str) -> list[str]:
    """A list that gets what the browser complains of, and what is asked for outside the server."""
    told: list[str] = []

    def requested(request: Any) -> None:
        if not request.url.startswith(url):
            told.append(f"asks for {request.url}")

    page.on("console", lambda message: told.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on("request", requested)
    return told


def _keys(page: Any, url: str) -> list[str]:
    """Whether j, k and / do what the pages say."""
    page.goto(url + "row?n=1")
    page.keyboard.press("j")
    page.wait_for_url("**/row?n=2*")
    page.keyboard.press("k")
    page.wait_for_url("**/row?n=1*")
    page.keyboard.press("/")
    focus = page.evaluate("document.activeElement.id")
    return [] if focus == "find-id" else [f"/ goes to {focus!r}"]


if __name__ == "__main__":
    sys.exit(main())
