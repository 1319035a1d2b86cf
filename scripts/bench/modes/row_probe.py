"""One row (the probe) in an engine, beside other rows that a schedule describes, with a digest of
each operation's result for each of its tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from workloads import prompt_vocab

from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.operation_digests import Tape
from batchgen.engine.rows.sequence import Sequence as Row
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.engine.vision.image import DIGEST_BYTES, Image
from batchgen.engine.vision.image_span import ImageRules
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy

_BLOCK = 16
"""Tokens of a KV block."""
_NEW_TOKENS = 24  # the most that the probe generates
_BLOCK_LENGTH = 4
"""The positions that a diffusion model denoises together."""


class Schedule(NamedTuple):
    """What surrounds the probe.

    Attributes:
        before, after: the prompt and output lengths of rows that join before and after the probe.
        steps: the engine's steps before the probe joins.
        shared: the tokens of the probe's prompt that another row has computed (a prefix hit).
        most_tokens, chunk_tokens: the most tokens of a prefill alone, and beside decoding rows.
        preempted: after how many generated tokens the probe is preempted; 0: never.
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
    """The probe's output, the tokens after its prompt (generated or scored) and their
    log-probabilities, and the digests [operations, tokens] of its KV slots."""

    output: RequestOutput
    tokens: Sequence[int]
    logprobs: Sequence[float]
    digests: Tensor


class Pictures:
    """Draws pictures of up to `most` tokens in height and width, for a model with these rules."""

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
    """The sizes of a probe and its engine."""

    tokens: int  # of the paged cache
    rows: int  # the most rows in flight
    blocks: int  # KV blocks that the probe's prompt fills, before one token more
    side: int  # the most tokens of a picture's height and width


class Probe:
    """The probe, with an engine of its own that runs it under schedules."""

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
        token_bytes = paged_token_bytes(model.cache_specs, (), model.dtype)
        config = EngineConfig(
            max_num_seqs=sizes.rows,
            max_batched_tokens=4096 + 256,
            chunk_tokens=256,
            max_model_len=1024 * (1 + sizes.blocks // 64),
            kv_cache_gib=sizes.tokens * token_bytes / 2**30,
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
        # The probe's digests are copied when its KV blocks are freed, before others overwrite them.
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
        """Free a row's blocks, after copying the digests if the row is the probe."""
        if row.request_id == "probe":
            slots = torch.tensor(row.block_table, device=self._tape.plane.device)[:, None] * _BLOCK
            slots = (slots + torch.arange(_BLOCK, device=slots.device)).flatten()
            self._digests = self._tape.plane[:, slots].clone()
        self._free(row)

    def run(
        self, schedule: Schedule, draws: random.Random, answer: Sequence[int] | None = None
    ) -> Result:
        """Run the probe to its end under a schedule, and abort the other rows then. The probe
        generates tokens, or scores those of `answer`."""
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
        # Negative penalties make the row repeat itself, so that drafts are accepted.
        params = RequestParams(temperature=0, max_new_tokens=_NEW_TOKENS, logprobs=True)
        if answer is not None:
            params = RequestParams(max_new_tokens=0)
        elif not self._diffuses:
            params = replace(params, presence_penalty=-2, frequency_penalty=-2)
        images = [image for _, image in self._images]
        self.engine.add_request("probe", self.prompt, params, answer, images)

    def _company(self, length: int, draws: random.Random) -> tuple[list[int], list[Image]]:
        """Draw a prompt of `length` tokens for another row; a third of them have a picture too."""
        ids = [draws.randrange(self._vocab) for _ in range(length)]
        if self._pictures is None or draws.random() > 1 / 3:
            return ids, []
        inside, image = self._pictures.draw(draws)
        place = draws.randint(0, length)
        return [*ids[:place], *inside, *ids[place:]], [image]

    def _beginning(self, length: int) -> tuple[list[int], list[Image]]:
        """Return about the first `length` tokens of the probe's prompt: it ends after a picture,
        not inside."""
        for places, _ in self._images:
            if length in places:
                length = places.stop
        images = [image for places, image in self._images if places.stop <= length]
        return self.prompt[:length], images

    def _preempt(self, generated: int) -> bool:
        """Preempt the probe if it has generated this many tokens. Return whether it was."""
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
        self.blocks._hashes.clear()
