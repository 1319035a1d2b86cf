"""The configuration group `sampling`: how tokens are chosen, and how many samples a row has. The
files conf/sampling/*.yaml explain the keys."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.config.groups.convert_value import check
from batchgen.engine.sampling.sampling_params import SharedSampling
from batchgen.util.errors import ConfigError

_MOST_SAMPLES = 1_000_000
_MOST_BY_WIDTH = 1_000
"""The most samples with `sampling.until.width`: the time for unbiased scores grows with their
square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilConfig:
    """The rule by which a row has enough samples.

    It has enough when `valid` (1) of them fulfil the expression `where`, or, with `width`, when the
    95% interval of the share that fulfils it is at most so wide; or when it has `most`.
    """

    where: str
    valid: int | None = None
    width: float | None = None
    most: int

    def __post_init__(self) -> None:
        check(bool(self.where.strip()), "sampling.until.where", "an expression", self.where)
        if self.width is not None:
            self._check_width(self.width)
            return
        if self.valid is None:
            object.__setattr__(self, "valid", 1)
        assert self.valid is not None
        check(self.valid >= 1, "sampling.until.valid", "at least 1", self.valid)
        allowed = f"from sampling.until.valid={self.valid} to {_MOST_SAMPLES:,}"
        check(self.valid <= self.most <= _MOST_SAMPLES, "sampling.until.most", allowed, self.most)

    def _check_width(self, width: float) -> None:
        """Check the keys of a rule by the width of the interval."""
        if self.valid is not None:
            raise ConfigError(
                f"sampling.until has valid={self.valid} and width={width:g}: a row ends at a "
                "number of valid samples or at a width of their interval, not at both: leave one "
                "of the two out"
            )
        allowed = "above 0 and at most 0.65, the width that two samples reach"
        check(0 < width <= 0.65, "sampling.until.width", allowed, width)
        limit = _MOST_BY_WIDTH
        check(1 <= self.most <= limit, "sampling.until.most", f"from 1 to {limit:,}", self.most)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SharedSampling):
    """How tokens are chosen in every row. Each sample of each row gets a seed derived from the
    job's; `SamplingParams` checks the ranges."""

    temperature: float = 0.0
    n: int = 1
    until: UntilConfig | None = None
    column: str | None = None
    stream: str | None = None

    def __post_init__(self) -> None:
        check(self.stream != "", "sampling.stream", "null or a name", self.stream)
        check(self.n >= 1, "sampling.n", "at least 1", self.n)
        check(self.n <= _MOST_SAMPLES, "sampling.n", f"at most {_MOST_SAMPLES:,}", self.n)
        if self.until is None:
            return
        if self.n != 1:
            raise ConfigError(
                f"sampling.n={self.n} says how many samples each row gets, and sampling.until "
                "says when it has enough: leave n out. A row starts with the fewest samples that "
                "can be enough"
            )
        if self.temperature == 0 and self.column is None:
            raise ConfigError(
                "sampling.until at sampling.temperature=0 draws copies of one answer: set a "
                "temperature above 0"
            )

    @property
    def most_samples(self) -> int:
        """The number of samples of a row; with `until` the most."""
        return self.n if self.until is None else self.until.most


def copies_warning(n: int, temperature: float) -> str | None:
    """The warning for a user whose rows have `n` answers without randomness; None for other
    jobs."""
    if n < 2 or temperature > 0:
        return None
    return (
        f"sampling.n={n} at sampling.temperature=0: the {n} answers to a row are copies of one, so "
        "pass@k, maj@k and the interval for the same questions say nothing: set a temperature "
        "above 0 to draw answers, or sampling.n=1"
    )
