"""Check the constrained output of a real model over real prompts, in every way to run it.

    python scripts/check/check_constraint.py ROWS.jsonl [--device cuda] \\
        [--strategies ar,ngram,draft]

Rows with many JSON Schemas, regular expressions, choices, grammars and structural tags, greedy and
sampled, are mixed in one batch with rows without a constraint. Each answer is checked by libraries
that share nothing with the engine (`jsonschema`, `re`, …). An answer that `max_new_tokens` cut is
counted as cut, and is checked only if it is complete. Then the same rows are run with overlap, in a
cache too small for them, and with speculation; in float32 they must have the same tokens.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from check_spec import LOGPROB_LIMIT, Case, add_noise, compare, same_tokens
from constraint_schemas import NUM_SCHEMAS, constraints
from real_rows import MODEL, chat_ids, finish, read_texts
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from batchgen.compose.load_config import constraint_config
from batchgen.config.constraint_config import NoConstraintConfig, job_value, make_constraint
from batchgen.constraint.text_checks import Check, make_check
from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import RequestOutput
from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.llm_engine import EngineStats
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.strategy import Strategy
from batchgen.model.open_model import OpenedModel, open_model
from batchgen.strategies.ar.strategy import ARStrategy

STRATEGIES = ("ar", "ngram", "draft")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "logprobs_mode": "processed"},
    {"temperature": 0, "repetition_penalty": 1.2, "min_new_tokens": 6},
    {"temperature": 1.3, "min_p": 0.02, "frequency_penalty": 0.5},
)
"""Sampling options of the rows, in turn. Of these only `min_new_tokens` can be in conflict with a
constraint: it forbids an end that the constraint may demand."""
CASES = {
    "ngram": (Case(1, overlap=True), Case(3, hard=True, any_width=True), Case(5, pool=True)),
    "draft": (
        Case(2, "rough", hard=True, overlap=True),
        Case(4, "rough", any_width=True),
        Case(3, "perfect"),
    ),
}
UNCONSTRAINED_EVERY = 8
"""Constrained rows for each row without a constraint."""
SHOWN = 10
"""Wrong rows that are printed, at most."""


@dataclass(frozen=True)
class Row:
    """A request.

    Attributes:
        kind: the line of the summary that counts it.
        check: says what is wrong with an answer; None for a row without a constraint.
    """

    kind: str
    prompt: list[int]
    params: SamplingParams
    check: Check | None


def main() -> None:
    args = arguments()
    disable_progress_bar()
    set_verbosity_error()
    opened = open_model(args.model, None, "auto")
    rows = make_rows(opened, args)
    comparison = Comparison(
        opened, lambda: opened.load(args.dtype, args.device), rows, exact=args.dtype == "float32"
    )
    raise SystemExit(0 if comparison(args.strategies) else 1)


def arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(STRATEGIES):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}: choose among {STRATEGIES}")
        return chosen

    parser = argparse.ArgumentParser(description="Check constrained output over real prompts.")
    parser.add_argument("rows", type=Path, help="JSONL")
    parser.add_argument("--field", default="question", help="of a row: the user's message")
    parser.add_argument("--prompts", type=int, default=24, help="rows to read")
    parser.add_argument("--rows-per-schema", type=int, default=4, help="and per other constraint")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--strategies", type=names, default=list(STRATEGIES))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", default=MODEL, help="as for batchgen.LLM")
    return parser.parse_args()


def make_rows(opened: OpenedModel, args: argparse.Namespace) -> list[Row]:
    """Make `args.rows_per_schema` rows of every constraint and some without one, shuffled."""
    prompts = itertools.cycle(read_texts(args.rows, args.field, args.prompts))
    options = itertools.cycle(OPTIONS)
    rows: list[Row] = []

    def add(kind: str, ask: str, constraint: Any, check: Check | None) -> None:
        given = {"temperature": 0.0} | next(options)
        params = SamplingParams(
            **given,
            max_new_tokens=args.new_tokens,
            logprobs=True,
            seed=len(rows),
            constraint=constraint,
        )
        content = f"{next(prompts)}\n\n{ask}"
        rows.append(Row(kind, chat_ids(opened.tokenizer, content), params, check))

    for kind, values in constraints():
        config = constraint_config(values)
        assert not isinstance(config, NoConstraintConfig)
        constraint = make_constraint(config, job_value(config))
        check = make_check(config, job_value(config))
        for _ in range(args.rows_per_schema):
            add(kind, _request(config.kind, config.start_after), constraint, check)
    for _ in range(len(rows) // UNCONSTRAINED_EVERY):
        add("unconstrained", "Reply in one sentence.", None, None)
    random.Random(0).shuffle(rows)
    return rows


def _request(kind: str, start_after: str | None) -> str:
    if start_after is not None:
        return "Explain this in one sentence, then give the answer."
    if kind in ("json_schema", "json"):
        return "Reply with a short JSON value."
    return "Reply with the answer alone."


@dataclass
class Comparison:
    """Runs the rows with `ar`, checks their outputs, and compares those of other ways with them.

    Attributes:
        opened: the model's files and tokenizer.
        load: loads the model, a new copy with every call.
        rows: the requests.
        exact: whether all ways must give the same outputs.
    """

    opened: OpenedModel
    load: Callable[[], CausalLM]
    rows: list[Row]
    exact: bool

    def __call__(self, strategies: Sequence[str]) -> bool:
        model, compiler = self.load(), self.opened.grammar_compiler()
        simple = EngineConfig(overlap=False, chunk_tokens=0, max_num_seqs=96)
        print(f"{len(self.rows)} rows, {NUM_SCHEMAS} JSON Schemas", flush=True)

        def run(
            name: str, strategy: Strategy, config: EngineConfig, draft: CausalLM | None
        ) -> tuple[list[RequestOutput], str]:
            start = time.perf_counter()
            outputs, stats = self._run(model, draft, compiler, strategy, config)
            return outputs, f"{name:<36} {time.perf_counter() - start:4.0f} s, {rates(stats)}"

        expected, line = run("ar", ARStrategy(), simple, None)
        print(line)
        passed = report(self.rows, expected)
        if "ar" in strategies:
            hard = self._hard(model, None, simple)
            for name, config in (("overlap", replace(simple, overlap=True)), ("hard", hard)):
                outputs, line = run(f"ar, {name}", ARStrategy(), config, None)
                passed &= self._same(line, expected, outputs, columns=False)
        for case in (case for name in strategies for case in CASES.get(name, ())):
            draft = self._draft(case)
            config = replace(simple, overlap=case.overlap)
            if case.hard:
                config = self._hard(model, draft, config)
            outputs, line = run(str(case), case.strategy(), config, draft)
            passed &= self._same(line, expected, outputs, columns=True)
        return passed

    def _draft(self, case: Case) -> CausalLM | None:
        if case.draft is None:
            return None
        return add_noise(self.load(), 0.12 if case.draft == "rough" else 0.0, 0.0)

    def _same(
        self,
        line: str,
        expected: list[RequestOutput],
        outputs: list[RequestOutput],
        *,
        columns: bool,
    ) -> bool:
        """Compare outputs and print the differences; true if there are none, or there may be some.

        Args:
            line: how the outputs were made, printed in front of the differences.
            expected: the outputs of `ar`.
            outputs: those to compare.
            columns: whether to compare log-probabilities and the columns of speculation too.
        """
        differing = Counter(
            row.kind
            for row, one, other in zip(self.rows, expected, outputs, strict=True)
            if not same_tokens(one, other) or one.constraint_satisfied != other.constraint_satisfied
        )
        line += f"; {differing.total()} of {len(outputs)} rows differ {dict(differing) or ''}"
        if not columns:
            print(line, flush=True)
            return not self.exact or not differing
        # A forward that ends in a conflict yields no token, so it has no entry in step_map.
        ended = [
            pair
            for pair in zip(expected, outputs, strict=True)
            if pair[0].finish_reason != "constraint_conflict"
        ]
        odd, worst = compare([one for one, _ in ended], [other for _, other in ended])
        print(f"{line}, {odd} in their columns, log-probabilities by up to {worst:.1e}", flush=True)
        return not self.exact or (not differing and not odd and worst < LOGPROB_LIMIT)

    def _hard(self, model: CausalLM, draft: CausalLM | None, config: EngineConfig) -> EngineConfig:
        """Configure chunked prefills, and a cache for only some of the rows in flight."""
        rows = 24
        longest = max(len(row.prompt) + row.params.max_new_tokens for row in self.rows)
        models = [model] if draft is None else [model, draft]
        per_token = sum(paged_token_bytes(m.cache_specs, (), m.dtype) for m in models)
        return replace(
            config,
            max_num_seqs=rows,
            max_batched_tokens=512,
            chunk_tokens=64,
            kv_cache_gib=rows * longest / 5 * per_token / 2**30,
        )

    def _run(
        self,
        model: CausalLM,
        draft: CausalLM | None,
        compiler: GrammarCompiler,
        strategy: Strategy,
        config: EngineConfig,
    ) -> tuple[list[RequestOutput], EngineStats]:
        """Run the rows in a new engine; returns their outputs in order, and the statistics."""
        engine = self.opened.engine(
            model, strategy, config, {} if draft is None else {"draft": draft}, compiler
        )
        columns = tuple(column.name for column in strategy.columns)
        for index, row in enumerate(self.rows):
            engine.add_request(str(index), row.prompt, replace(row.params, columns=columns))
        return finish(engine, len(self.rows)), engine.stats


def rates(stats: EngineStats) -> str:
    text = f"{stats.generated_tokens} tokens, {stats.preemptions} preemptions"
    if drafts := stats.counts.get("num_draft_tokens"):
        text += f", {stats.counts['num_accepted_tokens'] / drafts:.0%} of {drafts} drafts"
    return text


def report(rows: list[Row], outputs: list[RequestOutput]) -> bool:
    """Print how the rows of each kind ended; returns whether none of them is wrong."""
    counts: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for row, output in zip(rows, outputs, strict=True):
        outcome, reason = judge(row, output)
        counts.setdefault(row.kind, Counter())[outcome] += 1
        if reason is not None:
            wrong.append(f"{row.kind}: {reason}: {output.text!r} of {row.params}")
    names = list(dict.fromkeys(name for of_kind in counts.values() for name in of_kind))
    print(f"{'':<16}{'rows':>7}" + "".join(f"{name:>11}" for name in names))
    for kind in sorted(counts):
        numbers = "".join(f"{counts[kind][name] or '':>11}" for name in names)
        print(f"{kind:<16}{counts[kind].total():>7}{numbers}")
    held = [of_kind for kind, of_kind in counts.items() if kind != "unconstrained"]
    total = sum(held, Counter())
    share = total["valid"] / total.total()
    print(f"{share:.0%} of the constrained rows ended and are valid; {len(wrong)} rows are wrong")
    print("".join(f"  {line}\n" for line in wrong[:SHOWN]), end="", flush=True)
    return not wrong


def judge(row: Row, output: RequestOutput) -> tuple[str, str | None]:
    """Return how a row ended, and what is wrong with it, or None if nothing is.

    An answer that ended must be valid, and so must one that was cut but is complete. Only
    `min_new_tokens` may be in conflict with a constraint.
    """
    reason, satisfied = output.finish_reason, output.constraint_satisfied
    if row.check is None:
        return ("free" if satisfied is None else "WRONG", None if satisfied is None else "not free")
    if reason == "constraint_conflict" and not row.params.min_new_tokens:
        return "WRONG", "nothing could be against the constraint"
    if reason == "stop" and not satisfied:
        return "WRONG", "it ended, but is not complete"
    if satisfied and (why := row.check(output.text)) is not None:
        return "WRONG", why
    if reason == "length":
        return ("cut, valid" if satisfied else "cut"), None
    names = {"stop": "valid", "constraint_conflict": "conflict"}
    return names.get(reason, "WRONG"), None if reason in names else f"it ended by {reason}"


if __name__ == "__main__":
    main()
