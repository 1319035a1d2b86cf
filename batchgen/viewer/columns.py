"""What the page of a row shows of each job, and what of both together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from batchgen.texts.word_difference import WordDifference, word_difference
from batchgen.viewer.html import whole_number
from batchgen.viewer.job_view import MOST_TOKENS, JobView, Sample, same_sample
from batchgen.viewer.votes import Vote, votes


@dataclass(frozen=True)
class TokenPart:
    """The tokens of a row.

    Attributes:
        html: all of them, or the first and the last ones.
        is_cut: whether some are left out.
        has_texts: whether the tokenizer is on this machine.
    """

    html: Markup
    is_cut: bool
    has_texts: bool


@dataclass(frozen=True)
class Column:
    """A row in one job.

    Attributes:
        key: `a` or `b`.
        samples: of the row; empty if the job does not have it.
        chosen: the one that is shown.
        html: what it says.
    """

    job: JobView
    key: str
    samples: list[Sample]
    chosen: Sample | None
    html: Markup
    tokens: TokenPart | None

    @property
    def votes(self) -> list[Vote]:
        return votes(self.samples)


@dataclass(frozen=True)
class RowColumns:
    """A row in one job or in two.

    Attributes:
        prompt: what both were asked, if that is the same; empty else, and then the columns have it.
        difference: of the texts of both; None where one has no text.
    """

    columns: list[Column]
    prompt: Markup
    difference: WordDifference | None


def row_columns(
    jobs: Sequence[JobView], samples: Sequence[list[Sample]], query: Mapping[str, str]
) -> RowColumns:
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
    is_common = _is_asked_alike(jobs, chosen, tokens=bool(tokens))
    columns = [
        _column(job, key, some, one, tokens, with_prompt=not is_common)
        for job, key, some, one in zip(jobs, "ab", samples, chosen, strict=False)
    ]
    prompt, first = Markup(""), chosen[0]
    if is_common and first is not None:
        prompt = jobs[0].prompt_html(first, "ab", tokens=bool(tokens))
    return RowColumns(columns, prompt, _difference(jobs, chosen))


def _column(
    job: JobView,
    key: str,
    samples: list[Sample],
    chosen: Sample | None,
    tokens: str,
    *,
    with_prompt: bool,
) -> Column:
    if chosen is None:
        return Column(job, key, samples, None, Markup(""), None)
    part = None
    if tokens:
        most = None if tokens == "all" else MOST_TOKENS
        is_cut = most is not None and len(chosen.row["token_ids"] or []) > most
        part = TokenPart(job.tokens_html(chosen, key, most), is_cut, job.decode() is not None)
    html = job.html(chosen, key, tokens=bool(tokens), with_prompt=with_prompt)
    return Column(job, key, samples, chosen, html, part)


def _is_asked_alike(
    jobs: Sequence[JobView], chosen: Sequence[Sample | None], *, tokens: bool
) -> bool:
    """Whether two jobs asked the same in the same words."""
    prompts = [
        [] if sample is None else job.prompt(sample, tokens=tokens)
        for job, sample in zip(jobs, chosen, strict=True)
    ]
    return len(prompts) == 2 and bool(prompts[0]) and prompts[0] == prompts[1]


def _difference(jobs: Sequence[JobView], chosen: Sequence[Sample | None]) -> WordDifference | None:
    texts = [
        sample.row[job.rows.text_column]
        for job, sample in zip(jobs, chosen, strict=True)
        if sample is not None
    ]
    if len(texts) != 2 or None in texts:
        return None
    return word_difference(*texts)
