"""A complete job whose rows another job reads."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.costs.chain_costs import all_steps
from batchgen.dataset.source import ReadJob
from batchgen.folder.read_job import JobFolderReader
from batchgen.grades.finished_shards import FinishedShards
from batchgen.shards.row_order import KEYS
from batchgen.util.errors import ConfigError
from batchgen.util.fingerprint import fingerprint_text

_MOST_DEPTH = 1000


class OtherJob(FinishedShards):
    """A complete job. Its answers are counted from 0 over all shards.

    Attributes:
        read: what the manifest of a reader keeps of it.
        text_column: the column of generated text.
    """

    def __init__(self, reader: JobFolderReader, name: str) -> None:
        """Look at the ends of all its files.

        Raises:
            ConfigError: its manifest.json is not one of batchgen.
            JobError: a file is damaged, or not there.
        """
        super().__init__(reader.storage, reader.storage.shown)
        self.read, self.text_column = self._facts(reader, name)
        self.check_job(self.text_column, reader.metrics.get("rows"))

    def _facts(self, reader: JobFolderReader, name: str) -> tuple[ReadJob, str]:
        """What the manifest says that readers need."""
        try:
            manifest = reader.manifest
            identity, prints = dict(manifest["identity"]), dict(manifest["fingerprints"])
            prints.pop("dataset", None)  # rows may be added
            digest = fingerprint_text(json.dumps([identity, prints], sort_keys=True))
            depth = dict(identity.get("dataset") or {}).get("depth", 0)
            text = identity["output"]["text_column"]
            if type(text) is str and type(depth) is int and 0 <= depth < _MOST_DEPTH:
                return ReadJob(name, digest, depth + 1, all_steps(reader.metrics, name)), text
            why = "text_column or depth"
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"dataset.path: {self.given}/manifest.json is not of batchgen ({why})")

    def answers(
        self,
        ordinals: npt.NDArray[np.int64] | range,
        columns: Sequence[str],
        grades: Sequence[str] = (),
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Some columns of some answers, which ascend, and of their grades; the KEYS are read, too.
        See `tables`."""
        wanted = np.asarray(ordinals, np.int64)
        firsts = [shard.first for shard in self.shards]
        at = 0
        while at < len(wanted):
            number = bisect_right(firsts, int(wanted[at])) - 1
            first = firsts[number]
            stop = int(np.searchsorted(wanted, first + self.shards[number].ends[-1]))
            yield from self.tables(number, [*columns, *KEYS], grades, wanted[at:stop] - first)
            at = stop
