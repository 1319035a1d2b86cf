"""Ids of rows are unique, however many there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.inputs.dataset.row_ids import IdSet, check_unique
from batchgen.util.errors import ConfigError


def test_many_duplicates_are_named_in_short() -> None:
    ids = [str(i % 5) for i in range(50)]
    with pytest.raises(ConfigError) as raised:
        check_unique(lambda: ids, "i")
    assert str(raised.value) == (
        "dataset.id_column: ids in 'i' must be unique, but '0' in rows 0, 5, 10 and 7 more; '1' in "
        "rows 1, 6, 11 and 7 more; '2' in rows 2, 7, 12 and 7 more; and 2 more ids (rows count "
        "from 0): choose another column, or null to number the rows"
    )


@given(st.lists(st.text(max_size=3)))
def test_id_set_is_a_set(ids: list[str]) -> None:
    ours, theirs = IdSet(), set[str]()
    for row_id in ids:
        assert ours.add(row_id) == (row_id not in theirs)
        theirs.add(row_id)
    assert len(ours) == len(theirs)


def test_id_set_is_small() -> None:
    ids = IdSet()
    for i in range(100_000):
        assert ids.add(str(i))
    assert not any(ids.add(str(i)) for i in range(0, 100_000, 997))
    assert ids.num_bytes <= 24 * 100_000
