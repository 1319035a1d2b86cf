"""What a list of rows shows: a page of those that a filter lists, in some order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchgen.viewer.job_view import JobView
from batchgen.viewer.row_lines import row_lines
from batchgen.viewer.rows.filters import MARKS, REASONS, Filter, text_columns
from batchgen.viewer.rows.ranking import MOST, ORDERS, hits, orders, value_text
from batchgen.viewer.rows.search import Search

PER_PAGE = 50
SHOWS = ("votes",)
"""What a list can show of a row in place of a text."""


def list_values(
    jobs: Sequence[JobView], wanted: Filter, first: int, sort: str, show: str
) -> dict[str, Any]:
    """What the template of a list needs.

    Args:
        jobs: the first is the one whose rows are listed.
        first: the index of the row to begin with; with a sort, the place in its order.
        sort: one of ORDERS; empty for the order of the data set.
        show: one of SHOWS; empty for texts.

    Raises:
        ConfigError: the job lacks what the filter or the order needs.
        StillSearching: the other job has the rows elsewhere.
        JobError: a shard is damaged.
    """
    job = jobs[0]
    kept = {**wanted.query, **{k: v for k, v in (("sort", sort), ("show", show)) if v}}
    values = _ranked(jobs, wanted, first, sort) if sort else _in_order(jobs, wanted, first)
    schema = job.rows.schema
    return {
        **values,
        "wanted": wanted,
        "kept": kept,
        "first": first,
        "sort": sort,
        "show": show,
        "orders": orders(schema),
        "num_rows": job.num_rows,
        "columns": [] if schema is None else text_columns(schema),
        "text_column": job.rows.text_column,
        "marks": MARKS if job.rows.grade_names else {},
        "subsets": list(job.subsets) if job.subset_column else [],
        "reasons": REASONS,
        "errors": list(job.metrics.get("errors") or {}),
        "can_vote": "grades/answer_key" in job.rows.grade_names,
    }


def _in_order(jobs: Sequence[JobView], wanted: Filter, first: int) -> dict[str, Any]:
    search = Search(jobs[0].rows, wanted)
    found = search.forward(first, PER_PAGE)
    return {
        "lines": row_lines(jobs, search, found.hits),
        "searched": found.searched,
        "later": found.next_row,
        "earlier": max(first - PER_PAGE, 0) if first and not wanted else None,
        "ranking": None,
    }


def _ranked(jobs: Sequence[JobView], wanted: Filter, first: int, sort: str) -> dict[str, Any]:
    ranking = jobs[0].rankings.of(wanted, sort)
    places = ranking.places[first : first + PER_PAGE]
    notes = {place.row: value_text(sort, place.value) for place in places}
    later = first + PER_PAGE
    return {
        "lines": row_lines(jobs, Search(jobs[0].rows, wanted), hits(places), notes),
        "searched": ranking.searched,
        "later": later if later < len(ranking.places) else None,
        "earlier": max(first - PER_PAGE, 0) if first else None,
        "ranking": ranking,
        "order": ORDERS[sort],
        "most": MOST,
    }
