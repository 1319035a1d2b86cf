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

from browser import chromium, look, no_browser
from synthetic_job import grade_job, write_job

from batchgen.output.read_job import JobFolderReader
from batchgen.viewer.job_view import JobView
from batchgen.viewer.pages import Site
from batchgen.viewer.server import ViewServer

_PAGES = {
    "overview": "",
    "rows": "rows",
    "disagree": "rows?disagree=yes",
    "row": "row?n=1",
    "tokens": "row?n=1&tokens=yes",
    "nothing": "rows?text=no+such+text",
    "missing": "row?n=1000000",
}
_OF_TWO = {"flips": "flips", "flip": "flip?i=0"}
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
        jobs = given.jobs or write_jobs(Path(folder))
        pictures = given.pictures or Path(folder, "pictures")
        pictures.mkdir(parents=True, exist_ok=True)
        faults: list[str] = []
        for some in (jobs[:1], jobs) if len(jobs) > 1 else (jobs,):
            pages = _PAGES if len(some) == 1 else {**_PAGES, **_OF_TWO}
            with _served(some) as url:
                for name, target in pages.items():
                    picture = pictures / f"{name}-{len(some)}"
                    found = look(browser, url + target, picture, _use, within=url)
                    # A browser tells its console of every page that is not there.
                    found = [f for f in found if name != "missing" or "status of 404" not in f]
                    faults += [f"{name} of {len(some)}: {fault}" for fault in found]
                faults += _keys(browser.new_page(), url)
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


def _use(page: Any) -> list[str]:
    """Open what is folded; what is wrong then."""
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    broken = page.evaluate("window.broken_out !== undefined")
    return ["a text became a script"] * broken


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
