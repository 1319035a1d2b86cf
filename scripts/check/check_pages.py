"""Look at the pages of `batchgen view` and at reports in a real browser, and save pictures of them.

    python scripts/check/check_pages.py OUT [OUT2] [--pictures FOLDER]

Every page is opened in headless Chromium at the size of a phone and of a desk, light and dark, as
tests/batchgen/viewer/test_browser.py does with small jobs. The exit code is 1 if the browser's
console has an error, a page asks for anything outside the server, is wider than the window or has
text of too little contrast, a text becomes a script, or a key or a switch does not do what the page
says. Needs Chromium and playwright (`pip install playwright`; its own browsers are not needed).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.extend(
    str(Path(__file__).parents[2] / folder)
    for folder in ("tests/batchgen/viewer", "tests/batchgen", "scripts/bench")
)
from browser import chromium, look, no_browser
from page_faults import keys, looked_at, served, use_report

from batchgen.folder.read_job import JobFolderReader
from batchgen.report.write_report import MOST_BYTES, make_report
from batchgen.viewer.job_view import JobView
from batchgen.viewer.pages import Site

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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="+", type=Path, metavar="OUT")
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    if (why := no_browser()) is not None:
        sys.exit(f"nothing was checked: {why}")
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        pictures = given.pictures or Path(folder)
        pictures.mkdir(parents=True, exist_ok=True)
        for some in (given.jobs[:1], given.jobs) if len(given.jobs) > 1 else (given.jobs,):
            pages = PAGES if len(some) == 1 else {**PAGES, **PAGES_OF_TWO}
            site = Site([JobView(JobFolderReader(job), job.name) for job in some])
            with served(site.respond) as url:
                for name, target in pages.items():
                    picture = pictures / f"{name}-{len(some)}"
                    found = looked_at(browser, url, target, picture)
                    faults += [f"{name} of {len(some)}: {fault}" for fault in found]
                faults += keys(browser.new_page(), url)
        for job in given.jobs:
            report = make_report(job)
            if (size := report.stat().st_size) >= MOST_BYTES:
                faults.append(f"{job}: {size:,} bytes")
            url = report.absolute().as_uri()
            faults += [f"{job}: {f}" for f in look(browser, url, pictures / job.name, use_report)]
    print(*faults, f"{len(faults)} faults", sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
