"""Look at the pages of `batchgen view` in a real browser, and save pictures of them.

    python scripts/check/check_view.py [OUT [OUT2]] [--pictures FOLDER]

Without folders of jobs, two small ones are written whose answers try to break out of the page.
Every page is opened in headless Chromium at the size of a phone and of a desk, light and dark. The
exit code is 1 if the browser's console has an error, a page asks for anything outside the server,
is wider than the window or has text of too little contrast, a text becomes a script, or a key does
not do what the pages say. Without Chromium and playwright (`pip install playwright`; its own
browsers are not needed) nothing is checked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from browser import chromium, look, no_browser
from synthetic_job import grade_job, write_job

from batchgen.folder.read_job import JobFolderReader
from batchgen.viewer.folder_site import FolderSite
from batchgen.viewer.job_view import JobView
from batchgen.viewer.pages import Site
from batchgen.viewer.server import Respond, ViewServer

PAGES = {
    "overview": "",
    "rows": "rows",
    "votes": "rows?show=votes&mark=wrong&sort=disagreeing",
    "row": "row?n=1",
    "tokens": "row?n=1&tokens=yes",
    "nothing": "rows?text=no+such+text",
    "missing": "row?n=1000000",
}
PAGES_OF_TWO = {"flips": "flips", "flip": "flip?i=0"}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", type=Path)
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    if (why := no_browser()) is not None:
        print(f"nothing was checked: {why}")
        return 0
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        jobs = given.jobs or write_jobs(Path(folder, "jobs"))
        pictures = given.pictures or Path(folder, "pictures")
        pictures.mkdir(parents=True, exist_ok=True)
        faults: list[str] = []
        for some in (jobs[:1], jobs) if len(jobs) > 1 else (jobs,):
            pages = PAGES if len(some) == 1 else {**PAGES, **PAGES_OF_TWO}
            site = Site([JobView(JobFolderReader(job), job.name) for job in some])
            with served(site.respond) as url:
                for name, target in pages.items():
                    picture = pictures / f"{name}-{len(some)}"
                    found = looked_at(browser, url, target, picture)
                    faults += [f"{name} of {len(some)}: {fault}" for fault in found]
                faults += keys(browser.new_page(), url)
        if not given.jobs:
            with served(FolderSite(Path(folder, "jobs"), "jobs").respond) as url:
                found = looked_at(browser, url, "", pictures / "jobs")
                faults += [f"jobs: {fault}" for fault in found]
    print(*faults, f"{len(faults)} faults", sep="\n")
    return bool(faults)


def write_jobs(folder: Path, rows: int = 120) -> list[Path]:
    """Two small jobs with the same questions."""
    jobs = [folder / "first", folder / "second"]
    for seed, job in enumerate(jobs):
        write_job(job, rows, 4, rows_per_shard=50, texts=_TEXTS, seed=seed)
        grade_job(job, scored=True)
    return jobs


@contextmanager
def served(respond: Respond) -> Iterator[str]:
    """A server with these pages, and its address."""
    with ViewServer(respond) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


def looked_at(browser: Any, url: str, target: str, picture: Path | None = None) -> list[str]:
    """What is wrong with a page, in all sizes and schemes, folded and unfolded."""
    found = look(browser, url + target, picture, _use, within=url)
    # A browser tells its console of every page that is not there.
    return [fault for fault in found if "status of 404" not in fault]


def _use(page: Any) -> list[str]:
    """Open what is folded; what is wrong then."""
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    broken = page.evaluate("window.broken_out !== undefined")
    return ["a text became a script"] * broken


def keys(page: Any, url: str) -> list[str]:
    """What is wrong with the keys of lists, rows and tokens."""
    found: list[str] = []

    def expect(what: str, script: str, wanted: object) -> None:
        if (is_now := page.evaluate(script)) != wanted:
            found.append(f"{what}: {is_now!r} in place of {wanted!r}")

    page.goto(url + "row?n=1")
    page.keyboard.press("j")
    page.wait_for_url("**/row?n=2*")
    page.keyboard.press("k")
    page.wait_for_url("**/row?n=1*")
    page.keyboard.press("/")
    expect("/", "document.activeElement.id", "find-id")
    page.goto(url + "rows")
    focus = "[...document.querySelectorAll('a.id')].indexOf(document.activeElement)"
    for key, place in (("j", 0), ("j", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        expect(f"{key} in a list", focus, place)
    for is_open in (True, False):
        page.keyboard.press("?")
        expect("?", "document.getElementById('keys').matches(':popover-open')", is_open)
    page.keyboard.press("Enter")
    page.wait_for_url("**/row?n=1*")
    page.set_viewport_size({"width": 320, "height": 800})  # tokens take several lines
    page.goto(url + "row?n=1&tokens=yes")
    token = "[...document.querySelectorAll('.toks .t')].indexOf(document.activeElement)"
    page.locator(".toks .t").first.click()
    expect("a click on a token", token, 0)
    for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("Home", 0)):
        page.keyboard.press(key)
        expect(key, token, place)
    page.keyboard.press("ArrowDown")
    if page.evaluate(token) < 2:
        found.append("ArrowDown stays in its line")
    page.keyboard.press("ArrowUp")
    expect("ArrowUp", token, 0)
    fact = "getComputedStyle(document.activeElement, '::after').content"
    if "id " not in page.evaluate(fact):
        found.append("a token with the focus does not show its facts")
    page.set_viewport_size({"width": 320, "height": 400})
    page.keyboard.press("End")
    behind = "innerHeight - document.activeElement.getBoundingClientRect().bottom"
    if page.evaluate(behind) < 100:
        found.append("the facts of a token lie over it")
    return found


if __name__ == "__main__":
    sys.exit(main())
