"""Plans that do not measure the CPU for long, as nothing is asserted of its speed."""

import pytest


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.jobs.planning.planner.MEASURE_S", 0.005)
