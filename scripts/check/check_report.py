"""Look at reports of jobs in a real browser, and save pictures of them.

    python scripts/check/check_report.py [OUT …] [--pictures FOLDER]

Without folders of jobs two small ones are run, of which one has texts that try to break out of the
page. Each report is opened in headless Chromium at the size of a phone and of a desk, light and
dark; rows are opened, tokens coloured, kinds of rows chosen, links followed. The exit code is 1 if
the browser's console has an error, a page asks for anything, is wider than the window, has text of
too little contrast or runs a text as a script, or a switch does nothing. Without Chromium and
playwright (`pip install playwright`; its own browsers are not needed) nothing is checked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from browser import chromium, look, no_browser

from batchgen.report.write_report import MOST_BYTES, make_report

_EVIL = (
    "<script>window.broken_out = 1</script>",
    '"><img src=x onerror="window.broken_out = 1">',
    "</style></svg></title><svg onload=window.broken_out=1> ]]> -->",
    "\u202eesrever si siht\u202c \x1b[31m \N{ZERO WIDTH SPACE} עברית العربية 中文",
    "javascript:window.broken_out=1 {{ 7 * 7 }} &lt;b&gt;",
)
"""What rows say that try to break out of the page."""
_OPEN = """() => {
  for (const item of [...document.querySelectorAll('.item')].slice(0, 12)) {
    item.open = true;
    item.querySelectorAll('details').forEach(inner => { inner.open = true; });
  }
  document.querySelectorAll('.numbers, #configuration details').forEach(e => { e.open = true; });
}"""
_COLOURS = """() => new Set([...document.querySelectorAll('.item[open] .toks .t')]
  .map(t => getComputedStyle(t).backgroundColor)).size"""
_SHOWN = (
    "() => [...document.querySelectorAll('.item')].filter(e => e.getClientRects().length).length"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", type=Path)
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    if (why := no_browser()) is not None:
        print(f"nothing was checked: {why}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        jobs = given.jobs or run_jobs(Path(folder))
        pictures = given.pictures or Path(folder, "pictures")
        pictures.mkdir(parents=True, exist_ok=True)
        faults: list[str] = []
        with chromium() as browser:
            for job in jobs:
                report = make_report(job)
                if (size := report.stat().st_size) >= MOST_BYTES:
                    faults.append(f"{job}: {size:,} bytes")
                url = report.absolute().as_uri()
                faults += [f"{job}: {f}" for f in look(browser, url, pictures / job.name, _use)]
    print(*faults, f"{len(faults)} faults in {len(jobs)} reports", sep="\n")
    return bool(faults)


def run_jobs(folder: Path) -> list[Path]:
    """A graded job of the small diffusion model, and one whose rows want to break out."""
    rows: list[dict[str, str | None]] = [
        {"id": f"{i} {text}", "question": text * (1 + 400 * (i == 2)), "final": text, text: text}
        for i, text in enumerate(_EVIL)
    ]
    rows.append({"id": "no question", "question": None, "final": None})
    names = dict.fromkeys(name for row in rows for name in row)
    file = folder / "<b>rows.jsonl"
    lines = [json.dumps({name: row.get(name) for name in names}) for row in rows]
    file.write_text("\n".join(lines), encoding="utf-8")
    post = (
        "post=[{_target_: batchgen.grading.extract.Extract, methods: [last_number]}, "
        "{_target_: batchgen.grading.grade.Grade, method: integer, target: final}]"
    )
    common = ["+experiment=nano_sdar", post, "sampling=sample", "sampling.temperature=1.2",
              "sampling.n=3", "sampling.max_new_tokens=80",
              "output.columns=[logprobs,top_logprobs,step_map]"]  # fmt: skip
    evil = ["dataset=files", f"dataset.path={file}", "dataset.id_column=id", "dataset.limit=null"]
    asked = {"nano": ["dataset.limit=20"], "evil": evil}
    for name, more in asked.items():
        arguments = [*common, *more, f"output.dir={folder / name}"]
        done = subprocess.run([sys.executable, "-m", "batchgen", *arguments])
        if done.returncode not in (0, 3):
            sys.exit(f"the job {name} failed")
    return [folder / name for name in asked]


def _use(page: Any) -> list[str]:
    """Open rows, colour their tokens, choose kinds of rows, follow a link; what is wrong."""
    faults = []
    page.evaluate(_OPEN)
    for mode in page.evaluate("[...document.querySelectorAll('.item[open] .m')].map(e => e.id)"):
        page.evaluate("id => document.getElementById(id).click()", mode)
        if page.evaluate(_COLOURS) < 1:
            faults.append(f"{mode} colours nothing")
    everything = page.evaluate(_SHOWN)
    for kind in page.evaluate("[...document.querySelectorAll('.k')].map(e => e.id)"):
        page.evaluate("id => document.getElementById(id).click()", kind)
        shown, said = page.evaluate(_SHOWN), page.locator(f"label[for={kind}] span").inner_text()
        if shown != int(said.replace(",", "")) or (kind == "k-all") != (shown == everything):
            faults.append(f"{kind} shows {shown} rows and says {said}")
    page.evaluate("document.querySelectorAll('#k-all').forEach(e => e.click())")
    anchors = page.evaluate("[...document.querySelectorAll('.link a')].map(e => e.hash)")
    if anchors:
        page.evaluate("document.querySelectorAll('.item').forEach(e => { e.open = false; })")
        # A page that is there already is not gone to again.
        page.evaluate("hash => { location.hash = ''; location.hash = hash; }", anchors[-1])
        page.wait_for_timeout(100)
        if not page.locator(anchors[-1]).is_visible():
            faults.append("a link does not open its row")
    page.evaluate(_OPEN)
    page.evaluate("document.querySelectorAll('.tv .m:first-child').forEach(e => e.click())")
    if page.evaluate("window.broken_out !== undefined"):
        faults.append("a text became a script")
    return faults


if __name__ == "__main__":
    sys.exit(main())
