"""Jobs from Python: what the command `batchgen` runs, with the same keys."""

from __future__ import annotations
