"""Rows of data sets that are streamed, and of those on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pyarrow as pa
import pytest

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.dataset_files import LoadedDataset
from batchgen.inputs.dataset.row_source import RowSource, open_dataset
from batchgen.util.errors import ConfigError, JobError
from tests.support.jobs.row_files import BOTH, fields

pytestmark = pytest.mark.usefixtures("in_folder")


def stream_of(generate: Callable[[], Iterator[dict[str, Any]]], **keys: Any) -> RowSource:
    config = DatasetConfig(kind="hub", path="some/data", streaming=True, **keys)
    return RowSource(LoadedDataset(datasets.IterableDataset.from_generator(generate), "f"), config)


def test_a_stream_without_features_takes_those_of_its_first_rows() -> None:
    def generate() -> Iterator[dict[str, Any]]:
        yield from ({"i": i, "q": "x"} for i in range(1100))
        yield {"i": "no number", "q": "y"}
        yield {"q": "z"}

    data = stream_of(generate)
    assert data.schema == pa.schema({"i": pa.int64(), "q": pa.string()})
    rows = list(data.rows())
    assert len(rows) == 1102
    assert data.passthrough(rows[1099]) == {"i": 1099, "q": "x"}
    with pytest.raises(RequestError, match="column 'i' is not int64") as raised:
        data.passthrough(rows[1100])
    assert raised.value.type == "bad_row"
    assert data.passthrough(rows[1101]) == {"i": None, "q": "z"}


def test_a_stream_has_the_columns_of_all_its_first_rows() -> None:
    data = stream_of(lambda: iter([{"q": "a"}, {"q": "b", "note": "n"}]))
    assert data.columns == ("q", "note")
    assert data.passthrough(next(data.rows())) == {"q": "a", "note": None}


def test_first_rows_of_several_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot read its first rows: .*'x'.* int64"):
        stream_of(lambda: iter([{"q": 1}, {"q": "x"}]))


def test_a_stream_that_breaks_stops_the_job() -> None:
    calls = iter(range(100))

    def generate() -> Iterator[dict[str, Any]]:
        yield {"i": 1}
        if next(calls) > 0:
            raise ConnectionError("gone")

    rows = stream_of(generate).rows()
    with pytest.raises(JobError, match=r"some/data: cannot read row .*gone; run the same command"):
        list(rows)


class FakeBuilder:
    """What `load_dataset_builder` returns for a data set on the hub."""

    hash = "commit1"
    config = datasets.BuilderConfig(name="main")

    def __init__(self) -> None:
        infos = {n: datasets.SplitInfo(n, num_examples=1) for n in ("train", "test")}
        self.info = datasets.DatasetInfo(splits=datasets.SplitDict(infos))
        self.downloaded = False

    def download_and_prepare(self) -> None:
        self.downloaded = True

    def as_dataset(self) -> datasets.DatasetDict:
        parts = {name: datasets.Dataset.from_dict({"q": [name]}) for name in ("train", "test")}
        return datasets.DatasetDict(parts)

    def as_streaming_dataset(self) -> datasets.IterableDatasetDict:
        parts = {name: data.to_iterable_dataset() for name, data in self.as_dataset().items()}
        return datasets.IterableDatasetDict(parts)


@BOTH
def test_hub(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    builder = FakeBuilder()
    asked = []

    def load(path: str, name: str | None, revision: str | None) -> FakeBuilder:
        asked.append((path, name, revision))
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load)

    def hub(**keys: Any) -> RowSource:
        return open_dataset(
            DatasetConfig(kind="hub", path="o/d", name="main", streaming=streaming, **keys)
        )

    with pytest.raises(
        ConfigError, match=r"^dataset.split: o/d has several splits, .* train, test$"
    ):
        hub()
    assert not builder.downloaded
    data = hub(split="test", revision="v1")
    assert asked[-1] == ("o/d", "main", "v1")
    assert fields(data) == [{"q": "test"}]
    assert data.fingerprint == hub(split="test").fingerprint != hub(split="train").fingerprint
    builder.hash = "commit2"
    assert data.fingerprint != hub(split="test").fingerprint


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **keys: Any) -> None:
        raise ConnectionError("Couldn't reach 'o/d' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    with pytest.raises(
        ConfigError, match=r"^dataset.path: cannot load o/d: ConnectionError: Couldn'"
    ):
        open_dataset(DatasetConfig(kind="hub", path="o/d"))
