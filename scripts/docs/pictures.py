"""Makes the two pictures of README.md from real runs: a job in a terminal, and a report.

    python scripts/docs/pictures.py [--work FOLDER]

Writes docs/images/terminal.svg and docs/images/report.png. Needs Chromium for the second.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from argparse import ArgumentParser
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
JOB = [
    "+experiment=nano_hybrid",
    "sampling=sample",
    "sampling.temperature=2.3",
    "sampling.n=2",
    "dataset.limit=120",
]
COLUMNS, WIDTH, LINE = 96, 8.4, 19
"""The columns of the terminal, and the pixels of a column's width and of a line's height."""
SHOWN = 14
"""The lines of output that the picture has."""


def watch(command: list[str]) -> list[str]:
    """Run a command in a pseudo-terminal, to its end. Return the lines on its screen at the moment
    when its progress bar reached 60%. Exit if the command fails."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    process = subprocess.Popen(command, cwd=ROOT, stdout=follower, stderr=follower)
    os.close(follower)
    read = b""
    screen: list[str] = []
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:  # the command has ended, which closes the terminal
            break
        read += chunk
        lines = screen_of(read.decode("utf-8", "replace"))
        if not screen and (bar := re.match(r" *(\d+)%\|", lines[-1])) and int(bar[1]) >= 60:
            screen = lines
    if process.wait() != 0 or not screen:
        sys.exit(f"the job ended with {process.returncode}:\n{read.decode(errors='replace')}")
    return screen


def screen_of(text: str) -> list[str]:
    """Return the lines that a terminal shows after printing a text with carriage returns and
    colours. A text after a carriage return overwrites the line from its beginning."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    shown = []
    for line in text.replace("\r\n", "\n").split("\n"):
        visible = ""
        for part in line.rstrip("\r").split("\r"):
            visible = part + visible[len(part) :]
        shown += wrap(visible, COLUMNS, drop_whitespace=False) or [""]
    while shown and not shown[-1]:
        shown.pop()
    return [line.rstrip() for line in shown] or [""]


def terminal_svg(command: str, lines: list[str]) -> str:
    """Return an SVG image of a terminal with a command and the lines of its output."""
    typed_rows = wrap(command, COLUMNS - 4, break_long_words=False, break_on_hyphens=False)
    rows = ["$ " + " \\\n      ".join(typed_rows)]
    rows = [*rows[0].split("\n"), *lines]
    width, height = round(COLUMNS * WIDTH + 32), len(rows) * LINE + 52
    typed = " class='typed'"
    text = "\n".join(
        f"<text x='16' y='{52 + index * LINE}' xml:space='preserve'"
        f"{typed * (index < len(typed_rows))}>{escape(row)}</text>"
        for index, row in enumerate(rows)
    )
    dots = "".join(f'<circle cx="{20 + 18 * i}" cy="17" r="5" fill="#5b6270"/>' for i in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(command)}</title>\n"
        "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',"
        "monospace;fill:#d7dae0}.typed{fill:#8ecb8e}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#1e2127"/>{dots}\n{text}\n</svg>\n'
    )


def screenshot(page: Path, image: Path) -> None:
    """Save an image of the upper part of a web page."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), "chromium")
    subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,880",
            f"--screenshot={image}", page.as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--work", help="the folder of the job; a temporary one by default")
    work = Path(parser.parse_args().work or tempfile.mkdtemp()).absolute()
    IMAGES.mkdir(exist_ok=True)
    out = work / "job"
    options = [*JOB, "progress.show=3", f"output.dir={out}", "output.overwrite=true"]
    screen = watch([sys.executable, "-m", "batchgen", *options])
    screen = screen[-SHOWN:]
    while not screen[0].startswith("row "):  # the picture begins with a whole answer
        del screen[0]
    picture = terminal_svg(" ".join(["batchgen", *JOB]), screen)
    (IMAGES / "terminal.svg").write_text(picture, encoding="utf-8")
    screenshot(out / "report.html", IMAGES / "report.png")


if __name__ == "__main__":
    main()
