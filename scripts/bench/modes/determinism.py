"""The mode determinism of bench_engine.py: does a row keep its bits, whatever else is in the batch?

A digest of each operation's result for a token is kept at the token's KV slot, so those of rejected
drafts are overwritten, and a row that shares a prefix has the digests of the row that computed it.
The digests are made within captured CUDA graphs too. Those of one run of the row alone are the
reference. An operation that is the first to differ, in the order of the layers, at any position, is
the cause: all that it read was equal. A prefill leaves no digests of the last layer, of which it
computes only some tokens.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from measuring import DEVICE, commas
from shapes import MODELS
from torch import Tensor
from workloads import dummy_model, model_config, prompt_vocab

from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.operation_digests import Tape
from batchgen.engine.parallel.rank_group import end_process
from batchgen.engine.parallel.rank_processes import RankProcesses
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.engine.vision.image import DIGEST_BYTES, Image
from batchgen.engine.vision.image_span import ImageRules
from batchgen.kernels.library import keep_one_order
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy

LAYERS = {
    "qwen3-0.6b": 5, "qwen3-30b-a3b": 4, "sdar-8b": 4, "gemma3-27b": 6, "gemma4-26b-a4b": 6,
    "qwen3-8b-fp8": 4, "qwen3-30b-a3b-fp8": 4, "gpt-oss-20b": 4, "hybrid-35b-a3b": 5,
    "deepseek-v2-lite": 4, "qwen3-vl-8b": 4,
}  # fmt: skip
"""The models that run by default, and how many of their layers."""
_BLOCK = 16
_NEW_TOKENS = 24
_BLOCK_LENGTH = 4
"""The positions of a block of diffusion models."""


class Schedule(NamedTuple):
    """What surrounds a row.

    Attributes:
        before, after: the prompt and output lengths of rows that join before and after it.
        steps: the engine's steps before it joins.
        shared: how many of its prompt's tokens another row has computed.
        most_tokens, chunk_tokens: the most tokens of a prefill alone, and beside decoding rows.
        preempted: how many tokens it has generated when it is preempted; 0 never.
    """

    before: Sequence[tuple[int, int]] = ()
    after: Sequence[tuple[int, int]] = ()
    steps: int = 0
    shared: int = 0
    most_tokens: int = 4096
    chunk_tokens: int = 0
    preempted: int = 0

    @classmethod
    def drawn(cls, draws: random.Random, most_rows: int, most_blocks: int) -> Schedule:
        rows = min(draws.choice((0, 1, 3, 7, 15, 31, 63, 120, 180)), most_rows - 2)
        lengths = [
            (draws.choice((draws.randint(1, 40), draws.randint(40, 400))), draws.randint(1, 40))
            for _ in range(rows)
        ]
        cut = draws.randint(0, rows)
        blocks = draws.choice((0, 0, 0, draws.randint(1, most_blocks), most_blocks))
        most, chunk = draws.choice((256, 512, 1024, 4096)), draws.choice((0, 64, 128, 256))
        before, after = lengths[:cut], lengths[cut:]
        steps, preempted = draws.randint(0, 12), draws.choice((0, 0, draws.randint(1, 20)))
        return cls(before, after, steps, blocks * _BLOCK, most + 256, chunk, preempted)


class Result(NamedTuple):
    """A row's output, its tokens behind the prompt and their log-probabilities, whether they were
    generated or scored, and the digests [operations, tokens] of its KV slots."""

    output: RequestOutput
    tokens: Sequence[int]
    logprobs: Sequence[float]
    digests: Tensor


class Pictures:
    """Draws pictures of up to `most` tokens each way, for a model with these rules."""

    def __init__(self, rules: ImageRules, most: int) -> None:
        self._rules, self._most = rules, most

    def draw(self, draws: random.Random) -> tuple[list[int], Image]:
        """Return the tokens that stand for a picture, and the picture."""
        rules, side = self._rules, self._rules.pixels_per_token
        height, width = (side * draws.randint(1, self._most) for _ in range(2))
        values = np.random.default_rng(draws.randrange(2**32))
        pixels = values.integers(0, 256, (height, width, 3), np.uint8)
        digest = blake2b(pixels.tobytes(), digest_size=DIGEST_BYTES).digest()
        inside = [rules.image_token_id] * rules.num_tokens(height, width)
        ids = [rules.start_token_id, *inside, rules.end_token_id]
        return ids, Image(pixels, height, width, digest)

    def vocab(self, vocab: int) -> int:
        """Return the number below which ids of texts stay, so that none stands for a picture."""
        return min(vocab, *self._rules.never_sampled)


class Sizes(NamedTuple):
    """The room of the paged cache, the most rows in flight, the blocks of the row's prompt, which
    has one token more (a shared prefix may leave that one), and the most tokens of a picture's
    side."""

    tokens: int
    rows: int
    blocks: int
    side: int


ON_GPU, ON_CPU = Sizes(90_000, 192, 160, 24), Sizes(3_000, 6, 44, 5)
"""On a GPU the prompt is longer than a split of a context under any rule."""


class Probe:
    """One row in an engine of its own, to be run under schedules."""

    def __init__(
        self,
        model: CausalLM,
        tape: Tape,
        sizes: Sizes,
        *,
        drafts: bool,
        graphs: bool,
        deterministic: bool,
    ) -> None:
        self._tape, self._vocab = tape, prompt_vocab(model.vocab_size)
        self._pictures: Pictures | None = None
        if model.visual is not None:
            self._pictures = Pictures(model.visual.config.rules, sizes.side)
            self._vocab = self._pictures.vocab(self._vocab)
        each = paged_token_bytes(model.cache_specs, (), model.dtype)
        config = EngineConfig(
            max_num_seqs=sizes.rows,
            max_batched_tokens=4096 + 256,
            chunk_tokens=256,
            max_model_len=1024 * (1 + sizes.blocks // 64),
            kv_cache_gib=sizes.tokens * each / 2**30,
            cuda_graph=graphs,
            block_size=_BLOCK,
            deterministic=deterministic,
            tensor_parallel=model.parallel.size,
        )
        self._diffuses = model.config.diffusion is not None
        strategy: Strategy = ARStrategy()
        if self._diffuses:
            strategy = DLLMStrategy(_BLOCK_LENGTH)
        elif drafts:
            strategy = ARSpecStrategy(num_spec_tokens=3, adaptive=False, ngram_min=1)
        self.engine = LLMEngine(model, None, (), strategy, config)
        assert self.engine.memory.num_blocks * _BLOCK <= tape.plane.shape[1]
        self.blocks = self.engine.scheduler.block_manager
        self._free = self.blocks.free
        self.blocks.free = self._keep  # type: ignore[assignment, method-assign]
        draws = random.Random("probe")
        self.prompt = [draws.randrange(self._vocab) for _ in range(sizes.blocks * _BLOCK + 1)]
        self._images: list[tuple[range, Image]] = []  # each with the places of its tokens
        for start in (len(self.prompt) // 8, len(self.prompt) // 2):
            if self._pictures is not None:
                ids, image = self._pictures.draw(draws)
                self.prompt[start : start + len(ids)] = ids
                self._images.append((range(start, start + len(ids)), image))
        self._digests = torch.empty(0)

    def _keep(self, row: Row) -> None:
        if row.request_id == "probe":
            slots = torch.tensor(row.block_table, device=self._tape.plane.device)[:, None] * _BLOCK
            slots = (slots + torch.arange(_BLOCK, device=slots.device)).flatten()
            self._digests = self._tape.plane[:, slots].clone()
        self._free(row)

    def run(
        self, schedule: Schedule, draws: random.Random, answer: Sequence[int] | None = None
    ) -> Result:
        """Run the row to its end under a schedule, and drop the others then. The row generates
        tokens, or those of the answer are scored."""
        engine, outputs = self.engine, dict[str, RequestOutput]()
        self._forget()
        engine.scheduler.limits = replace(
            engine.scheduler.limits,
            max_batched_tokens=schedule.most_tokens,
            chunk_tokens=schedule.chunk_tokens,
        )

        def step() -> None:
            outputs.update({output.request_id: output for output in engine.step()})

        def add(lengths: Sequence[tuple[int, int]], name: str) -> None:
            for index, (prompt, new) in enumerate(lengths):
                ids, images = self._company(prompt, draws)
                params = RequestParams(temperature=0.8, max_new_tokens=new, seed=index)
                engine.add_request(f"{name} {index}", ids, params, images=images)

        if schedule.shared:
            ids, images = self._beginning(schedule.shared)
            ids.append(draws.randrange(self._vocab))
            engine.add_request("sharing", ids, RequestParams(max_new_tokens=1), images=images)
            while engine.has_unfinished():
                step()
        add(schedule.before, "before")
        for _ in range(schedule.steps):
            step()
        self._add_row(answer)
        add(schedule.after, "after")
        preempted = schedule.preempted
        while "probe" not in outputs:
            step()
            if preempted and self._preempt(preempted):
                preempted = 0
        for name, lengths in (("before", schedule.before), ("after", schedule.after)):
            for index in range(len(lengths)):
                engine.abort(f"{name} {index}")
        while engine.has_unfinished():
            step()
        output = outputs["probe"]
        logprobs = output.columns["logprobs" if answer is None else "answer_logprobs"]
        tokens = output.token_ids if answer is None else answer
        return Result(output, tokens, logprobs.tolist(), self._digests.cpu())

    def _add_row(self, answer: Sequence[int] | None) -> None:
        # The penalties let the row repeat itself, so that drafts hold.
        params = RequestParams(temperature=0, max_new_tokens=_NEW_TOKENS, logprobs=True)
        if answer is not None:
            params = RequestParams(max_new_tokens=0)
        elif not self._diffuses:
            params = replace(params, presence_penalty=-2, frequency_penalty=-2)
        images = [image for _, image in self._images]
        self.engine.add_request("probe", self.prompt, params, answer, images)

    def _company(self, length: int, draws: random.Random) -> tuple[list[int], list[Image]]:
        """Draw a prompt of so many tokens, and in one of three a picture more."""
        ids = [draws.randrange(self._vocab) for _ in range(length)]
        if self._pictures is None or draws.random() > 1 / 3:
            return ids, []
        inside, image = self._pictures.draw(draws)
        place = draws.randint(0, length)
        return [*ids[:place], *inside, *ids[place:]], [image]

    def _beginning(self, length: int) -> tuple[list[int], list[Image]]:
        """The row's first tokens, about as many, with whole pictures."""
        for places, _ in self._images:
            if length in places:
                length = places.stop
        images = [image for places, image in self._images if places.stop <= length]
        return self.prompt[:length], images

    def _preempt(self, generated: int) -> bool:
        """Preempt the row if it has generated so many tokens."""
        scheduler = self.engine.scheduler
        for seq in scheduler.running.rows:
            tokens = scheduler.running.num_tokens[seq.batch_slot]
            ready = not seq.is_prefilling and tokens - len(self.prompt) >= generated
            if seq.request_id == "probe" and ready:
                scheduler._preempt(seq)
                return True
        return False

    def _forget(self) -> None:
        """Empty the tape and the prefix cache."""
        self._tape.plane.zero_()
        for digest in list(self.blocks._published):
            if self.blocks.states is not None:
                self.blocks.states.forget(digest)
        self.blocks._published.clear()
        self.blocks._hash_of.clear()


def first_difference(tape: Tape, reference: Result, found: Result, prompt: int) -> str | None:
    """Name the first operation whose digests differ at tokens that both runs have in common, and
    where; None if nothing differs."""
    tokens, others = (np.array(each.tokens) for each in (reference, found))
    equal = int(np.cumprod(tokens == others).sum())
    common = prompt + min(equal, len(tokens) - 1)
    before, now = (each.digests[:, :common] for each in (reference, found))
    if (operation := tape.first_difference(before, now)) is not None:
        name, token = operation
        return f"{name}, {'prompt' if token < prompt else 'generated'}"
    scores, others_scores = (np.array(each.logprobs) for each in (reference, found))
    differing = ((scores != others_scores) | (tokens != others)).nonzero()[0].tolist()
    if not differing:
        return None
    return f"last layer, head or sampler, {'later' if differing[0] else 'first'} token"


def fewer_layers(name: str, layers: int) -> dict[str, Any]:
    """Return the changes of config.json that leave the first layers of a model."""
    whole = MODELS[name]
    inner = whole.get("text_config", whole)
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if (kinds := inner.get("layer_types")) is not None:
        changes["layer_types"] = kinds[:layers]
    return changes if inner is whole else {"text_config": inner | changes}


@dataclass(frozen=True)
class Schedules:
    """Random schedules for a row of a model, which every rank runs alike.

    Attributes:
        layers: how many of the model's layers there are; None is all.
    """

    name: str
    count: int
    sizes: Sizes
    layers: int | None = None
    deterministic: bool = False

    def follow(self, parallel: TensorParallel, connection: Connection[Any, Any]) -> None:
        """Run them as a rank behind rank 0, and wait for that to end."""
        self.run(parallel)
        with suppress(EOFError, ConnectionResetError):
            connection.recv()

    def run(self, parallel: TensorParallel = ALONE) -> dict[str, dict[str, int]]:
        """Run the row over four kinds of engines, two on a CPU. In a third of the schedules the
        tokens of the row alone are scored, else the row generates them, unless it diffuses.

        Counted are schedules that gave the row other bits, by kind of engine and by first cause,
        and what they have met.
        """
        on_gpu, draws = DEVICE.type == "cuda", random.Random(0)
        if self.deterministic and on_gpu:
            keep_one_order()
        by_kind, by_cause, seen = Counter[str](), Counter[str](), Counter[str]()
        config = model_config(self.name)
        model = dummy_model(
            self.name,
            DEVICE,
            parallel=parallel,
            vision=config.vision is not None,
            **fewer_layers(self.name, self.layers or config.num_layers),
        )
        tape, reference = Tape(self.sizes.tokens + 1024, DEVICE), None
        diffuses = model.config.diffusion is not None
        kinds = [*product((False,) if diffuses else (False, True), (False, True)[: 1 + on_gpu])]
        with tape.watching(model):
            for number, (drafts, graphs) in enumerate(kinds):
                probe = Probe(
                    model,
                    tape,
                    self.sizes,
                    drafts=drafts,
                    graphs=graphs,
                    deterministic=self.deterministic,
                )
                reference = reference or probe.run(Schedule(), draws)
                kind = f"{'drafts' if drafts else 'plain'}, {'graphs' if graphs else 'eager'}"
                for turn, _ in enumerate(range(number, self.count, len(kinds))):
                    answer = reference.tokens if turn % 3 == 2 and not diffuses else None
                    schedule = Schedule.drawn(draws, self.sizes.rows, self.sizes.blocks)
                    found = probe.run(schedule, draws, answer)
                    seen["scored"] += answer is not None
                    seen["prefix hits"] += found.output.num_cached_tokens > 0
                    seen["preempted"] += found.output.num_preemptions
                    seen["accepted drafts"] += found.output.counts.get("num_accepted_tokens", 0)
                    if cause := first_difference(tape, reference, found, len(probe.prompt)):
                        by_cause[cause] += 1
                        by_kind[kind] += 1
                print(f"{self.name}, {kind}: {by_kind[kind]} schedules with other bits", flush=True)
                del probe
                gc.collect()
                if on_gpu:
                    torch.cuda.empty_cache()
        causes = dict(by_cause.most_common())
        return {"by_cause": causes, "by_kind": dict(by_kind), "seen": dict(seen)}


def _lead(schedules: Schedules, ranks: int, results: Connection[Any, Any]) -> None:
    """Run schedules as rank 0 of several, in a process of its own, and send what was counted."""
    processes = RankProcesses(ranks, schedules, DEVICE.type)
    with processes.starting():
        results.send(schedules.run(processes.parallel))
    processes.close()
    end_process(0)


def _run_divided(schedules: Schedules, ranks: int) -> dict[str, dict[str, int]]:
    context = get_context("spawn")
    results, theirs = context.Pipe()
    process = context.Process(target=_lead, args=(schedules, ranks, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, dict[str, int]] = results.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"rank 0 has ended with {process.exitcode}") from None
    process.join()
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=commas(str, MODELS), default=[*LAYERS])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--deterministic", action="store_true", help="with engine.deterministic")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that divide the weights")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a row beside random other rows, cut into random chunks, with CUDA graphs or not, with
    drafts or not, after a prefix hit or not, generated or scored; say how often it keeps the bits
    that it has alone, and else the first operation whose result differs.

    It needs a GPU for figures; on a CPU, with smaller batches, no bit may differ.
    """
    sizes, results = ON_GPU if DEVICE.type == "cuda" else ON_CPU, []
    for name in options.models:
        layers, count = LAYERS.get(name), options.schedules
        schedules = Schedules(name, count, sizes, layers, options.deterministic)
        ranks = options.ranks
        found = schedules.run() if ranks == 1 else _run_divided(schedules, ranks)
        kept = f"{count - sum(found['by_kind'].values())} of {count} schedules equal"
        on = "" if ranks == 1 else f" on {ranks} ranks"
        print(f"{name}, {layers or 'all'} layers{on}: {kept}; {found}", flush=True)
        results.append(
            {"model": name, "layers": layers, "ranks": ranks, "schedules": count, **found}
        )
    return results
