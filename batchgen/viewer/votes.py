"""Which answers the samples of a question give, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.report.row_page import Verdict
from batchgen.viewer.job_view import Sample


@dataclass(frozen=True)
class Vote:
    """An answer to a question in its normal form, in which votes are counted.

    Attributes:
        key: the normal form; None for samples without an answer.
        answer: as the first sample wrote it.
        samples: the numbers of the samples that give it.
        verdict: how it is marked.
    """

    key: str | None
    answer: str | None
    samples: list[int]
    verdict: Verdict

    @property
    def shown(self) -> str:
        """The answer for people. A normal form can be opaque, and stands only for answers that the
        grades do not have."""
        return next((text for text in (self.answer, self.key) if text is not None), "no answer")

    @property
    def count(self) -> int:
        return len(self.samples)


def votes(samples: Sequence[Sample]) -> list[Vote]:
    """The answers to a question, the most frequent first; no answer comes last.

    Samples whose marks differ although their answers do not are told apart. Those that failed have
    no answer. Without any graded sample there are no votes.

    Args:
        samples: of one row.
    """
    if not any(sample.grades and "answer_key" in sample.grades for sample in samples):
        return []
    found: dict[tuple[str | None, str], Vote] = {}
    for sample in samples:
        grades = sample.grades or {}
        key, answer = (_text(grades.get(name)) for name in ("answer_key", "answer"))
        name = key, sample.verdict.name
        vote = found.setdefault(name, Vote(key, answer, [], sample.verdict))
        vote.samples.append(sample.number)
    return sorted(found.values(), key=lambda vote: (vote.key is None, -vote.count))


def _text(value: object) -> str | None:
    return None if value is None else str(value)
