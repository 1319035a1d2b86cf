"""Errors and warnings of a plan about rows, constraints and disk."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from batchgen.config.groups.constraint_config import NoConstraintConfig
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.jobs.forecast.scan import RowTally, Scan
from batchgen.jobs.planning.job_plan import Constraints
from batchgen.util.text.text_table import size_text

if TYPE_CHECKING:
    from batchgen.jobs.planning.disk import DiskUse
    from batchgen.jobs.resolve.opened_job import OpenedJob

_LARGE_SHARD = 2**31
"""The bytes of a shard from which on it is too large for most uses, and machines."""
_COMPILE_S = 2.0
"""The seconds after which no further constraint is compiled."""


def compiled_constraints(opened: OpenedJob, config: JobConfig, scan: Scan) -> Constraints | None:
    """Compile constraints, those of most rows first; rows of one that cannot be enforced are
    bad."""
    if not scan.constraints and isinstance(config.constraint, NoConstraintConfig):
        return None
    compiled, slowest, slowest_s = 0, "", 0.0
    refused = RowTally()
    with closing(opened.model.grammar_compiler()) as compiler:
        started = time.perf_counter()
        for constraint, rows in sorted(scan.constraints.items(), key=lambda c: -c[1].count):
            begun = time.perf_counter()
            if begun - started > _COMPILE_S:
                break
            try:
                compiler.compile(constraint)
            except ConstraintError as error:
                refused.message = refused.message or str(error)
                refused.count += rows.count
                refused.rows += rows.rows
            compiled += 1
            seconds = time.perf_counter() - begun
            if seconds >= slowest_s:
                slowest, slowest_s = f"{constraint.kind} {constraint.text}".strip(), seconds
    if refused.count:
        known = scan.bad.setdefault("bad_constraint", RowTally(refused.message))
        known.count += refused.count
        known.rows += refused.rows
        known.keep_first()
    return Constraints(len(scan.constraints), compiled, slowest_s, slowest)


def rows_and_disk(scan: Scan, disk: DiskUse | None, most_bad: float) -> tuple[list[str], list[str]]:
    """Return the errors and the warnings about rows and disk. A share of bad rows above `most_bad`
    is an error."""
    errors, warnings = list[str](), list[str]()
    if scan.looked_at and not len(scan.lengths):
        errors.append("no row that was looked at has a prompt")
    elif scan.bad_share > most_bad:
        errors.append(
            f"{scan.num_bad:,} of {scan.looked_at:,} rows ({scan.bad_share:.1%}) will have an "
            f"error instead of an answer, more than plan.most_bad={most_bad:g}"
        )
    elif scan.num_bad:
        warnings.append(
            f"{scan.num_bad:,} of {scan.looked_at:,} rows will have an error instead of an answer"
        )
    if scan.cut:
        warnings.append(f"prompt.too_long cuts the beginning of {scan.cut:,} of the prompts")
    if disk is not None and disk.shard > _LARGE_SHARD:
        warnings.append(
            f"a shard will have about {size_text(disk.shard)}, and memory holds several times as "
            "much when it is written: lower output.rows_per_shard, or ask for fewer columns or "
            "output.hidden_layers"
        )
    if disk is not None and disk.total.likely > disk.free:
        errors.append("the output will probably not fit on the disk of output.dir")
    elif disk is not None and disk.total.bound > disk.free:
        warnings.append("the output may not fit on the disk of output.dir")
    return errors, warnings
