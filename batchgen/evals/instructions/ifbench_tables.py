"""The checks of IFBench (Pyatkin et al. 2025, arXiv 2507.02833) on CSV tables and lists of dates.

As in `ifbench_words.py`, they follow allenai/IFBench, instructions.py, commit 1d62c1d. `TABLES`
lists them.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence

from batchgen.evals.instructions.arguments import InstructionArguments

_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_LAST_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def _cells(text: str, delimiter: str = ",") -> list[list[str]]:
    """The cells of a table with their quotes; empty if it cannot be read."""
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return []


def _csv_city(text: str, args: InstructionArguments) -> bool:
    """A table of this header and 7 rows of 5 cells."""
    rows = _cells(text)
    header = ["ID", "Country", "City", "Year", "Count"]
    return len(rows) == 8 and rows[0] == header and all(len(row) == 5 for row in rows)


def _has_header(text: str, names: Sequence[str], between: str) -> bool:
    """Whether the first line has these names, each in quotes or not."""
    pattern = between.join(f'(?:{name}|"{name}")' for name in names)
    return re.fullmatch(pattern, text.split("\n")[0].strip()) is not None


def _csv_special_character(text: str, args: InstructionArguments) -> bool:
    """A table of this header and 14 rows of 5 cells, one of which has a special character and is in
    quotes."""
    names = ("ProductID", "Category", "Brand", "Price", "Stock")
    # Tripled quotes stay in the cells that the reader returns.
    rows = _cells(text.replace('"', '"""'))
    if not _has_header(text, names, r",[ \t]*") or len(rows) != 15:
        return False
    for row in rows[1:]:
        if len(row) != 5:
            return False
        if any(re.match(r'".*[^\d\w\s].*"', cell) for cell in row):
            return True  # the published check does not look at later rows either
    return False


def _csv_quotes(text: str, args: InstructionArguments) -> bool:
    """A table of this header and 3 rows of 5 cells, with tabs between cells and all in quotes."""
    names = ("StudentID", "Subject", "Grade", "Semester", "Score")
    rows = _cells(text.replace('"', '"""'), "\t")
    if not _has_header(text, names, "\t *") or len(rows) != 4:
        return False
    cells = [cell.strip() for row in rows for cell in row]
    five = all(len(row) == 5 for row in rows)
    return five and all(cell[:1] == cell[-1:] == '"' for cell in cells)


def _date_format_list(text: str, args: InstructionArguments) -> bool:
    """Dates between 1769 and 1821. The published check also accepts month 00 and day 00."""
    for part in text.split(","):
        match = _DATE.fullmatch(part.strip())
        if match is None:
            return False
        year, month, day = map(int, match.groups())
        if not 1769 <= year <= 1821 or month > 12 or (month and day > _LAST_DAYS[month - 1]):
            return False
    return True


TABLES: Mapping[str, Callable[[str, InstructionArguments], bool]] = {
    "custom:csv_city": _csv_city,
    "custom:csv_special_character": _csv_special_character,
    "custom:csv_quotes": _csv_quotes,
    "custom:date_format_list": _date_format_list,
}
