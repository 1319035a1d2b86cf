"""The Python interface: it generates from a list of prompts, without files or configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import cast

from transformers import PreTrainedTokenizerBase

from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import LoadFormat
from batchgen.engine.outputs import RequestOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.strategy import Strategy
from batchgen.fingerprint import derive_seed
from batchgen.model.open_model import DeviceName, DtypeName, open_model
from batchgen.model.other_models import open_others, strategy_heads
from batchgen.strategies.ar.strategy import ARStrategy

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""A prompt is a text, a list of token ids, or a conversation of {"role": …, "content": …}."""


class LLM:
    """A model with an engine that generates from prompts.

        llm = LLM("Qwen/Qwen3-0.6B")
        for output in llm.stream(["The capital of France is"], SamplingParams(max_new_tokens=8)):
            print(output.request_id, output.text)

    Args:
        model: a hub name, a folder with safetensors and tokenizer, a `.gguf` file, or
            `package://PACKAGE/PATH` for a path inside an installed Python package.
        revision: the commit, branch or tag of a hub model.
        dtype: the dtype of the weights and activations; `auto` is the checkpoint's dtype on a GPU
            and float32 on a CPU.
        device: where the model runs; `auto` is a GPU if there is one.
        load_format: `auto` reads what lies at the path, `gguf` insists on a GGUF file, and `dummy`
            makes random weights from the configuration alone.
        strategy: the decoding paradigm; None means `ARStrategy()`. A strategy holds the state of
            its rows, so the LLM works with a copy, and one object can be given to several LLMs.
        config: batch and memory sizes; None means the defaults.
        context_columns: the names of columns of context scope that requests may ask for
            (`SamplingParams.columns`); each takes room in the paged cache.

    Attributes:
        tokenizer: the model's tokenizer; None if it has none.
        engine: the engine, which `stream` feeds.

    Raises:
        ValueError: the model cannot be found, is not supported, or does not fit; the message says
            what to do.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: DtypeName = "auto",
        device: DeviceName = "auto",
        load_format: LoadFormat = "auto",
        strategy: Strategy | None = None,
        config: EngineConfig | None = None,
        context_columns: Sequence[str] = (),
    ) -> None:
        opened = open_model(model, revision, load_format)
        config = config or EngineConfig()
        strategy = ARStrategy() if strategy is None else copy.deepcopy(strategy)
        longest = config.model_len(opened.config.max_position_embeddings)
        max_model_len = strategy.model_len(longest, opened.config)
        others = open_others(strategy, opened, max_model_len)
        heads = strategy_heads(strategy, opened.config)
        weights = opened.load(dtype, device, heads)
        beside = {name: other.load_beside(weights) for name, other in others.items()}
        self.tokenizer: PreTrainedTokenizerBase | None = opened.tokenizer
        self.engine: LLMEngine = opened.engine(
            weights, strategy, config, beside, context_columns=context_columns
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
    ) -> list[list[RequestOutput]]:
        """Generate n outputs for each prompt and return them all at the end.

        The arguments and errors are those of `stream`.

        Returns:
            For each prompt, in order, its n outputs in the order of the samples.
        """
        outputs: list[list[RequestOutput]] = [[] for _ in prompts]
        for output in sorted(self.stream(prompts, params, n), key=_indices):
            outputs[_indices(output)[0]].append(output)
        return outputs

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
    ) -> Iterator[RequestOutput]:
        """Generate n outputs for each prompt and yield them as they finish.

        The `request_id` of an output is "PROMPT-SAMPLE", the indices of its prompt and of its
        sample, both counted from 0. A sample's tokens depend on its prompt, its parameters and
        these two numbers: each sample's seed is derived from the seed in `params` and from them. If
        the iterator is abandoned, unfinished samples are dropped. An LLM serves only one iterator
        at a time.

        Args:
            prompts: the prompts, which may be of different kinds.
            params: the parameters for all prompts, or one for each; None means `SamplingParams()`.
            n: the number of samples of each prompt.

        Raises:
            RequestError: a prompt can never be served, for example because it is too long. This is
                raised before any prompt is run.
            ValueError: the parameters cannot be honoured.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of prompts; put the one string in a list")
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params for {len(prompts)} prompts: give one for each")
        pending: set[str] = set()
        try:
            for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                token_ids = self._token_ids(prompt)
                for sample in range(n):
                    request_id = f"{i}-{sample}"
                    seeded = replace(own, seed=derive_seed(own.seed, str(i), sample))
                    self.engine.add_request(request_id, token_ids, seeded)
                    pending.add(request_id)
            while pending:
                for output in self.engine.step():
                    pending.discard(output.request_id)
                    yield output
        finally:
            for request_id in pending:
                self.engine.abort(request_id)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, using the chat template for a conversation."""
        if not isinstance(prompt, str) and all(isinstance(item, Integral) for item in prompt):
            return [int(cast("int", item)) for item in prompt]
        if self.tokenizer is None:
            raise ValueError("the model comes without a tokenizer: give prompts as token ids")
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        ids = self.tokenizer.apply_chat_template(
            [dict(message) for message in prompt],  # type: ignore[arg-type]
            add_generation_prompt=True,
            return_dict=False,
        )
        return cast("list[int]", ids)


def _indices(output: RequestOutput) -> tuple[int, int]:
    """Return the indices of an output's prompt and sample."""
    prompt, sample = output.request_id.split("-")
    return int(prompt), int(sample)
