"""Writes a new set from rows of complete jobs, for `batchgen select`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from batchgen.pipelines.publish.chosen_rows import SelectionRequest, choose
from batchgen.pipelines.publish.data_folder import is_there, request_digest, write_folder
from batchgen.pipelines.publish.finished_rows import SET_FILE, SET_FORMAT, FinishedRows
from batchgen.pipelines.publish.set_card import job_lineage, set_card
from batchgen.pipelines.publish.set_rows import set_columns, set_schema, set_tables
from batchgen.util.errors import ConfigError


@dataclass(frozen=True)
class Selected:
    """The result of `select`.

    Attributes:
        rows: the number of rows in the set; 0 if the set existed.
        funnel: (step, rows that remained after it), in order.
        is_new: False if the folder already had this set.
    """

    rows: int
    funnel: Sequence[tuple[str, int]]
    is_new: bool


def select(
    jobs: Sequence[FinishedRows],
    choice: SelectionRequest,
    out: Path,
    *,
    columns: Sequence[str] | None = None,
    text_as: str = "response",
) -> Selected:
    """Write a folder with the chosen rows of some jobs.

    A folder that already has these rows is left unchanged. A killed process leaves no folder.

    Args:
        out: the folder to write.
        columns: the columns to take; None for the default ones.
        text_as: the name of the generated text's column in the set.

    Raises:
        ConfigError: an option does not fit the jobs, `out` holds something else, or no row remains.
        JobError: a job is damaged, or the folder cannot be written.
    """
    prefixes = _prefixes(jobs)
    taken = [
        set_columns(
            job,
            named=columns,
            text_as=text_as,
            one_of_a_row=choice.best is not None,
            prefix=prefix,
        )
        for job, prefix in zip(jobs, prefixes, strict=True)
    ]
    schema = set_schema(jobs, taken)
    lineage = [job_lineage(job) for job in jobs]
    wanted_set = {**asdict(choice), "columns": columns, "text_as": text_as}
    request = request_digest({"asked": wanted_set, "jobs": [one["digest"] for one in lineage]})
    if is_there(out, request):
        return Selected(0, (), is_new=False)
    order, funnel = choose(jobs, choice)
    if not len(order):
        raise ConfigError("\n".join(["no row is left:", *funnel.lines()]))
    facts = {
        "format": SET_FORMAT,
        "kind": "rows",
        "request": request,
        "asked": wanted_set,
        "text_column": text_as,
        "funnel": funnel.steps,
        "jobs": lineage,
    }

    def card(rows: int) -> str:
        about = (
            f"{rows:,} rows, chosen by `batchgen select`. `{SET_FILE}` has the manifests of the "
            "jobs that they came from."
        )
        return set_card(out, request, about, lineage, funnel.steps, schema)

    rows = write_folder(out, schema, set_tables(jobs, taken, order, schema), facts, card)
    return Selected(rows, funnel.steps, is_new=True)


def _prefixes(jobs: Sequence[FinishedRows]) -> list[str]:
    """Return the prefix of the ids of each job's rows: the name of its folder, or nothing if there
    is one job."""
    if len(jobs) == 1:
        return [""]
    names = [job.user_path.rstrip("/").rpartition("/")[2] for job in jobs]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two of these jobs have one name ({', '.join(sorted(names))}), and ids begin with "
            "it: rename one of the folders"
        )
    return [f"{name}/" for name in names]
