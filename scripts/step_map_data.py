"""The data that plot_step_map.py draws, read from a job's Parquet files and its config.yaml."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import yaml

from batchgen.prompts.used_columns import used_columns
from batchgen.util.shorten import beginning, end

STEP_NAMES = {"DLLMStrategy": "denoise step", "ARSpecStrategy": "forward"}
"""The name of what step_map counts, by the class of the strategy; for others it is "step"."""


PROMPT = "prompt_token_ids"
TITLE_LENGTH = 80


class PlotError(Exception):
    """A mistake of the user. The message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Line:
    """Consecutive tokens of a row that are drawn in one line.

    Attributes:
        texts: the text of each token.
        steps: the step of each token.
        given: cells before the first token, which belong to the prompt.
    """

    texts: Sequence[str]
    steps: Sequence[int]
    given: int


@dataclass(frozen=True, slots=True)
class TracedRow:
    """The tokens of a row, and the steps that they came from.

    Attributes:
        name: the title of the row.
        texts: the text of each token as it is drawn, or empty strings if it is not known.
        steps: the step of each token, from 1.
        given: how many positions of the first token's block are the end of the prompt.
    """

    SPACE: ClassVar[str] = "␣"
    END: ClassVar[str] = "■"

    name: str
    texts: Sequence[str]
    steps: Sequence[int]
    given: int

    def lines(self, tokens_per_line: int, most_lines: int) -> list[Line]:
        """Cut the row into at most `most_lines` lines; the tokens after those are left out.

        Every line has `tokens_per_line` cells. The first `given` cells of the first line are the
        end of the prompt, so all lines begin at the same offset in a block.
        """
        starts = range(-self.given, len(self.steps), tokens_per_line)[:most_lines]
        lines = []
        for start in starts:
            part = slice(max(start, 0), start + tokens_per_line)
            lines.append(Line(self.texts[part], self.steps[part], max(-start, 0)))
        return lines


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many tokens the steps of all rows yielded.

    Attributes:
        counts: how many steps yielded a given number of tokens. Steps none of whose tokens is in
            the output are not counted, since the output does not show them.
        rows: rows that have tokens.
    """

    counts: dict[int, int]
    rows: int

    @property
    def steps(self) -> int:
        return sum(self.counts.values())

    @property
    def tokens(self) -> int:
        return sum(tokens * steps for tokens, steps in self.counts.items())

    @property
    def most_tokens(self) -> int:
        return max(self.counts)

    @property
    def mean(self) -> float:
        return self.tokens / self.steps


@dataclass(frozen=True)
class StepMaps:
    """The output of a job that has the column step_map.

    Attributes:
        folder: the job's folder.
        data: its Parquet files.
        step_name: what the numbers of step_map count.
        block_length: positions of a diffusion block; None if the strategy has no blocks, or if
            config.yaml does not say.
        title_columns: the columns whose values are a row's title.
        title_is_prompt: whether the end of the prompt is the title instead, where it can be read.
    """

    folder: Path
    data: ds.Dataset
    step_name: str
    block_length: int | None
    title_columns: Sequence[str]
    title_is_prompt: bool

    @property
    def num_rows(self) -> int:
        count: int = self.data.count_rows()
        return count

    def traced_rows(self, count: int, decoder: Any = None) -> list[TracedRow]:
        """Read the first `count` rows that have tokens.

        Args:
            count: how many.
            decoder: the model's tokenizer. With None, texts are known only if each token is a byte.

        Raises:
            PlotError: if no row has tokens.
        """
        names = ["row_id", "sample_index", "token_ids", "text", "stop", "num_prompt_tokens"]
        names += ["step_map", *self.title_columns]
        if self.title_is_prompt and PROMPT in self.data.schema.names:
            names.append(PROMPT)
        batches = self.data.to_batches(columns=[*dict.fromkeys(names)], batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist() if row["step_map"])
        found = [self._traced(row, decoder) for row in islice(rows, count)]
        if not found:
            raise PlotError(
                f"none of the {self.num_rows} rows in {self.folder} has tokens: column error says "
                "why"
            )
        return found

    def histogram(self) -> Histogram:
        """Count the tokens of the steps of all rows that have tokens."""
        counts: Counter[int] = Counter()
        rows = 0
        for batch in self.data.to_batches(columns=["step_map"]):
            lists = batch.column(0)
            steps = np.asarray(pc.list_flatten(lists), dtype=np.int64)
            parents = np.asarray(pc.list_parent_indices(lists), dtype=np.int64)
            if len(steps):
                rows += len(np.unique(parents))
                keys = parents * (steps.max() + 1) + steps
                counts.update(np.unique(keys, return_counts=True)[1].tolist())
        return Histogram(dict(sorted(counts.items())), rows)

    def _traced(self, row: dict[str, Any], decoder: Any) -> TracedRow:
        name = f"row {row['row_id']}"
        if row["sample_index"]:
            name += f", sample {row['sample_index']}"
        if title := self._title(row, decoder):
            name += f": {title}"
        given = row["num_prompt_tokens"] % self.block_length if self.block_length else 0
        return TracedRow(name, token_texts(row, decoder), row["step_map"], given)

    def _title(self, row: dict[str, Any], decoder: Any) -> str:
        """What the row was asked, as well as the output says it; empty if it does not."""
        if prompt := prompt_text(row, decoder):
            return end(prompt, TITLE_LENGTH)
        values = [row[name] for name in self.title_columns if row[name] is not None]
        texts = (value if isinstance(value, str) else str(value) for value in values)
        return beginning(" | ".join(texts), TITLE_LENGTH)


def read_job(
    folder: Path, block_length: int | None = None, title_column: str | None = None
) -> StepMaps:
    """Open a job's output.

    Args:
        folder: the job's folder.
        block_length: positions of a diffusion block; None takes what config.yaml says.
        title_column: the column whose value is a row's title; None takes the end of the prompt, or
            if the output does not have it, the columns that the prompt was made of.

    Raises:
        PlotError: if the folder is not a job's, has no complete shard, or lacks a column.
    """
    config_file = folder / "config.yaml"
    files = sorted((folder / "data").glob("*.parquet"))
    if not config_file.is_file():
        raise PlotError(
            f"{folder} is not a job's folder (it has no config.yaml): give the job's output.dir"
        )
    if not files:
        raise PlotError(
            f"{folder} has no complete shard yet (data/*.parquet): run the job's command again, it "
            "goes on where it stopped"
        )
    try:
        data = ds.dataset([str(file) for file in files], format="parquet")
    except pa.ArrowInvalid as error:
        raise PlotError(f"cannot read {folder / 'data'}: {error}") from None
    if "step_map" not in data.schema.names:
        raise PlotError(
            f"{folder} has no column step_map: run the job with strategy=dllm or strategy=ar_spec "
            "and 'output.columns=[step_map]'"
        )
    if title_column is not None and title_column not in data.schema.names:
        raise PlotError(
            f"--title-column: the rows have no column {title_column!r}: choose among "
            f"{', '.join(data.schema.names)}"
        )
    config = _config(config_file)
    strategy = config["strategy"]
    used = used_columns(config.get("prompt") or {})
    titles = [name for name in used if name in data.schema.names]
    step_name = STEP_NAMES.get(strategy["_target_"].rpartition(".")[2], "step")
    return StepMaps(
        folder,
        data,
        step_name,
        block_length or strategy.get("block_length"),
        titles if title_column is None else [title_column],
        title_is_prompt=title_column is None,
    )


def _config(config_file: Path) -> dict[str, Any]:
    """The configuration of the job, by group; its strategy is known."""
    try:
        config = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        strategy = config["strategy"]
    except (yaml.YAMLError, KeyError, TypeError):
        strategy = None
    if not isinstance(strategy, dict) or not isinstance(strategy.get("_target_"), str):
        raise PlotError(f"{config_file} is not what a job wrote: it names no strategy")
    return dict(config)


def prompt_text(row: dict[str, Any], decoder: Any) -> str:
    """The text of the end of a row's prompt; empty if the row does not have it or nobody can decode
    it.

    Args:
        row: of the job's output.
        decoder: as of `token_texts`.
    """
    ids: list[int] = row.get(PROMPT) or []
    if decoder is not None:
        return str(decoder.decode(ids[-TITLE_LENGTH:], skip_special_tokens=True)) if ids else ""
    return bytes(i for i in ids if i < 256).decode(errors="replace") if _is_bytes(row) else ""


def token_texts(row: dict[str, Any], decoder: Any) -> list[str]:
    """Return the text of each token as it is drawn.

    A text is one line, with visible spaces; the token that ended the row is `TracedRow.END`.

    Args:
        row: of the job's output.
        decoder: a transformers tokenizer. With None, the texts are bytes if the ids are the bytes
            of the row's text, and empty strings otherwise.
    """
    ids: list[int] = row["token_ids"]
    if decoder is not None:
        texts = [decoder.decode([token]) for token in ids]
        if texts[-1] == row["stop"]:
            texts[-1] = TracedRow.END
        return [_visible(text) for text in texts]
    if not _is_bytes(row):
        return [""] * len(ids)
    content = row["text"].encode()
    texts = [_visible(chr(byte)) if byte < 128 else f"{byte:02x}" for byte in content]
    return texts + [TracedRow.END] * (len(ids) - len(content))


def _is_bytes(row: dict[str, Any]) -> bool:
    """Whether the tokens of a row are the bytes of its text."""
    content = (row["text"] or "").encode()
    return bool(content) and row["token_ids"][: len(content)] == list(content)


def _visible(text: str) -> str:
    for character, shown in ((" ", TracedRow.SPACE), ("\n", "↵"), ("\t", "→")):
        text = text.replace(character, shown)
    return "".join(c if c.isprintable() else "�" for c in text)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or of the hub.

    Raises:
        PlotError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PlotError(f"--tokenizer: cannot load {name}: {error}") from None
