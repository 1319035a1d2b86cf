"""Rows whose engine is stopped again and again, each time with records of what they have begun."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from batchgen.engine.interface.outputs import Begun, RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from tests.support.engine.engine_rows import Request, strategy_columns


def joined(parts: Sequence[Begun]) -> Begun | None:
    """What one record would say instead of several, of which each goes on where the last ended."""
    if not parts:
        return None
    names = parts[0].columns
    return Begun(
        [token_id for part in parts for token_id in part.token_ids],
        {name: np.concatenate([part.columns[name] for part in parts]) for name in names},
        parts[-1].counts,
    )


class Records:
    """What was recorded of each row, in parts."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Begun]] = {}

    def of(self, name: str) -> Begun | None:
        return joined(self._parts.get(name, ()))

    def take(self, engine: LLMEngine, rng: random.Random) -> None:
        """Record most of the rows that an engine has begun, from where their records end."""
        for name, length in engine.begun_lengths().items():
            start = sum(len(part.token_ids) for part in self._parts.get(name, ()))
            assert start <= length, "a row has lost tokens that were recorded"
            if length > start and rng.random() < 0.8:
                part = engine.begun(name, start)
                if part is not None:
                    assert len(part.token_ids) == length - start
                    self._parts.setdefault(name, []).append(part)


def run_in_sessions(
    make_engine: Callable[[], LLMEngine],
    requests: Sequence[Request],
    rng: random.Random,
    most_steps: int = 12,
) -> tuple[list[RequestOutput], int]:
    """All outputs in order, by engines that are stopped after a few steps, and how many tokens were
    computed more than once. In every session at least as many steps are made as in the one before,
    so that all ends."""
    outputs: dict[str, RequestOutput] = {}
    records, computed, least = Records(), 0, 1
    while len(outputs) < len(requests):
        engine = make_engine()
        columns = strategy_columns(engine)
        for i, (prompt, params) in enumerate(requests):
            if str(i) not in outputs:
                asked = replace(params, columns=tuple({*params.columns, *columns}))
                begun = records.of(str(i))
                goes_on = engine.add_request(str(i), prompt, asked, begun=begun)
                assert goes_on == (begun is not None)
        for _ in range(rng.randint(least, max(most_steps, least))):
            for output in engine.step():
                assert output.error is None
                outputs[output.request_id] = output
            if rng.random() < 0.3:
                records.take(engine, rng)
            engine.scheduler.block_manager.check_integrity(engine.scheduler.running.rows)
            if not engine.has_unfinished():
                break
        records.take(engine, rng)
        computed += engine.generated_tokens
        engine.close()
        least += 1
    total = sum(len(output.token_ids) for output in outputs.values())
    return [outputs[str(i)] for i in range(len(requests))], computed - total


def assert_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Equal to the bit, with what stands beside the tokens."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.finish_reason, one.stop) == (
            other.text,
            other.finish_reason,
            other.stop,
        )
        assert one.constraint_satisfied == other.constraint_satisfied
        assert one.columns.keys() == other.columns.keys()
        for name, values in other.columns.items():
            np.testing.assert_array_equal(one.columns[name], values, err_msg=name, strict=True)
