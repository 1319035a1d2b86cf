"""What rows say when each has an engine to itself, to which any other way to run them is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.sampling.sampling_params import RequestParams
from tests.support.engine.engine_rows import Request

Run = Callable[[LLMEngine, Sequence[Request]], list[RequestOutput]]


class Alone:
    """What rows say when each has an engine's caches for itself.

    Args:
        engine: runs one row at a time, and keeps nothing of the rows before.
        run: gives the outputs of rows in their order.
    """

    def __init__(self, engine: LLMEngine, run: Run) -> None:
        self._engine, self._run = engine, run
        self._seen: dict[tuple[tuple[int, ...], RequestParams], RequestOutput] = {}

    def __call__(self, row: Request) -> RequestOutput:
        key = (tuple(row[0]), row[1])
        if key not in self._seen:
            (self._seen[key],) = self._run(self._engine, [row])
        return self._seen[key]

    def check(self, rows: Sequence[Request], found: Sequence[RequestOutput]) -> None:
        """Tokens, log-probabilities and experts are those that the rows have alone, to the bit."""
        for i, (row, output) in enumerate(zip(rows, found, strict=True)):
            expected = self(row)
            assert output.token_ids == expected.token_ids, f"row {i}"
            assert output.columns.keys() >= expected.columns.keys() >= {"logprobs", *row[1].columns}
            for name in expected.columns:
                np.testing.assert_array_equal(output.columns[name], expected.columns[name])
