"""Formats tables as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def csv_text(header: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table as CSV, without the last newline. Cells that a row lacks are empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().rstrip("\n")


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first row is the header. The first column is left-aligned,
    the others are right-aligned."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    rule = "|" + "|".join(["---", *["---:"] * (len(cells[0]) - 1)]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
