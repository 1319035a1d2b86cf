"""The summary at the end of a job."""

import pytest

from batchgen.progress import _duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.4, "59.4 s"),
        (119.7, "0:02:00"),
        (3599.6, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_durations_carry_over(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
