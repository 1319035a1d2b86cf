"""Prepares the page of one input row in `batchgen view`, for one job or for two side by side.

A row may have several samples (answers) in each job, of which the page shows one. The key `a`
stands for the first job and `b` for the second.
"""

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
"""The maximum number of tokens in a row's token view, unless the user asks for all of them: a
browser takes seconds for many more."""


@dataclass(frozen=True)
class TokenPart:
    """The token view of a sample.

    Attributes:
        is_cut: whether tokens in the middle are left out.
        has_texts: whether texts of tokens are shown. Without the model's tokenizer on this machine,
            ids are shown.
    """

    html: Markup
    is_cut: bool
    has_texts: bool


@dataclass(frozen=True)
class JobCell:
    """A row in one job.

    Attributes:
        key: `a` or `b`.
        samples: all samples of the row; empty if the job does not have the row.
        chosen: the sample that is shown; None if there is none.
        html: this sample.
        tokens: its token view; None if the user did not ask for it.
    """

    job: JobView
    key: str
    samples: list[RowFacts]
    chosen: RowFacts | None
    html: Markup
    tokens: TokenPart | None

    @property
    def votes(self) -> list[Vote]:
        return votes(self.samples)


@dataclass(frozen=True)
class SideBySide:
    """A row in one job or in two.

    Attributes:
        columns: the row in each job.
        prompt: the prompt, if it is the same in two jobs. Otherwise it is empty, and each column
            has its own prompt.
        difference: how the texts of two jobs differ; None if not both have a text.
    """

    columns: list[JobCell]
    prompt: Markup
    difference: WordDifference | None


def row_columns(
    jobs: Sequence[JobView], samples: Sequence[list[RowFacts]], query: Mapping[str, str]
) -> SideBySide:
    """Return what the page of a row shows.

    Args:
        jobs: one job or two.
        samples: the samples of the row in each job.
        query: the query of the URL. `sample_a` and `sample_b` are the numbers of the samples to
            show, 0 by default. `tokens` asks for the token view if it is not empty, and for a view
            without limit if it is `all`.

    Raises:
        ConfigError: the number of a sample is not a number.
    """
    numbers = [whole_number(query, f"sample_{key}", default=0) for key in "ab"]
    chosen = [same_sample(row, number) for row, number in zip(samples, numbers, strict=False)]
    tokens = query.get("tokens", "")
    pages = [
        None if sample is None else job.page(tokens=bool(tokens))
        for job, sample in zip(jobs, chosen, strict=True)
    ]
    pairs = list(zip(pages, chosen, strict=True))
    prompts = [page.prompt(sample) if page and sample else [] for page, sample in pairs]
    is_common = len(prompts) == 2 and bool(prompts[0]) and prompts[0] == prompts[1]
    columns = [
        _column(job, key, row, page, sample, tokens, with_prompt=not is_common)
        for job, key, row, (page, sample) in zip(jobs, "ab", samples, pairs, strict=False)
    ]
    (page, sample), prompt = pairs[0], Markup("")
    if is_common and page is not None and sample is not None:
        prompt = page.prompt_html(sample, key="ab")
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
    """Return a row in one job; `page` renders `chosen`, and `tokens` is as in the query."""
    if page is None or chosen is None:
        return JobCell(job, key, samples, chosen=None, html=Markup(""), tokens=None)
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
    """Return how the texts of the two samples differ; None if there are not two texts."""
    pairs = zip(jobs, chosen, strict=True)
    texts = [sample.row[job.rows.text_column] for job, sample in pairs if sample is not None]
    return None if len(texts) != 2 or None in texts else word_difference(*texts)
