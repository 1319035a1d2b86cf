"""What the pages show of one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from markupsafe import Markup

from batchgen.folder.read_job import JobFolderReader
from batchgen.report.row_page import Limits, RowPage, Verdict, answer_spans, verdict
from batchgen.report.row_view import input_columns
from batchgen.storage.manifest import ROWS
from batchgen.viewer.rows.grade_columns import PREFIX
from batchgen.viewer.rows.ranking import Rankings
from batchgen.viewer.rows.row_id_index import RowIds
from batchgen.viewer.rows.viewed_rows import JobRows

if TYPE_CHECKING:
    from batchgen.report.prompt_text import Part
    from batchgen.texts.tokens.token_boxes import Decode

MOST_TOKENS = 4000
"""Of the token view of a row, unless all are asked for: a browser takes seconds for many more."""
_PER_TOKEN = ("token_ids", "prompt_token_ids")


@dataclass(frozen=True)
class Sample:
    """One sample of a row.

    Attributes:
        row: its columns.
        grades: its grades; None if it has none.
    """

    row: dict[str, Any]
    grades: dict[str, Any] | None

    @property
    def number(self) -> int:
        number: int = self.row["sample_index"]
        return number

    @property
    def verdict(self) -> Verdict:
        """How it fared. What nothing marks is named by the reason why it ended."""
        found = verdict(self.row, self.grades)
        return Verdict(self.row["finish_reason"], "none") if found is None else found


class JobView:
    """One job as the pages show it.

    Attributes:
        name: the folder as the user named it.
        rows: of the job.
        ids: where its rows are.
        rankings: its rows in other orders than that of the data set.
    """

    def __init__(self, reader: JobFolderReader, name: str) -> None:
        self.name, self.rows = name, JobRows(reader)
        self.ids = RowIds(self.rows)
        self.rankings = Rankings(self.rows)
        self._lock = Lock()
        self._decode: tuple[Decode | None] | None = None
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
        """The job's configuration by group; empty if the job was killed before it was written. It
        is read again when the file has changed: YAML takes a hundred milliseconds."""
        try:
            stat = (self.path / "config.yaml").stat()
        except FileNotFoundError:
            return {}
        stamp = stat.st_mtime_ns, stat.st_size
        known = self._config
        if known is None or known[0] != stamp:
            known = self._config = stamp, self.rows.reader.config
        return known[1]

    @property
    def metrics(self) -> dict[str, Any]:
        return self.rows.reader.metrics

    @property
    def num_rows(self) -> int | None:
        """How many input rows the job has; None if that is not known."""
        rows: int | None = self.rows.reader.manifest["growing"].get(ROWS)
        return rows

    @property
    def report(self) -> Path | None:
        """The report of the job; None if it has none."""
        path = self.path / "report.html"
        return path if path.is_file() and not path.is_symlink() else None

    @property
    def config_text(self) -> str:
        """The file config.yaml; empty if there is none yet."""
        path = self.path / "config.yaml"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    @property
    def subsets(self) -> dict[str, dict[str, Any]]:
        """The scores of the subsets, by name; empty without."""
        found: dict[str, dict[str, Any]] = (self.metrics.get("score") or {}).get("subsets", {})
        return found

    @property
    def subset_column(self) -> str:
        """The column of the rows that names their subset; empty if there is none."""
        name: str = (self.config.get("score") or {}).get("subset") or ""
        schema = self.rows.row_schema
        return name if schema is not None and name in schema.names else ""

    def inputs(self) -> list[str]:
        """The columns that say what a row was asked."""
        schema = self.rows.row_schema
        return [] if schema is None else input_columns(self.config, schema)

    def samples(self, table: pa.Table) -> list[Sample]:
        """The samples in a table of rows and their grades."""
        found = []
        for row in table.to_pylist():
            own = {name: value for name, value in row.items() if not name.startswith(PREFIX)}
            grades = {name.removeprefix(PREFIX): row[name] for name in row if name not in own}
            has_some = any(value is not None for value in grades.values())
            found.append(Sample(own, grades if has_some else None))
        return found

    def row(self, row_index: int, *, tokens: bool) -> list[Sample]:
        """The finished samples of a row with all columns, those with a value per token only with
        `tokens`: they can be most of a file."""
        if self.rows.schema is None:
            return []
        return self.samples(self.rows.samples(row_index, self.columns(per_token=tokens)))

    def columns(self, *, per_token: bool) -> list[str]:
        """The columns of the rows and of their grades.

        Args:
            per_token: those with a value per token, too.
        """
        schema = self.rows.schema
        fields = [] if schema is None else list(schema)
        return [f.name for f in fields if per_token or not _is_per_token(f)]

    def prompt(self, sample: Sample, *, tokens: bool) -> list[Part]:
        """What a row was asked, each part with its name.

        Args:
            tokens: as the model saw it, where the job has that.
        """
        page = self._page(tokens=tokens)
        return page.prompt.parts(page.read(sample.row))

    def prompt_html(self, sample: Sample, key: str, *, tokens: bool) -> Markup:
        """The same as HTML."""
        return self._page(tokens=tokens).prompt_html(sample.row, key=key)

    def html(self, sample: Sample, key: str, *, tokens: bool, with_prompt: bool = True) -> Markup:
        """What the row says, without its tokens.

        Args:
            key: makes ids unique in the page.
            tokens: with the prompt as the model saw it, where the job has that.
            with_prompt: whether the prompt is there.
        """
        row = {**sample.row, "token_ids": None}
        page, limits = self._page(tokens=tokens), Limits(tokens=0)
        return page.html(row, sample.grades, key=key, limits=limits, with_prompt=with_prompt)

    def tokens_html(self, sample: Sample, key: str, most: int | None) -> Markup:
        """The tokens of the row.

        Args:
            most: how many are shown; None for all.
        """
        page = self._page(tokens=True)
        text = sample.row[page.text_column]
        spans = answer_spans(sample.grades, text)
        tokens = page.tokens.of(sample.row, key, text, spans[0] if spans else None)
        return tokens.html(most)

    def decode(self) -> Decode | None:
        """The text of token ids; None if the tokenizer is not on this machine.

        It is loaded when it is first asked for. That of a GGUF file takes seconds, because it needs
        transformers.
        """
        with self._lock:
            if self._decode is None:
                from batchgen.texts.tokens.decode_tokens import job_decode

                self._decode = (job_decode(self.config),)
            return self._decode[0]

    def _page(self, *, tokens: bool) -> RowPage:
        schema = self.rows.row_schema
        assert schema is not None
        return RowPage(self.config, schema, self.decode() if tokens else None)

    def missing(self) -> list[str]:
        """What the job lacks that pages could show, a sentence each."""
        schema = self.rows.row_schema
        if schema is None:
            return ["No row is finished yet. Rows appear here as they finish."]
        found = []
        if not self.rows.grade_names:
            found.append(
                "The rows have no grades, so nothing is right or wrong: batchgen grade makes some."
            )
        if not any(name in schema.names for name in ("logprobs", "step_map", "draft_accepted")):
            found.append(
                "The rows have no column with a value per token, so the token view has no colours: "
                "output.columns=logprobs would bring one."
            )
        return found


def _is_per_token(field: pa.Field) -> bool:
    return field.name in _PER_TOKEN or b"scope" in (field.metadata or {})


def same_sample(samples: Sequence[Sample], number: int | None) -> Sample | None:
    """The sample with this number, else the first; None if there is none."""
    chosen = [sample for sample in samples if sample.number == number]
    return next(iter([*chosen, *samples]), None)
