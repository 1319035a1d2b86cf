"""Prepares the page of one row in `batchgen view`, for one job or two jobs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from batchgen.pages.rows.row_facts import RowFacts, same_sample
from batchgen.pages.rows.row_page import PageLimits, RowPage
from batchgen.pages.viewer.html import whole_number
from batchgen.pages.viewer.job_view import JobView, Vote, votes
from batchgen.util.text.word_difference import WordDifference, word_difference

MOST_TOKENS = 4000
"""A row's token view has at most this many tokens, unless all are asked for: a browser takes
seconds for many more."""


@dataclass(frozen=True)
class TokenPart:
    """The tokens of a row."""

    html: Markup
    is_cut: bool  # the middle is left out
    has_texts: bool  # the tokenizer is on this machine


@dataclass(frozen=True)
class JobCell:
    """A row in one job."""

    job: JobView
    key: str  # `a` or `b`
    samples: list[RowFacts]  # none if the job does not have the row
    chosen: RowFacts | None
    html: Markup
    tokens: TokenPart | None

    @property
    def votes(self) -> list[Vote]:
        return votes(self.samples)


@dataclass(frozen=True)
class SideBySide:
    """A row in one job or in two."""

    columns: list[JobCell]
    prompt: Markup  # what both were asked, if that is the same; else the columns have it
    difference: WordDifference | None  # of the texts, where both have one


def row_columns(
    jobs: Sequence[JobView], samples: Sequence[list[RowFacts]], query: Mapping[str, str]
) -> SideBySide:
    """What the page of a row shows.

    Args:
        samples: of the row in each job.
        query: with the numbers of the samples that are shown, `sample_a` and `sample_b`, and
            whether `tokens` are.

    Raises:
        ConfigError: a number of a sample is none.
    """
    numbers = [whole_number(query, f"sample_{key}", 0) for key in "ab"]
    chosen = [same_sample(some, number) for some, number in zip(samples, numbers, strict=False)]
    tokens = query.get("tokens", "")
    listed = [
        (None if one is None else job.page(tokens=bool(tokens)), one)
        for job, one in zip(jobs, chosen, strict=True)
    ]
    prompts = [page.prompt(one) if page and one else [] for page, one in listed]
    is_common = len(prompts) == 2 and bool(prompts[0]) and prompts[0] == prompts[1]
    columns = [
        _column(job, key, some, page, one, tokens, with_prompt=not is_common)
        for job, key, some, (page, one) in zip(jobs, "ab", samples, listed, strict=False)
    ]
    (page, first), prompt = listed[0], Markup("")
    if is_common and page is not None and first is not None:
        prompt = page.prompt_html(first, key="ab")
    return SideBySide(columns, prompt, _difference(jobs, chosen))


def _column(
    job: JobView,
    key: str,
    samples: list[RowFacts],
    page: RowPage | None,
    chosen: RowFacts | None,
    tokens: str,
    *,
    with_prompt: bool,
) -> JobCell:
    if page is None or chosen is None:
        return JobCell(job, key, samples, None, Markup(""), None)
    html = page.html(chosen, key=key, limits=PageLimits(tokens=0), with_prompt=with_prompt)
    part = None
    if tokens:
        view, limit = page.tokens(chosen, key), None if tokens == "all" else MOST_TOKENS
        is_cut = limit is not None and len(view.ids) > limit
        part = TokenPart(view.html(limit), is_cut, view.view.has_texts)
    return JobCell(job, key, samples, chosen, html, part)


def _difference(
    jobs: Sequence[JobView], chosen: Sequence[RowFacts | None]
) -> WordDifference | None:
    pairs = zip(jobs, chosen, strict=True)
    texts = [sample.row[job.rows.text_column] for job, sample in pairs if sample is not None]
    return None if len(texts) != 2 or None in texts else word_difference(*texts)
