"""Name the first operation in which rows of a job are others beside rows than alone.

    python scripts/check/check_operations.py OUT [--rows 8] [--seed 1] [KEY=VALUE ...]

For those who debug an engine whose rows `batchgen audit` calls different. Rows of a job are drawn
as an audit draws them and computed again: all at once, and then one by one with their samples.
A digest of each operation's result for each token is kept. The first operation that differs, in the
order of the layers, is the cause, as all that it read was equal. CUDA graphs are off. The exit code
is 1 if a row differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from modes.digests import Tape

from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.inputs.model.engine_recipe import EngineRecipe
from batchgen.pipelines.proof.audit.audited_folder import config_of
from batchgen.pipelines.proof.audit.audited_job import open_parts
from batchgen.pipelines.proof.audit.rows_again import compute_again
from batchgen.pipelines.proof.audit.stored_rows import StoredRows
from batchgen.storage.folder.open_folder import open_folder
from batchgen.storage.stores.manifest import Manifest

Sample = tuple[int, int]
"""The place of a row among those that were computed together, and the number of its sample."""


@dataclasses.dataclass
class Watched:
    """The tape of an engine, and of each sample its tokens, the length of its prompt, and the
    digests [operations, tokens] of its KV slots."""

    tape: Tape | None = None
    samples: dict[Sample, tuple[list[int], int, Tensor]] = dataclasses.field(default_factory=dict)


@contextmanager
def watching_engines(watched: Watched) -> Iterator[None]:
    """Note the operations of the engine that is made within the context."""
    make = EngineRecipe.engine
    with ExitStack() as stack:

        def noting(
            recipe: EngineRecipe, weights: CausalLM, *args: Any, **options: Any
        ) -> LLMEngine:
            block_size = recipe.config.block_size
            tape = watched.tape = Tape(2 * block_size, weights.device)  # of the scratch block
            stack.enter_context(tape.watching(weights))
            engine = make(recipe, weights, *args, **options)
            tape.plane = tape.plane.new_zeros(
                len(tape.plane), engine.memory.num_blocks * block_size
            )
            blocks = engine.scheduler.block_manager
            free = blocks.free

            def keep(row: Row) -> None:
                starts = torch.tensor(row.block_table, device=tape.plane.device)[:, None]
                offsets = torch.arange(block_size, device=starts.device)
                slots = (starts * block_size + offsets).flatten()[: len(row.token_ids)]
                key = row.request_id.row, row.request_id.sample
                digests = tape.plane[:, slots].cpu()
                watched.samples[key] = [*row.token_ids], row.num_prompt_tokens, digests
                free(row)

            blocks.free = keep  # type: ignore[assignment, method-assign]
            return engine

        stack.enter_context(patch.object(EngineRecipe, "engine", noting))
        yield


def first_difference(beside: Watched, alone: Watched, row: int) -> str | None:
    """Say in which operation a sample of the row at this place differs first, in words."""
    assert beside.tape is not None
    for (_, sample), (tokens, prompt, digests) in sorted(alone.samples.items()):
        others, _, found = beside.samples[row, sample]
        pairs = zip(tokens, others, strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))
        known = min(equal, digests.shape[1], found.shape[1])
        difference = beside.tape.first_difference(found[:, :known], digests[:, :known])
        if difference is not None:
            name, token = difference
            where = f"token {token} of the prompt"
            if token >= prompt:
                where = f"token {token - prompt} behind the prompt"
            return f"sample {sample}: {name} at {where}"
        if tokens != others:
            return f"sample {sample}: last layer, head or sampler at token {equal - prompt}"
    return None


def check(folder: str, rows: int, seed: int, overrides: Sequence[str]) -> int:
    """Compare rows of a job; returns how many differ."""
    reader = open_folder(folder, "audit")
    config = config_of(reader, folder, overrides, ())
    config = dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, cuda_graph=False)
    )
    manifest, differing = Manifest.read(reader.path / "manifest.json"), 0
    numbers = StoredRows(reader).choose(rows, seed)

    def run(some: Sequence[int]) -> Watched:
        watched = Watched()
        with (
            closing(open_parts(config, manifest, folder)) as parts,
            tempfile.TemporaryDirectory(prefix="batchgen-operations-") as out,
            watching_engines(watched),
        ):
            compute_again(config, parts, some, Path(out), reader.storage)
        return watched

    beside = run(numbers)
    for place, number in enumerate(numbers):
        found = first_difference(beside, run([number]), place)
        differing += found is not None
        print(f"row {number}: {found or 'equal'}", flush=True)
    return differing


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    return min(check(options.out, options.rows, options.seed, options.overrides), 1)


if __name__ == "__main__":
    sys.exit(main())
