"""The pages of `batchgen view`: turns the name of a page and its query into an HTML response."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import urlencode

from batchgen.evals.arms.job_facts import differing_settings
from batchgen.pages.viewer.columns import row_columns
from batchgen.pages.viewer.disagreements import Flips
from batchgen.pages.viewer.html import (
    NotThere,
    Query,
    answer,
    html_page,
    redirect,
    static_file,
    whole_number,
)
from batchgen.pages.viewer.job_view import JobView
from batchgen.pages.viewer.listed_rows import PER_PAGE, list_values
from batchgen.pages.viewer.overview import overview
from batchgen.pages.viewer.rows.download import KINDS, JobDownload
from batchgen.pages.viewer.rows.filters import SampleFilter
from batchgen.pages.viewer.rows.search import Search
from batchgen.pages.viewer.server import Response
from batchgen.util.errors import ConfigError

_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; sandbox"
)
"""The Content-Security-Policy of a report. A report contains its style sheet, and anybody could
have written it, so the policy forbids everything else."""


class Site:
    """The pages over one job, or over two jobs side by side.

    Args:
        jobs: one or two jobs; rows of the first are listed.
        above: the URL of the list of jobs; None if there is none.
    """

    def __init__(self, jobs: Sequence[JobView], above: str | None = None) -> None:
        self.jobs = list(jobs)
        self.flips = Flips(jobs[0], jobs[1]) if len(jobs) == 2 else None
        self._html = partial(html_page, jobs=self.jobs, flips=self.flips, above=above)
        self._pages: dict[str, Callable[[Query], Response]] = {
            "": self._overview,
            "rows": self._rows,
            "row": self._row,
            "download": self._download,
            "step": self._step,
            "find": self._find,
            "flip": self._flip,
            "report": self._report,
        }

    def respond(self, page: str, query: Query) -> Response:
        """Answer a request. `page` is the path below the site's address; the overview has an empty
        one."""
        file = static_file(page)
        return answer(self._pages.get(page), query, self._html) if file is None else file

    def _overview(self, query: Query) -> Response:
        """Show the overview of one job, or the comparison of two."""
        if self.flips is None:
            return self._html("overview", view=overview(self.jobs[0]))
        return self._compared(self.flips, query)

    def _rows(self, query: Query) -> Response:
        """Show one page of the list of rows."""
        first, sort = whole_number(query, "from", 0), query.get("sort", "")
        show = "votes" if query.get("show") == "votes" else ""
        values = list_values(self.jobs, self._wanted(query), first, sort, show)
        return self._html("rows", **values)

    def _wanted(self, query: Query) -> SampleFilter:
        return SampleFilter.of(query, self.jobs[0].subset_column)

    def _download(self, query: Query) -> Response:
        """Send the rows that match a filter as a file."""
        job, form = self.jobs[0], query.get("format", "jsonl")
        if form not in KINDS:
            raise ConfigError(f"format must be one of {', '.join(KINDS)}, got {form[:80]!r}")
        per_token = query.get("per_token") == "yes"
        file = JobDownload(job.rows, self._wanted(query), job.columns(per_token=per_token))
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", job.short_name)[:100]
        file_name = f"{name}-rows.{form}"
        return Response(b"", KINDS[form], file_name=file_name, chunks=file.chunks(form))

    def _row(self, query: Query) -> Response:
        """Show one input row with its samples, next to the same row of the other job."""
        index = whole_number(query, "n")
        tokens = query.get("tokens", "")
        first = self.jobs[0].row(index, tokens=bool(tokens))
        if not first:
            raise NotThere(f"Row {index:,} is not finished, or there is none.")
        row_id = first[0].row["row_id"]
        samples = [first]
        for other in self.jobs[1:]:
            position = other.ids.find(row_id, near=index)
            samples.append([] if position is None else other.row(position, tokens=bool(tokens)))
        return self._html(
            "row",
            index=index,
            row_id=row_id,
            shown=row_columns(self.jobs, samples, query),
            tokens=tokens,
            wanted=self._wanted(query),
            sort=query.get("sort", ""),
            listed={k: v for k, v in query.items() if k in ("sort", "show")},
            query=_without(query, "n"),
            without_tokens=_without(query, "n", "tokens"),
            kept=_without(query, "n", "flip", "anyway"),
            flip=whole_number(query, "flip", 0),
            flip_query=_anyway(query),
            num_rows=self.jobs[0].num_rows,
        )

    def _step(self, query: Query) -> Response:
        """Redirect to the next or previous row that matches the filter."""
        index, back = whole_number(query, "n"), query.get("to") == "back"
        wanted = self._wanted(query)
        if query.get("sort"):
            return self._step_in_order(query, wanted)
        search = Search(self.jobs[0].rows, wanted)
        hits = search.backward(index, 1) if back else search.forward(index + 1, 1)
        if hits.hits:
            kept = _without(query, "n", "to", "flip")
            return redirect("row", {**kept, "n": next(iter(hits.hits))})
        if hits.next_row is None:
            where = "before" if back else "after"
            raise NotThere(f"There is no such row {where} row {index:,}.")
        at = hits.next_row if back else hits.next_row - 1
        text = f"{hits.searched:,} answers were searched up to row {at:,}, and none matches."
        go_on = "step?" + urlencode({**query, "n": str(at)})
        return self._html("message", title="Still searching", text=text, go_on=go_on)

    def _step_in_order(self, query: Query, wanted: SampleFilter) -> Response:
        """Redirect to the next or previous row of a sorted list."""
        index, back = whole_number(query, "n"), query.get("to") == "back"
        entries = self.jobs[0].rankings.of(wanted, query["sort"]).entries
        rows = [entry.row for entry in entries]
        if index not in rows:
            raise NotThere(f"Row {index:,} is not in the sorted list any more.")
        at = rows.index(index) + (-1 if back else 1)
        if not 0 <= at < len(rows):
            raise NotThere(f"The sorted list has no row {'before' if back else 'after'} this one.")
        # The shown row begins with the sample by which it is listed.
        kept, number = _without(query, "n", "to", "flip", "sample_a"), entries[at].samples[0]
        return redirect("row", {**kept, "n": rows[at], "sample_a": number})

    def _find(self, query: Query) -> Response:
        """Redirect to the row with an id."""
        row_id = query.get("id", "")
        index = self.jobs[0].ids.find(row_id)
        if index is None:
            raise NotThere(
                f"No finished row of {self.jobs[0].name} has the row_id {row_id[:200]!r}."
            )
        return redirect("row", {"n": index})

    def _compared(self, flips: Flips, query: Query) -> Response:
        """Show how the settings and scores of two jobs differ, and the rows that flipped."""
        kept = _anyway(query)
        try:
            differing, why = flips.find(anyway=bool(kept)), None
        except ConfigError as error:
            differing, why = None, str(error)
        first = whole_number(query, "from", 0)
        page_rows = [] if differing is None else differing.flipped[first : first + PER_PAGE]
        return self._html(
            "compare",
            views=[overview(job) for job in self.jobs],
            settings=differing_settings([job.config for job in self.jobs]),
            comparison=differing,
            why=why,
            anyway=bool(kept),
            kept=kept,
            flipped=flips.rows(page_rows),
            first=first,
            per_page=PER_PAGE,
        )

    def _flip(self, query: Query) -> Response:
        """Redirect to the i-th flipped row."""
        flips, kept = self._both(), _anyway(query)
        rows = flips.find(anyway=bool(kept)).flipped
        index = whole_number(query, "i")
        if index >= len(rows):
            raise NotThere("There are no more flipped rows.")
        (row,) = flips.rows([rows[index]])
        if row.line is None:
            raise NotThere(f"Row {rows[index].row_id} is not there any more.")
        pairs = zip("ab", row.samples, strict=True)
        chosen = {f"sample_{key}": sample.number for key, sample in pairs if sample}
        return redirect("row", {"n": row.line.index, "flip": index, **chosen, **kept})

    def _both(self) -> Flips:
        if self.flips is None:
            raise NotThere("Flipped rows need two jobs: batchgen view OUT OUT2.")
        return self.flips

    def _report(self, query: Query) -> Response:
        number = whole_number(query, "job", 0)
        path = self.jobs[number].report if number < len(self.jobs) else None
        if path is None:
            raise NotThere("This job has no report.html.")
        return Response(path.read_bytes(), policy=_REPORT_POLICY)


def _without(query: Query, *keys: str) -> dict[str, str]:
    return {key: value for key, value in query.items() if key not in keys}


def _anyway(query: Query) -> dict[str, str]:
    """Return the key that permits a comparison of different exams, if the query has it."""
    return {"anyway": "yes"} if query.get("anyway") == "yes" else {}
