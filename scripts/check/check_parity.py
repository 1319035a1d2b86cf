"""Compare the engine with transformers, and the engine's ways to run with each other, over real
prompts.

    python scripts/check/check_parity.py ROWS.jsonl [--device cuda] [--dtype bfloat16]
        [--ways ar,ngram,draft] [--fp8]

A row is a prompt with sampling options. Each text of ROWS gives six: the text as it is, and a
request to repeat it (for which n-grams are good drafts), each answered greedily and by two samples
with other options.

In float32 the rows run first in the simplest loop of the strategy `ar`. Then they run in each way
(`parity_runs.WAYS`): with overlap, in small chunks and a cache too small for them, and with drafts
from n-grams or a draft model. All tokens must be equal, and log-probabilities within 1e-4; on a GPU
only those of greedy rows. Transformers must also find each token of a greedy answer the most likely
one, so that its own greedy decoding gives the same answer.

In bfloat16 neither program is exact. So both are compared with transformers in float32, by the
log-probabilities of the 20 likeliest tokens: the engine's mean error may be at most 1.05 times that
of transformers in bfloat16. `--fp8` compares FP8 in the same way: FP8 weights, FP8 weights with FP8
activations, and FP8 keys and values. Two independent errors of one size make sqrt(2) times one; so
weights with activations fail if they have more than twice the error of weights alone. Keys and
values fail if they have more error than weights with activations.

The exit code is 1 if anything fails.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_runs import GREEDY, LOGPROB_LIMIT, WAYS, Reference, Row, Runs, Way
from real_rows import MODEL, chat_ids, read_texts
from torch import Tensor
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.loading.loader import Quantization, load_model
from batchgen.engine.models.model_config import KVCacheDtype
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.model.open_model import OpenedModel, open_model

BFLOAT16_LIMIT, FP8_LIMIT = 1.05, 2.0
"""The largest ratios of mean errors (see above)."""
TOP = 20
"""Likeliest tokens whose log-probabilities are compared."""
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.3},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "top_logprobs": 3},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs_mode": "processed"},
    {"temperature": 0.2, "min_new_tokens": 16, "stop": (" the", "\n\n")},
    {"temperature": 0.5, "top_p": 0.8, "ignore_eos": True},
)


def compare(expected: list[RequestOutput], outputs: list[RequestOutput]) -> tuple[set[int], float]:
    """Return the indices of rows whose outputs are not those expected or contradict themselves, and
    the largest difference of a log-probability in the other rows."""
    different, worst = set[int](), 0.0
    for index, (wanted, output) in enumerate(zip(expected, outputs, strict=True)):
        if _facts(wanted) != _facts(output) or not _consistent(output):
            different.add(index)
            continue
        for name, values in wanted.columns.items():
            if values.dtype.kind == "f":
                # Tokens that sampling excludes are -inf in both, and -inf - -inf would be NaN.
                same = values == output.columns[name]
                gaps = np.abs(np.where(same, 0, values - np.where(same, 0, output.columns[name])))
                worst = max(worst, float(gaps.max(initial=0)))
    return different, worst


def _facts(output: RequestOutput) -> tuple[object, ...]:
    """Return what must be equal, to the bit, in two outputs of a row."""
    return output.token_ids, output.text, output.finish_reason, output.stop


def _consistent(output: RequestOutput) -> bool:
    """Return whether the columns of speculative decoding agree with each other and with the row's
    counts. `draft_accepted` says of each token whether it was a draft, and `step_map` the number of
    the forward that yielded it."""
    if "draft_accepted" not in output.columns:
        return True
    accepted, steps = output.columns["draft_accepted"], output.columns["step_map"]
    num_accepted, num_drafts = (
        output.counts[name] for name in ("num_accepted_tokens", "num_draft_tokens")
    )
    # A forward yields the accepted drafts and then a token of the model's own, unless a stop cuts
    # that off.
    ends = steps[1:] > steps[:-1]
    return bool(
        np.isin(np.diff(steps, prepend=0), (0, 1)).all()
        and (ends == ~accepted[:-1]).all()
        and steps[-1] == output.counts["num_forwards"]
        and accepted.sum() == num_accepted <= num_drafts
    )


def check_ways(runs: Runs, reference: Reference) -> bool:
    """Run the rows in the simplest loop and in all ways of `--ways`, and print how they differ.
    Return whether all agree as they must."""
    args, rows = runs.args, runs.rows
    simple = EngineConfig(
        prefix_caching=False, overlap=False, chunk_tokens=0, max_num_seqs=96, kv_cache_gib=1.0
    )
    greedy = {i for i, row in enumerate(rows) if row.kind == "greedy"}
    expected, _ = runs.run(Way(), simple)
    passed = True
    tokens = sum(len(output.token_ids) for output in expected)
    preemptions = cached = 0
    for way in (way for way in WAYS if way.group in args.ways.split(",")):
        start = time.perf_counter()
        outputs, stats = runs.run(way)
        different, worst = compare(expected, outputs)
        wrong = [i for i in greedy if not reference.agrees(outputs[i])]
        forwards = sum(output.counts["num_forwards"] for output in outputs) if way.k else tokens
        num_accepted, num_drafts = (
            stats.counts.get(name, 0) for name in ("num_accepted_tokens", "num_draft_tokens")
        )
        print(
            f"{way}: {len(different)} of {len(rows)} rows differ, {len(wrong)} from transformers, "
            f"log-probabilities by up to {worst:.1e}; {num_accepted} of {num_drafts} drafts held, "
            f"{tokens / forwards:.2f} tokens per forward; {stats.preemptions} preemptions, "
            f"{stats.cached_tokens} tokens cached, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        preemptions, cached = preemptions + stats.preemptions, cached + stats.cached_tokens
        passed &= not wrong
        if num_drafts and way.draft != "random":
            passed &= num_accepted > 0
        # On a GPU products of more rows round differently, which can change a draw that is almost a
        # tie. So sampled rows may differ there.
        if args.device == "cpu":
            passed &= not different and worst < LOGPROB_LIMIT
            if way.draft == "perfect" and not way.hard:
                passed &= forwards == _fewest(expected, way.k)
    if not preemptions or not cached:
        print("too easy: nothing was preempted, or nothing came from the prefix cache")
    return passed and preemptions > 0 and cached > 0


def _fewest(outputs: list[RequestOutput], k: int) -> int:
    """Return how many forwards the answers need if all `k` drafts of each are accepted: one for the
    first token, and then one for each k + 1 tokens."""
    return sum(1 + -(-(len(output.token_ids) - 1) // (1 + k)) for output in outputs)


def mean_error(found: list[tuple[Tensor, Tensor]]) -> float:
    """Print and return the mean of absolute errors. `found` has for each answer its errors, and for
    each of its tokens whether another token is the likeliest one."""
    errors, differs = (torch.cat(parts).float() for parts in zip(*found, strict=True))
    print(
        f"mean error {errors.mean():.5f}, largest {errors.max():.3f}, "
        f"{differs.mean():.2%} of {len(differs)} greedy tokens differ",
        flush=True,
    )
    return float(errors.mean())


def errors_of(outputs: list[RequestOutput], exact: Reference) -> list[tuple[Tensor, Tensor]]:
    """Return the argument of `mean_error` for the engine's outputs: the errors of the `TOP`
    likeliest tokens' log-probabilities. (The answers' own tokens were chosen with the engine's
    errors, which would bias the comparison.)"""
    found = []
    for output in outputs:
        truth = exact.logprobs(output)
        ids = torch.from_numpy(output.columns["top_logprob_ids"]).long()
        values = torch.from_numpy(output.columns["top_logprobs"])
        differs = torch.tensor(output.token_ids) != truth.argmax(-1)
        found.append(((values - truth.gather(1, ids)).abs().flatten(), differs))
    return found


def check_rounding(runs: Runs) -> bool:
    """Compare bfloat16, or the kinds of FP8, by their errors against transformers in float32. Print
    the errors, and return whether they are within the limits."""
    args, path = runs.args, runs.opened.path
    greedy = RequestParams(temperature=0, max_new_tokens=args.new_tokens, top_logprobs=TOP)
    runs.rows = [replace(row, params=greedy) for row in runs.rows if row.kind == "greedy"]
    exact, way = Reference(path, args.device, torch.float32), Way(hard=True)
    if not args.fp8:
        outputs, _ = runs.run(way)
        print("bfloat16: batchgen")
        ours = mean_error(errors_of(outputs, exact))
        rounded = Reference(path, args.device, torch.bfloat16)
        theirs = []
        for output in outputs:
            truth, other = exact.logprobs(output), rounded.logprobs(output)
            ids = torch.from_numpy(output.columns["top_logprob_ids"]).long()
            differ = other.argmax(-1) != truth.argmax(-1)
            theirs.append(((other - truth).gather(1, ids).abs().flatten(), differ))
        print("bfloat16: transformers")
        return ours <= BFLOAT16_LIMIT * mean_error(theirs)
    means = []
    # Name, quantization of weights, whether activations are in FP8 too, and the KV cache's dtype.
    forms: tuple[tuple[str, Quantization | None, bool, KVCacheDtype], ...] = (
        ("bfloat16", None, False, "auto"),
        ("FP8 weights", "fp8", False, "auto"),
        ("FP8 weights and activations", "fp8", True, "auto"),
        ("FP8 keys and values", None, False, "fp8"),
    )
    for name, quantization, native_fp8, kv_cache_dtype in forms:
        model = load_model(
            path,
            device=torch.device(args.device),
            dtype=torch.bfloat16,
            quantization=quantization,
            native_fp8=native_fp8,
            kv_cache_dtype=kv_cache_dtype,
        )
        print(name)
        means.append(mean_error(errors_of(runs.run(way, model=model)[0], exact)))
    _, weights, activations, keys_and_values = means
    return activations <= FP8_LIMIT * weights and keys_and_values <= activations


def plain_rows(opened: OpenedModel, args: argparse.Namespace) -> Iterator[Row]:
    """Yield three rows for each prompt: a greedy one, and two samples with the same options."""
    all_options = itertools.cycle(OPTIONS)
    for text in read_texts(args.rows, args.field, args.prompts):
        for content in (text, f"Repeat the following text word for word:\n\n{text}"):
            prompt, sampled = chat_ids(opened.tokenizer, content), next(all_options)
            for kind, options in (("greedy", GREEDY), ("sampled", sampled), ("sampled", sampled)):
                values = {"logprobs": True, "max_new_tokens": args.new_tokens, **options}
                yield Row(kind, prompt, RequestParams(**values))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="JSONL")
    parser.add_argument("--field", default="question", help="of a row: the user's message")
    parser.add_argument("--prompts", type=int, default=32, help="rows to read")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", default=MODEL, help="as for batchgen.LLM")
    parser.add_argument("--ways", default="ar,ngram,draft", help="some of ar,ngram,draft")
    parser.add_argument("--fp8", action="store_true")
    args = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    opened = open_model(args.model, None, "auto")
    runs = Runs(opened, args, list(plain_rows(opened, args)))
    if args.fp8 or args.dtype == "bfloat16":
        passed = check_rounding(runs)
    else:
        passed = check_ways(runs, Reference(opened.path, args.device, torch.float32))
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
