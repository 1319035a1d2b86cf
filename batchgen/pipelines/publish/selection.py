"""Writes a new set from rows of complete jobs: `batchgen select`."""

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
    """The result of `select`: the number of rows in the set, and after each option; `is_new` is
    false if the set was already there."""

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
    """Write a folder with the rows that a choice takes of some jobs.

    A folder that has them is left as it is. Killed at any time, it leaves no folder.

    Raises:
        ConfigError: an option does not fit the jobs, `out` holds something else, or no row is left.
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
    """What the ids of each job's rows begin with: nothing for one job, else its folder's name."""
    if len(jobs) == 1:
        return [""]
    names = [job.user_path.rstrip("/").rpartition("/")[2] for job in jobs]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two of these jobs have one name ({', '.join(sorted(names))}), and ids begin with "
            "it: rename one of the folders"
        )
    return [f"{name}/" for name in names]
