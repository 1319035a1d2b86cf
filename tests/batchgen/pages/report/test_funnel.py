"""The table of a pipeline: what each step read, made more of, dropped and kept."""

from batchgen.pages.report.funnel import HEADER, StepCounts, funnel_table

_STEP = StepCounts(
    "ask",
    "ask.0",
    "complete",
    [("rows", 8), ("Explode", 15), ("Dedupe", 14), ("Chunk", 20), ("Filter", 17)],
    answers=17,
    errors=1,
)


def test_made_and_dropped_rows_are_counted_apart() -> None:
    cells = dict(zip(HEADER, _STEP.cells(), strict=True))
    assert cells == {
        **{"step": "ask", "read": "8", "made": "13", "dropped": "4", "rows": "17"},
        **{"answers": "17", "errors": "1", "kept": "16", "state": "complete"},
    }
    text = funnel_table([_STEP])
    assert "ask: made 7 by Explode, 6 by Chunk\nask: dropped 1 by Dedupe, 3 by Filter" in text
    assert "-" not in text


def test_a_step_that_has_not_begun() -> None:
    assert StepCounts("ask", "ask.0").cells() == ("ask", *["–"] * 7, "not begun")
