"""Renders one row of a job as HTML: its prompt, answer, marks, counts and tokens. Reports and
`batchgen view` show rows in this way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from markupsafe import Markup

from batchgen.engine.interface.hidden_columns import CLASS_SCORES
from batchgen.pages.math.rich_text import rich_text
from batchgen.pages.rows.prompt_text import Part, PromptText
from batchgen.pages.rows.row_facts import RowColumns, RowFacts
from batchgen.pages.rows.row_pictures import ShownImage, shown_images
from batchgen.pages.tokens.step_name import step_name
from batchgen.pages.tokens.token_boxes import Decode, RowTokens, TokenView
from batchgen.storage.metrics.tally import OUTCOMES
from batchgen.util.shorten import beginning
from batchgen.util.text.row_json import plain_text
from batchgen.util.text.safe_text import Span, shortened, templates

CSS = (Path(__file__).parent / "base.css", Path(__file__).parent / "row.css")
"""The style sheets that a page with rows must embed or serve."""
_KEYS = ("row_id", "row_index", "sample_index")
_MOST_FACT = 2_000
"""The maximum number of characters of a value besides the prompt and the answer."""
_TEMPLATES = partial(templates, "batchgen.pages.rows")


@dataclass(frozen=True, slots=True)
class PageLimits:
    """How much of a row is shown.

    Attributes:
        text: the number of characters of the prompt and of the answer; None shows all.
        tokens: the number of tokens in the token view; None shows all, 0 leaves out the view.
    """

    text: int | None = None
    tokens: int | None = None

    @property
    def fact(self) -> int | None:
        """The number of characters of a value besides the prompt and the answer."""
        return None if self.text is None else min(self.text, _MOST_FACT)


WHOLE = PageLimits()


class RowPage:
    """Makes the HTML of rows of one job.

    Args:
        config: the job's configuration, as in its config.yaml; may be empty.
        schema: the columns of the job's rows.
        decode: turns token ids into text; with None the ids are shown.
        thumbnails: small JPEG files as base64, by the digests of the images that they show.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        schema: pa.Schema,
        decode: Decode | None = None,
        thumbnails: Mapping[str, str] | None = None,
    ) -> None:
        self._thumbnails = thumbnails or {}
        self.columns = RowColumns(config, schema)
        self._tokens = TokenView(schema, decode, step_name(config))
        self._prompt = PromptText(config.get("prompt") or {}, schema, decode)

    def html(
        self, facts: RowFacts, *, key: str, limits: PageLimits = WHOLE, with_prompt: bool = True
    ) -> Markup:
        """Return a row without its heading. `key` (letters, digits, `-`) is a part of all its HTML
        ids, which it makes unique in the page."""
        return self.htmls(facts, key=key, limits=[limits], with_prompt=with_prompt)[0]

    def htmls(
        self,
        facts: RowFacts,
        *,
        key: str,
        limits: Sequence[PageLimits],
        enough: int = 0,
        with_prompt: bool = True,
    ) -> list[Markup]:
        """Return a row within each of several limits, each narrower than the one before. The first
        HTML that has fewer than `enough` characters is the last one returned."""
        facts = RowFacts(self.columns.read(facts.row), facts.grades)
        text: str | None = facts.row[self.columns.text]
        prompt = self._prompt.parts(facts.row) if with_prompt else []
        tokens, htmls = self.tokens(facts, key), list[Markup]()
        for limit in limits:
            values = {
                **_answer(facts, text, limit, self.columns.reasoning),
                **self._beside(facts, limit),
                "prompt": [(name, _shown(part, limit)) for name, part in prompt],
                "images": self._images(facts, limit),
                "key": key,
                "tokens": tokens.html(limit.tokens),
                "num_tokens": facts.tokens,
            }
            htmls.append(Markup(_TEMPLATES().get_template("row.html.jinja").render(values)))
            if len(htmls[-1]) < enough:
                break
        return htmls

    def prompt(self, facts: RowFacts) -> list[Part]:
        """Return the prompt of the row, in parts; see `PromptText.parts`."""
        return self._prompt.parts(self.columns.read(facts.row))

    def prompt_html(self, facts: RowFacts, *, key: str) -> Markup:
        """Return the prompt of a row alone; `key` as in `html`."""
        prompt = [(name, _shown(part, WHOLE)) for name, part in self.prompt(facts)]
        template = _TEMPLATES().get_template("prompt.html.jinja")
        return Markup(template.render(prompt=prompt, key=key))

    def tokens(self, facts: RowFacts, key: str) -> RowTokens:
        """Return the token view of a row; it is empty if the column `token_ids` was not read."""
        text = facts.row[self.columns.text]
        return self._tokens.of(facts.row, key, text, next(iter(facts.answers(text)), None))

    def _images(self, facts: RowFacts, limits: PageLimits) -> list[ShownImage]:
        """Return the images of the prompt, without pictures if the limits leave out the token view,
        which is the case when room is scarce."""
        value = None if self.columns.images is None else facts.row.get(self.columns.images)
        return shown_images(value, {} if limits.tokens == 0 else self._thumbnails)

    def _beside(self, facts: RowFacts, limits: PageLimits) -> dict[str, Any]:
        """Return the values besides prompt and answer by their place in the template: lists of
        names and texts, and for errors their type and message."""
        row, short = facts.row, partial(shortened, limit=limits.fact)
        columns = {
            "grades": _grades(facts),
            "facts": self._facts(facts),
            "inputs": [
                (name, plain_text(row[name]))
                for name in self.columns.inputs
                if row.get(name) is not None
            ],
        }
        errors = {"error": row["error"], "grade_error": facts.grade("grade_error")}
        return {
            **{kind: [(n, short(value)) for n, value in pairs] for kind, pairs in columns.items()},
            **{
                kind: None if error is None else {n: short(text) for n, text in error.items()}
                for kind, error in errors.items()
            },
        }

    def _facts(self, facts: RowFacts) -> list[tuple[str, str]]:
        """Return the names and values of facts about the row: how it ended, its constraint, the
        scores of classes, and counts."""
        row, pairs = facts.row, [("finish_reason", facts.finish_reason)]
        if row["stop"] is not None:
            pairs.append(("stop", plain_text(row["stop"])))
        if (outcome := facts.constraint) is not None:
            pairs.append(("constraint", f"{outcome}: {OUTCOMES[outcome]}"))
        if row.get("parsed") is not None:
            pairs.append(("parsed", plain_text(row["parsed"])))
        if self.columns.labels and (scores := row.get(CLASS_SCORES)) is not None:
            best_first = sorted(zip(scores, self.columns.labels, strict=False), reverse=True)
            text = ", ".join(f"{label} {score:.3f}" for score, label in best_first)
            pairs.append((CLASS_SCORES, beginning(text, _MOST_FACT)))
        counts = ((name, row.get(name)) for name in self.columns.counts)
        return pairs + [
            (name, f"{value:,}" if isinstance(value, int) else plain_text(value))
            for name, value in counts
            if value is not None
        ]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A text as it is written and, if it has Markdown or formulas, with these rendered."""

    plain: Markup
    rich: Markup | None


def _shown(text: str, limits: PageLimits, spans: Sequence[Span] = ()) -> _Shown:
    """Render a text. `spans` are parts of it to highlight."""
    return _Shown(shortened(text, limits.text, spans), rich_text(text, limits.text, spans))


def _answer(
    facts: RowFacts, text: str | None, limits: PageLimits, column: str | None
) -> dict[str, Any]:
    """Return reasoning and answer, as the template shows them.

    Args:
        text: the generated text; None for a row without one.
        column: the column of reasoning. In a job without it, reasoning is the start of the text.
    """
    answer_start = facts.reasoning_end(text) if column is None else 0
    reasoning = (text or "")[:answer_start] if column is None else facts.row[column] or ""
    spans = [s for s in facts.answers(text) if s.start >= answer_start]
    moved = [Span(s.start - answer_start, s.end - answer_start, s.name) for s in spans]
    return {
        "reasoning": _shown(reasoning, limits) if reasoning else None,
        "reasoning_length": len(reasoning),
        "answer": None if text is None else _shown(text[answer_start:], limits, moved),
        "has_marks": bool(moved),
    }


def _grades(facts: RowFacts) -> list[tuple[str, str]]:
    """Return the names and values of grades, without positions in the text and keys of rows."""
    suffixes = ("_start", "_end", "grade_error")
    return [
        (name, "–" if value is None else plain_text(value))
        for name, value in (facts.grades or {}).items()
        if name not in _KEYS and not name.endswith(suffixes)
    ]
