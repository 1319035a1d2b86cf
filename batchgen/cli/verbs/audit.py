"""The verb `batchgen audit OUT`: recomputes random rows of a job, and reports how many are equal
bit for bit."""

from __future__ import annotations

import json
import secrets
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchgen.cli.job_outcome import verb
from batchgen.cli.verb_table import VerbParser
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.pipelines.proof.audit.audited_folder import AuditResult
    from batchgen.pipelines.proof.audit.audited_job import AuditedRow

_ABOUT = """\
Choose rows of a job at random, recompute them with the job's own configuration, and compare them
with its shards bit for bit, in all columns except those in which strategy=ar_spec describes its
drafts, which follow the schedule. Report how many rows are equal, the first difference in each of
the others, and how large the share of different rows can be (at 95%). Exit code 0 only if all are
equal.

OUT is a job's folder, or a published copy of it with config.yaml, manifest.json and data/. For a
folder that `select` wrote, the texts and its other columns are compared. Model and data set must be
available and have the digests in the manifest. In a pipeline's folder each step is audited, with
its share of --rows; STEP.KEY=VALUE applies to one step.

With --operations the rows are computed together and then one by one, and are not compared with the
shards. For a row that depends on the other rows of its batch, it names the first operation of the
model with a different result. This helps to find the cause in the engine; CUDA graphs are off.

  batchgen audit OUT
  batchgen audit OUT --rows 100 --seed 7 model.path=/models/m dataset.path=rows.jsonl

Without --seed nobody can predict which rows are audited.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb, and return 0 only if all audited rows are equal."""
    args = _parsed_arguments(arguments)
    from batchgen.pipelines.proof.audit.audited_folder import audit_steps

    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    values, remarks, all_equal = dict[str | None, dict[str, Any]](), set[str](), True
    steps = audit_steps(
        args.out, args.rows, seed, args.override, args.trust, operations=args.operations
    )
    what = "equal in batches and alone" if args.operations else "equal bit for bit"
    for step, result in steps:
        different = [row for row in result.rows if row.difference is not None]
        all_equal = all_equal and not different
        if args.json:
            values[step] = _values(result, different, seed)
            continue
        prefix = "" if step is None else f"{step}: "
        for row in different:
            print(f"{prefix}row {row.row_id}: {row.difference}")
        for remark in result.remarks:
            if remark not in remarks:
                print(f"batchgen: {remark}", file=sys.stderr)
            remarks.add(remark)
        print(prefix + _verdict(result, len(different), seed, what))
    if args.json:
        # A single job has the step None: its object alone, else one object by step.
        print(json.dumps(values.get(None, values), ensure_ascii=False))
    return int(not all_equal)


def _parsed_arguments(arguments: Sequence[str]) -> Namespace:
    parser = VerbParser("audit", _ABOUT)
    parser.add_argument("out", metavar="OUT", help="the output.dir of a job or of a pipeline")
    parser.add_argument(
        "override", metavar="KEY=VALUE", nargs="*",
        help="paths of model and data, and engine keys; keys that decide rows must not change",
    )  # fmt: skip
    parser.add_argument("--rows", metavar="N", type=int, default=20, help="default: 20")
    parser.add_argument("--seed", metavar="N", type=int, help="the seed that chooses the rows")
    parser.add_argument(
        "--operations", action="store_true",
        help="name the first operation in which a row depends on the rest of its batch",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one object and nothing else")
    parser.add_argument(
        "--trust", metavar="OUT", action="append", default=[],
        help="run what OUT/config.yaml names, even if it is not batchgen's own",
    )  # fmt: skip
    args = parser.parse_intermixed_args(arguments)
    if args.rows < 1:
        raise ConfigError(f"audit: --rows must be at least 1, got {args.rows}")
    return args


def _values(audited: AuditResult, different: Sequence[AuditedRow], seed: int) -> dict[str, Any]:
    """Return the result of one audit as a JSON object."""
    from batchgen.pipelines.proof.audit.share_bound import most_different

    rows, num_different = len(audited.rows), len(different)
    return {
        "rows": rows,
        "equal": rows - num_different,
        "at_most_different": most_different(num_different, rows),
        "seed": seed,
        "different": [asdict(row) for row in different],
        "remarks": list(audited.remarks),
    }


def _verdict(audited: AuditResult, different: int, seed: int, what: str) -> str:
    """Return a sentence that says how many rows are equal, and what follows for the job's other
    rows.

    Args:
        different: the number of different rows.
        what: the kind of equality, such as "equal bit for bit".
    """
    from batchgen.pipelines.proof.audit.share_bound import most_different

    count = len(audited.rows)
    samples = sum(row.samples for row in audited.rows)
    of_samples = f" ({samples:,} samples)" if samples > count else ""
    equal = count - different
    head = f"{equal:,} of {count:,} rows{of_samples} {what}, of {audited.total:,}, seed {seed}"
    if count == audited.total:
        return f"{head}: these are all rows"
    bound = most_different(different, count)
    return f"{head}: at 95% fewer than {100 * bound:.3g}% of all rows differ"
