"""The documentation names what there is, and its generated pages are up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PATH = re.compile(r"`((?:batchgen|engine|kernels|strategies|scripts|tests|conf|examples)/[\w./-]+)")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"^    (?:.* )?python (scripts/[\w/]+\.py)", re.MULTILINE)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = [ROOT / path for path in [*PATH.findall(text), *COMMAND.findall(text)]]
    named += [page.parent / link for link in LINK.findall(text)]
    assert [str(path) for path in named if not path.exists()] == []


def test_long_pages_stay_short() -> None:
    for name, most in (("README.md", 100), ("docs/design/overview.md", 250)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


def test_design_pages_stay_short() -> None:
    """They say what stands and why; figures belong to docs/benchmarks, use to the guides."""
    pages = (ROOT / "docs" / "design").glob("*.md")
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 10_000


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert pages == set(re.findall(r": (\S+\.md)$", menu, re.MULTILINE))


def test_guides_lead_from_one_to_the_next() -> None:
    """In the order of the menu, and the home page names all of them."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    names = re.findall(r"guides/(\w+\.md)", menu)
    home = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert [name for name in names if f"guides/{name}" not in home] == []
    ends = {
        name: (ROOT / "docs/guides" / name).read_text(encoding="utf-8").splitlines()[-1]
        for name in names
    }
    lost = [a for a, b in pairwise(names) if not _leads_to(ends[a], b)]
    assert lost == []


def _leads_to(line: str, name: str) -> bool:
    return line.startswith("Next: [") and f"]({name})" in line


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert pictures and all(picture.stat().st_size < 200_000 for picture in pictures)


@pytest.mark.thorough
@pytest.mark.skipif(sys.version_info[:2] > (3, 12), reason="argparse writes its help otherwise")
def test_generated_pages_are_up_to_date() -> None:
    """Else run `python scripts/docs/reference.py`."""
    command = [sys.executable, "scripts/docs/reference.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
