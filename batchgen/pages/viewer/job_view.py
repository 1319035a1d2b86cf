"""One job as the pages of `batchgen view` show it: its rows, configuration, scores, and what is
missing. The pages read jobs through `JobView`; `votes` counts the answers of a row's samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchgen.inputs.images.thumbnails import read_thumbnails
from batchgen.pages.rows.grade_columns import PREFIX
from batchgen.pages.rows.job_rows import JobRows
from batchgen.pages.rows.row_facts import OutcomeLabel, RowColumns, RowFacts
from batchgen.pages.rows.row_page import RowPage
from batchgen.pages.viewer.rows.ranking import Rankings
from batchgen.pages.viewer.rows.row_id_index import RowIds
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.column_kinds import PROMPT_IMAGES, is_per_token

if TYPE_CHECKING:
    from batchgen.pages.tokens.token_boxes import Decode


class JobView:
    """One job as the pages show it. Several threads may use it at a time.

    Args:
        reader: reads the job's folder.
        name: the folder as the user typed it.
    """

    def __init__(self, reader: JobFolderReader, name: str) -> None:
        self.name, self.rows = name, JobRows(reader)
        self.ids = RowIds(self.rows)
        self.rankings = Rankings(self.rows)
        self._lock = Lock()
        # None before the first use; then a tuple of one, in which None means: no tokenizer here.
        self._decode: tuple[Decode | None] | None = None
        # (time of change and size of config.yaml, its content)
        self._config: tuple[tuple[int, int], dict[str, Any]] | None = None

    @property
    def path(self) -> Path:
        return self.rows.path

    @property
    def short_name(self) -> str:
        """The last part of the folder's name, for titles."""
        return self.path.name

    @property
    def config(self) -> dict[str, Any]:
        """The job's configuration by group; empty if the job was killed before writing it. Cached
        until config.yaml changes, because parsing YAML takes about 100 ms."""
        try:
            stat = (self.path / "config.yaml").stat()
        except FileNotFoundError:
            return {}
        stamp = stat.st_mtime_ns, stat.st_size
        cached_stamp, config = self._config or (None, {})
        if cached_stamp != stamp:
            config = self.rows.reader.config
            self._config = stamp, config
        return config

    @property
    def config_text(self) -> str:
        """The file config.yaml; empty if there is none yet."""
        path = self.path / "config.yaml"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    @property
    def metrics(self) -> dict[str, Any]:
        return self.rows.reader.metrics

    @property
    def num_rows(self) -> int | None:
        """The number of input rows; None if unknown."""
        return self.rows.reader.questions

    @property
    def report(self) -> Path | None:
        path = self.path / "report.html"
        return path if path.is_file() and not path.is_symlink() else None

    @property
    def subsets(self) -> dict[str, dict[str, Any]]:
        """The scores of the subsets, by name; empty if the job has no subsets."""
        subsets: dict[str, dict[str, Any]] = (self.metrics.get("score") or {}).get("subsets", {})
        return subsets

    @property
    def subset_column(self) -> str:
        """The column whose values name the subsets of the score; empty if the rows have no such
        column."""
        name: str = (self.config.get("score") or {}).get("subset") or ""
        schema = self.rows.row_schema
        return name if schema is not None and name in schema.names else ""

    @property
    def prompt_columns(self) -> list[str]:
        """The columns that the prompt uses; all input columns if it names none."""
        schema = self.rows.row_schema
        return [] if schema is None else RowColumns(self.config, schema).prompt_columns

    def columns(self, *, per_token: bool) -> list[str]:
        """The names of the columns of the rows and of their grades.

        Args:
            per_token: include columns with a value per token, which can be the largest part of a
                file.
        """
        fields = self.rows.schema or ()
        return [f.name for f in fields if per_token or not is_per_token(f)]

    def row(self, row_index: int, *, tokens: bool) -> list[RowFacts]:
        """Read the finished samples of one input row; empty if there are none.

        Args:
            tokens: also read the columns with a value per token.
        """
        if self.rows.schema is None:
            return []
        return self.samples(self.rows.samples(row_index, self.columns(per_token=tokens)))

    def samples(self, table: pa.Table) -> list[RowFacts]:
        """Convert a table of rows and grades to one `RowFacts` per sample."""
        samples = []
        for row in table.to_pylist():
            columns = {name: value for name, value in row.items() if not name.startswith(PREFIX)}
            grades = {name.removeprefix(PREFIX): row[name] for name in row if name not in columns}
            is_graded = any(value is not None for value in grades.values())
            samples.append(RowFacts(columns, grades if is_graded else None))
        return samples

    def page(self, *, tokens: bool) -> RowPage:
        """Return the renderer of the rows. With `tokens`, it can also show the text of each
        token."""
        schema = self.rows.row_schema
        assert schema is not None
        thumbnails = read_thumbnails(self.path) if PROMPT_IMAGES in schema.names else None
        return RowPage(self.config, schema, self.decode() if tokens else None, thumbnails)

    def decode(self) -> Decode | None:
        """Return the function from token ids to text; None if the tokenizer is not on this machine.
        The tokenizer is loaded at the first call, which takes seconds for a GGUF file."""
        with self._lock:
            if self._decode is None:
                from batchgen.pages.tokens.decode_tokens import job_decode

                self._decode = (job_decode(self.config),)
            return self._decode[0]

    def missing(self) -> list[str]:
        """Return sentences for the user about data that pages could show and the job lacks."""
        schema = self.rows.row_schema
        if schema is None:
            return ["No row is finished yet. Rows appear here as they finish."]
        names = []
        if not self.rows.grade_names:
            names.append(
                "The rows have no grades, so nothing is right or wrong: batchgen grade makes some."
            )
        if not any(name in schema.names for name in ("logprobs", "step_map", "draft_accepted")):
            names.append(
                "The rows have no column with a value per token, so the token view has no colours: "
                "output.columns=logprobs would bring one."
            )
        return names


@dataclass(frozen=True)
class Vote:
    """One answer to a question, and the samples that gave it."""

    key: str | None  # the normal form of the answer, by which votes are counted; None for no answer
    answer: str | None  # as the first of the samples wrote it
    samples: list[int]  # the numbers of the samples within the row
    verdict: OutcomeLabel

    @property
    def shown(self) -> str:
        """The answer to display: as written, or the normal form, which can be opaque, if the grades
        lack the former."""
        return next((text for text in (self.answer, self.key) if text is not None), "no answer")

    @property
    def count(self) -> int:
        return len(self.samples)


def votes(samples: Sequence[RowFacts]) -> list[Vote]:
    """Count the answers of the samples of one row, the most frequent first; "no answer" comes last.

    Samples with equal answers but different verdicts are counted separately. A failed sample has no
    answer. Returns an empty list if no sample is graded.
    """
    if not any(sample.grades and "answer_key" in sample.grades for sample in samples):
        return []
    by_answer: dict[tuple[str | None, str], Vote] = {}
    for sample in samples:
        key, answer = (_text(sample.grade(name)) for name in ("answer_key", "answer"))
        verdict = sample.verdict
        vote = by_answer.setdefault((key, verdict.name), Vote(key, answer, [], verdict))
        vote.samples.append(sample.number)
    return sorted(by_answer.values(), key=lambda vote: (vote.key is None, -vote.count))


def _text(value: object) -> str | None:
    return None if value is None else str(value)
