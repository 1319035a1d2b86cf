"""Headless Chromium for the checks of pages: opens one at several sizes and tells what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = {"phone": (390, 844), "desk": (1400, 900)}
SCHEMES = ("light", "dark")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
LEAST_CONTRAST = 4.5
"""The least contrast of text that is not large (WCAG 2.2, 1.4.3)."""
_CONTRASTS = """() => {
  const parse = text => {
    const [r, g, b, a] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a === undefined ? 1 : a];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const behind = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      layers.push(parse(getComputedStyle(e).backgroundColor));
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = rgb => {
    const [r, g, b] = rgb.map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const worst = {};
  for (const element of document.body.querySelectorAll('*')) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const ink = parse(element instanceof SVGElement ? style.fill : style.color);
    const paper = behind(element);
    const [high, low] = [light(over(ink, paper)), light(paper)].sort((a, b) => b - a);
    const name = element.tagName.toLowerCase() + '.' + (element.getAttribute('class') || '');
    const contrast = (high + 0.05) / (low + 0.05);
    worst[name] = Math.min(worst[name] || 99, contrast);
  }
  return worst;
}"""
"""For each kind of element that shows text the least contrast of its text to what is behind."""


def no_browser() -> str | None:
    """Why pages cannot be checked; None if they can."""
    if _browser() is None:
        return "there is no Chromium"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed (pip install playwright; its browsers are not needed)"
    return None


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, with a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_browser(), args=list(_FLAGS))
        yield browser
        browser.close()


def look(
    browser: Any,
    url: str,
    picture: Path | None = None,
    then: Callable[[Any], list[str]] = lambda page: [],
    within: str | None = None,
) -> list[str]:
    """Open a page, look at it in all sizes and schemes, and return what is wrong.

    Args:
        url: of the page.
        picture: pictures of the page get this name with the size and the scheme behind it.
        then: does something with the open page, and returns what is wrong with that.
        within: how all has to begin that the page asks for; None for `url`.
    """
    page = browser.new_context().new_page()
    told = _listening(page, within or url)
    page.goto(url)
    faults: list[str] = []
    for size, (width, height) in SIZES.items():
        for scheme in SCHEMES:
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=scheme)
            if picture is not None:
                page.screenshot(path=f"{picture}-{size}-{scheme}.png")
            found = then(page)
            if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
                found.append(f"{wide} pixels wide")
            found += [
                f"contrast {contrast:.2f} of {name}"
                for name, contrast in page.evaluate(_CONTRASTS).items()
                if contrast < LEAST_CONTRAST
            ]
            if picture is not None:
                page.screenshot(path=f"{picture}-{size}-{scheme}-then.png", full_page=True)
            faults += [f"{size} {scheme}: {text}" for text in found]
    page.context.close()
    return [*told, *faults]


def not_reached(page: Any) -> list[str]:
    """The controls of an open page that the Tab key does not reach, or on which nothing shows that
    they have the focus. Of radio buttons with one name one is enough."""
    count = page.evaluate(_CONTROLS)
    found: list[str] = []
    for _ in range(count + 2):
        page.keyboard.press("Tab")
        if unseen := page.evaluate(_FOCUS):
            found.append(f"the focus is not seen on {unseen}")
    return [*dict.fromkeys(found), *page.evaluate(_NOT_REACHED)]


_CONTROLS = """() => {
  const kinds = 'a[href], button, input:not([type=hidden]), select, summary, [tabindex="0"]';
  for (const folded of document.querySelectorAll('details')) folded.open = true;
  const seen = e => e.checkVisibility({ visibilityProperty: true });
  window.controls = [...document.querySelectorAll(kinds)].filter(seen);
  window.reached = new Set();
  return window.controls.length;
}"""
_FOCUS = """() => {
  const e = document.activeElement;
  if (!e || e === document.body || window.reached.has(e)) return '';
  window.reached.add(e);
  // A hidden switch has its outline on its label.
  const shown = getComputedStyle(e).opacity === '0' ? e.nextElementSibling : e;
  return getComputedStyle(shown).outlineStyle === 'none' ? e.outerHTML.slice(0, 120) : '';
}"""
_NOT_REACHED = """() => {
  const names = new Set([...window.reached].map(e => e.type === 'radio' && e.name));
  return window.controls
    .filter(e => !window.reached.has(e) && !(e.type === 'radio' && names.has(e.name)))
    .map(e => 'Tab does not reach ' + e.outerHTML.slice(0, 120));
}"""


def _listening(page: Any, url: str) -> list[str]:
    """A list that gets what the browser complains of, and what is asked for elsewhere."""
    told: list[str] = []

    def requested(request: Any) -> None:
        if not request.url.startswith(url):
            told.append(f"asks for {request.url}")

    page.on("console", lambda message: told.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on("request", requested)
    return told
