"""`batchgen audit OUT`: computes rows of a job again and says how many are equal to the bit."""

from __future__ import annotations

import json
import secrets
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import Parser
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.proof.audit.audited_job import AuditedRow

_ABOUT = """\
Choose rows of a job at random, compute them again with the job's own configuration, and compare
them with its shards to the bit: token ids, every column with a value per token, and all others. It
says how many are equal, what differs first in each of the others, and how large the share of rows
that differ can be (at 95%). Exit code 0 only if all are equal.

OUT is a job's folder, or a copy of it that somebody has published: config.yaml, manifest.json and
data/ are needed. Of a set that `select` has written, the texts and what else it has of the rows are
compared. Model and data set must be there, and must be those of the manifest.

  batchgen audit OUT
  batchgen audit OUT --rows 100 --seed 7 model.path=/models/m dataset.path=rows.jsonl

Rows are drawn by --seed, and by chance without it: who made them cannot know which ones.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    given = _given(arguments)
    from batchgen.proof.audit.audited_folder import audit_folder

    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    found = audit_folder(given.out, given.rows, seed, given.override, given.trust)
    equal = sum(row.difference is None for row in found.rows)
    if given.json:
        print(json.dumps(_values(found.rows, equal, seed, found.remarks), ensure_ascii=False))
        return int(equal < len(found.rows))
    for row in found.rows:
        if row.difference is not None:
            print(f"row {row.row_id}: {row.difference}")
    for remark in found.remarks:
        print(f"batchgen: {remark}", file=sys.stderr)
    print(_verdict(equal, found.rows, found.total, seed))
    return int(equal < len(found.rows))


def _given(arguments: Sequence[str]) -> Namespace:
    parser = Parser("audit", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the job's output.dir, or a copy of it")
    parser.add_argument(
        "override", metavar="KEY=VALUE", nargs="*",
        help="where model and data are, and how the engine runs; what decides rows must stay",
    )  # fmt: skip
    parser.add_argument("--rows", metavar="N", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--seed", metavar="N", type=int, help="draw the rows that N draws")
    parser.add_argument("--json", action="store_true", help="one object and nothing else")
    parser.add_argument(
        "--trust", metavar="OUT", action="append", default=[],
        help="run what OUT/config.yaml names, even if it is not batchgen's own",
    )  # fmt: skip
    given = parser.parse_intermixed_args(arguments)
    if given.rows < 1:
        raise ConfigError(f"audit: --rows must be at least 1, got {given.rows}")
    return given


def _values(
    rows: Sequence[AuditedRow], equal: int, seed: int, remarks: Sequence[str]
) -> dict[str, Any]:
    from batchgen.proof.audit.share_bound import most_different

    return {
        "rows": len(rows),
        "equal": equal,
        "at_most_different": most_different(len(rows) - equal, len(rows)),
        "seed": seed,
        "different": [asdict(row) for row in rows if row.difference is not None],
        "remarks": list(remarks),
    }


def _verdict(equal: int, rows: Sequence[AuditedRow], total: int, seed: int) -> str:
    """How many rows are equal, and what that says of all of them."""
    from batchgen.proof.audit.share_bound import most_different

    count = len(rows)
    samples = sum(row.samples for row in rows)
    of = f" ({samples:,} samples)" if samples > count else ""
    head = f"{equal:,} of {count:,} rows{of} equal to the bit, of {total:,}, seed {seed}"
    if count == total:
        return f"{head}: these are all rows"
    bound = most_different(count - equal, count)
    return f"{head}: at 95% fewer than {100 * bound:.3g}% of all rows differ"
