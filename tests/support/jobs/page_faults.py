"""What is wrong with the pages of the viewer and with reports, as a real browser shows them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchgen.pages.viewer.server import Respond, ViewServer
from tests.support.jobs.browser import look
from tests.support.jobs.real_job import run
from tests.support.jobs.written_job import grade_job, write_job

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


def run_hostile_job(folder: Path) -> Path:
    """A graded job of the small diffusion model whose rows want to break out of the page."""
    rows: list[dict[str, str | None]] = [
        {"id": f"{i} {text}", "question": text * (1 + 400 * (i == 2)), "final": text, text: text}
        for i, text in enumerate(_EVIL)
    ]
    rows.append({"id": "no question", "question": None, "final": None})
    names = dict.fromkeys(name for row in rows for name in row)
    file = folder / "<b>rows.jsonl"
    lines = [json.dumps({name: row.get(name) for name in names}) for row in rows]
    file.write_text("\n".join(lines), encoding="utf-8")
    options = ["sampling=sample", "sampling.temperature=1.2", "sampling.n=3"]
    options += ["output.columns=[logprobs,top_logprobs,step_map]", "engine.device=cpu"]
    options += ["engine.kv_cache_gib=0.05", "dataset=files", f"dataset.path={file}"]
    options += ["dataset.id_column=id", "dataset.limit=null", f"output.dir={folder / 'out'}"]
    run(["+experiment=nano_sdar", *options])
    return folder / "out"


def use_report(page: Any) -> list[str]:
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
