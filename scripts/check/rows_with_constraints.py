"""Rows with constraints for check_parity.py, and what is wrong with their answers."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parity_runs import GREEDY, Row
from real_rows import chat_ids, read_texts

from batchgen.config.compose.load_config import constraint_config
from batchgen.config.groups.constraint_config import NoConstraintConfig, job_value, make_constraint
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.inputs.constraint.text_checks import make_check
from batchgen.inputs.model.open_model import OpenedModel

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.engine.schemas import SCHEMAS

CONSTRAINED_OPTIONS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "logprobs_mode": "processed"},
    {"temperature": 0, "repetition_penalty": 1.2, "min_new_tokens": 6},
    {"temperature": 1.3, "min_p": 0.02, "frequency_penalty": 0.5},
)
"""Only `min_new_tokens` can conflict with a constraint: it forbids an end that this may demand."""
CALL = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": {"type": "array", "items": {"enum": [1, 2]}}},
    "end": "</call>",
}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]}
ANSWER = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    *(
        {"kind": "json_schema", "schema": each}
        for each in SCHEMAS.values()
        if each not in (True, {})
    ),
    {"kind": "json_schema", "schema": ANSWER, "max_whitespace": 2},
    {"kind": "json"},
    {"kind": "regex", "pattern": r"The answer is \$?\d+( (eggs|dollars|miles))?\."},
    {"kind": "regex", "pattern": "[a-e]{3}|[^\\n<]{10,40}!"},
    {"kind": "choice", "choices": ["more than ten", "more than twenty", "more", "ten"]},
    {"kind": "choice", "choices": ['"quoted"', "née 12", "数学", " leading space", "a\nb"]},
    {"kind": "grammar", "grammar": 'root ::= line{1,3} "END"\nline ::= "- " [a-z ]{3,20} "\\n"'},
    {"kind": "grammar", "grammar": 'root ::= "(" root ")" root | "." | "x"'},
    {"kind": "structural_tag", "tag": {"type": "structural_tag", "format": CALL}},
    {"kind": "structural_tag", "tag": {"type": "structural_tag", "format": TRIGGERED}},
    # The markers are texts that the model writes by itself sooner or later.
    {"kind": "json_schema", "schema": ANSWER, "start_after": "."},
    {"kind": "regex", "pattern": r"#### \d+", "start_after": "\n"},
    {"kind": "choice", "choices": ["yes", "no"], "start_after": " is"},
)


def constrained_rows(opened: OpenedModel, args: argparse.Namespace) -> Iterator[Row]:
    """Yield rows with each constraint, one of eight rows without, in an order of chance."""
    prompts = itertools.cycle(read_texts(args.rows, args.field, args.prompts))
    options = itertools.cycle(CONSTRAINED_OPTIONS)
    given = [values for values in CONSTRAINTS for _ in range(args.rows_per_constraint)]
    given += [{"kind": "none"}] * (len(given) // 8)
    random.Random(0).shuffle(given)
    for values in given:
        config = constraint_config(values)
        check, constraint = None, None
        if not isinstance(config, NoConstraintConfig):
            constraint = make_constraint(config, job_value(config))
            check = make_check(config, job_value(config))
        params = SamplingParams(
            **next(options), max_new_tokens=args.new_tokens, logprobs=True, constraint=constraint
        )
        prompt = chat_ids(opened.tokenizer, f"{next(prompts)}\n\nReply with the answer alone.")
        yield Row(values["kind"], prompt, params, check)


def judge(row: Row, output: RequestOutput) -> str | None:
    """Say what is wrong with a row. An answer that ended must be valid, and so must one that was
    cut but is complete."""
    reason, satisfied = output.finish_reason, output.constraint_satisfied
    if row.check is None:
        return None if satisfied is None else "it has no constraint"
    if reason not in ("stop", "length", "constraint_conflict"):
        return f"it ended by {reason}"
    if reason == "constraint_conflict" and not row.params.min_new_tokens:
        return "nothing could be against the constraint"
    if reason == "stop" and not satisfied:
        return "it ended, but is not complete"
    return row.check(output.text) if satisfied else None
