"""Ways to run rows in engines of one model, and the model in transformers, for check_parity.py."""

from __future__ import annotations

import argparse
import functools
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.engine_stats import EngineStats
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.inputs.model.open_model import OpenedModel
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

LOGPROB_LIMIT = 1e-4
"""By how much log-probabilities in float32 may differ."""
GREEDY: dict[str, Any] = {"temperature": 0}


@dataclass(frozen=True)
class Row:
    """A prompt with its sampling options."""

    kind: str  # "greedy" or "sampled"
    prompt: list[int]
    params: RequestParams


@dataclass(frozen=True)
class Way:
    """A way to run the rows.

    Attributes:
        k: the drafts of a step; 0 for the strategy `ar`, which has none.
        draft: the draft model: `random` has random weights, `rough` the model's with noise, and
            `perfect` is the model itself. None: drafts come from n-grams.
        pool: whether n-grams are looked up in all rows, not only in the row itself.
        hard: whether prefills are chunked, and rows preempt each other in a small cache.
        overlap: whether the host launches a step before it has read the results of the last one.
        any_width: whether each step has a random number of drafts, up to k.
        seqs: the most rows at once.
    """

    k: int = 0
    draft: str | None = None
    pool: bool = False
    hard: bool = False
    overlap: bool = False
    any_width: bool = False
    seqs: int = 17

    @property
    def group(self) -> str:
        """The name by which `--ways` selects this way: "ar", "ngram" or "draft"."""
        return ("draft" if self.draft else "ngram") if self.k else "ar"

    def __str__(self) -> str:
        flags = [name for name in ("pool", "hard", "overlap", "any_width") if getattr(self, name)]
        return ", ".join([f"{self.draft or self.group} k={self.k}, {self.seqs} rows", *flags])

    def strategy(self) -> Strategy:
        """Make the decoding strategy of this way."""
        if not self.k:
            return ARStrategy()
        strategy_class = AnyWidth if self.any_width else ARSpecStrategy
        return strategy_class(
            proposer="draft" if self.draft else "ngram",
            num_spec_tokens=self.k,
            adaptive=False,
            ngram_pool=self.pool,
        )


class AnyWidth(ARSpecStrategy):
    """Speculative decoding in which each step has one of its possible widths, at random."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._random = random.Random(0)

    def step_width(self, num_rows: int) -> int:
        return self._random.choice(self.models["target"].widths)


WAYS = (
    Way(hard=True, seqs=3),
    Way(hard=True, overlap=True),
    Way(overlap=True, seqs=64),
    Way(k=3),
    Way(k=1, overlap=True, seqs=64),
    Way(k=5, hard=True, any_width=True),
    Way(k=7, hard=True, overlap=True),
    Way(k=5, pool=True, hard=True),
    Way(k=3, draft="random", hard=True),
    Way(k=1, draft="rough", hard=True, overlap=True),
    Way(k=5, draft="rough", hard=True, any_width=True),
    Way(k=3, draft="perfect"),
    Way(k=7, draft="perfect", hard=True, overlap=True),
)


@dataclass
class Runs:
    """Runs the same rows with one model in engines of many kinds.

    Attributes:
        args: the options of check_parity.py.
        drafts: the draft models that were made so far, by `Way.draft`.
    """

    opened: OpenedModel
    args: argparse.Namespace
    rows: list[Row]
    drafts: dict[str, CausalLM] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.load()

    def load(self) -> CausalLM:
        return self.opened.load(self.args.dtype, self.args.device)

    def run(
        self, way: Way, config: EngineConfig | None = None, model: CausalLM | None = None
    ) -> tuple[list[RequestOutput], EngineStats]:
        """Run the rows in a new engine. Return their outputs in order, and the engine's statistics.
        `config` and `model` replace the way's own configuration and `self.model`."""
        model, draft, strategy = model or self.model, self._draft(way.draft), way.strategy()
        others = {} if draft is None else {"draft": draft}
        config = config or self._config(way, [model, *others.values()])
        engine = self.opened.engine(model, strategy, config, others)
        if way.hard:
            # The scheduler learns the length of answers. After these short ones it admits more rows
            # than the cache can hold, so that they preempt each other.
            short = RequestParams(temperature=0, max_new_tokens=2)
            for index in range(engine.max_num_seqs):
                engine.add_request(f"short {index}", self.rows[0].prompt[:8], short)
        columns = tuple(column.name for column in strategy.columns)
        for index, row in enumerate(self.rows):
            params = replace(row.params, seed=index, columns=columns)
            engine.add_request(str(index), row.prompt, params)
        outputs: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
        return [outputs[str(index)] for index in range(len(self.rows))], engine.stats

    def _config(self, way: Way, models: list[CausalLM]) -> EngineConfig:
        """Configure a way; a hard one has a cache for little more than the prompts in flight."""
        graph = self.args.device == "cuda"
        config = EngineConfig(overlap=way.overlap, max_num_seqs=way.seqs, cuda_graph=graph)
        if not way.hard:
            return replace(config, chunk_tokens=0, kv_cache_gib=0.5)
        size = config.block_size
        prompts = [len(row.prompt) for row in self.rows]
        longest = max(len(row.prompt) + row.params.max_new_tokens for row in self.rows)
        # Three rows share a prompt; each has blocks of its own for what is generated.
        blocks = way.seqs * (sum(prompts) / len(prompts) / size / 3 + 2)
        per_block = size * sum(paged_token_bytes(m.cache_specs, (), m.dtype) for m in models)
        num_blocks = 1.5 + max(-(-longest // size), round(blocks))
        return replace(
            config,
            max_batched_tokens=100,
            chunk_tokens=32,
            kv_cache_gib=num_blocks * per_block / 2**30,
        )

    def _draft(self, name: str | None) -> CausalLM | None:
        """Return the draft model of this name (`Way.draft`)."""
        if name is None:
            return None
        if name not in self.drafts:
            self.drafts[name] = self.load()
            for weight in self.drafts[name].parameters():
                generator = torch.Generator().manual_seed(weight.numel())
                deviation = float(weight.float().std()) if weight.numel() > 1 else 0.0
                noise = torch.empty(weight.shape).normal_(0, deviation, generator=generator)
                if name == "random":
                    weight.copy_(noise)
                elif name == "rough":
                    weight.add_(0.12 * noise.to(weight))
        return self.drafts[name]


class Reference:
    """The model in transformers, run over whole sequences. Each sequence is computed once."""

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        folder, file = (path.parent, path.name) if path.is_file() else (path, None)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        self._model: torch.nn.Module = model.to(device)  # type: ignore[arg-type]
        self._device = device
        self._logprobs = functools.cache(self._compute)

    def logprobs(self, output: RequestOutput) -> Tensor:
        """Compute the log-probabilities of the whole vocabulary at each of the T tokens of an
        answer, [T, V] float32 on the CPU."""
        return self._logprobs(tuple(output.prompt_token_ids), tuple(output.token_ids))

    @torch.inference_mode()
    def _compute(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([prompt + answer], device=self._device)
        logits: Tensor = self._model(ids, use_cache=False).logits
        return logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()

    def agrees(self, output: RequestOutput) -> bool:
        """Return whether greedy decoding gives this answer, with log-probabilities within
        `LOGPROB_LIMIT`."""
        truth, ids = self.logprobs(output), torch.tensor(output.token_ids)
        found = torch.from_numpy(output.columns["logprobs"])
        near = (truth.gather(1, ids[:, None])[:, 0] - found).abs().max() < LOGPROB_LIMIT
        return bool(near) and torch.equal(truth.argmax(-1), ids)
