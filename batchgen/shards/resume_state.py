"""What was in a job's folder when the first of the workers came that run now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from batchgen.shards.shard_files import Extent


@dataclass(frozen=True)
class ResumeState:
    """What the session's first worker found: the extents of published shards and the number of
    finished output rows. The other workers read it instead of all shards and journals."""

    extents: Mapping[int, Extent]
    rows: int

    def encoded(self) -> bytes:
        extents = [[n, extent.rows, extent.samples] for n, extent in sorted(self.extents.items())]
        return json.dumps({"rows": self.rows, "extents": extents}).encode()

    @staticmethod
    def decoded(content: bytes) -> ResumeState:
        found = json.loads(content)
        extents = {n: Extent(rows, samples) for n, rows, samples in found["extents"]}
        return ResumeState(extents, found["rows"])
