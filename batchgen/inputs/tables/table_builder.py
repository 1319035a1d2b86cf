"""Passes tables that batchgen has read to `datasets`, which caches or streams them.
`local_files.py` uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import datasets
import pyarrow as pa

# datasets patches names such as `open` and `Path` in the module of a builder, so none is used here.


class TableBuilder(datasets.ArrowBasedBuilder):  # type: ignore[misc]
    """A split of rows, which `read` yields as Arrow tables. Unless they are streamed, datasets
    caches them in the folder `cache`, which must be used for exactly these rows."""

    def __init__(self, read: Callable[[], Iterator[pa.Table]], split: str, cache: str) -> None:
        self._read_tables, self._split = read, split
        super().__init__(cache_dir=cache, dataset_name="rows")

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(
        self, dl_manager: datasets.DownloadManager
    ) -> Sequence[datasets.SplitGenerator]:
        first = next(self._read_tables())
        self.info.features = datasets.Features.from_arrow_schema(first.schema)
        return [datasets.SplitGenerator(name=self._split, gen_kwargs={})]

    def _generate_tables(self) -> Iterator[tuple[int, pa.Table]]:
        yield from enumerate(self._read_tables())
