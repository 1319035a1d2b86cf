"""The Python interface: prompts in, finished requests out, without files or configuration."""

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
from batchgen.model.draft_model import open_draft
from batchgen.model.open_model import DeviceName, DtypeName, open_model
from batchgen.strategies.ar.strategy import ARStrategy

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or a conversation: a list of {"role": …, "content": …}."""


class LLM:
    """A model and its engine.

        llm = LLM("Qwen/Qwen3-0.6B")
        for output in llm.stream(["The capital of France is"], SamplingParams(max_new_tokens=8)):
            print(output.request_id, output.text)

    Args:
        model: hub name, folder with safetensors and tokenizer, `.gguf` file, or
            `package://PACKAGE/PATH` in an installed Python package.
        revision: commit, branch or tag of a hub model.
        dtype: `auto` is the checkpoint's on a GPU and float32 on a CPU.
        device: `auto` is a GPU if there is one.
        load_format: `dummy` makes random weights from the configuration alone.
        strategy: the decoding paradigm, `ARStrategy()` unless given. It holds the state of its
            rows, so the LLM works with a copy: one object can be given to several.
        config: batch and memory sizes.

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
    ) -> None:
        opened = open_model(model, revision, load_format)
        config = config or EngineConfig()
        strategy = ARStrategy() if strategy is None else copy.deepcopy(strategy)
        max_model_len = config.model_len(opened.config.max_position_embeddings)
        draft = open_draft(strategy, opened, max_model_len)
        weights = opened.load(dtype, device)
        draft_weights = None if draft is None else draft.load_beside(weights)
        self.tokenizer: PreTrainedTokenizerBase | None = opened.tokenizer
        self.engine: LLMEngine = opened.engine(weights, strategy, config, draft_weights)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
    ) -> list[list[RequestOutput]]:
        """The n outputs of each prompt, in order; `stream` says more."""
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
        """Outputs as they finish; `request_id` is "PROMPT-SAMPLE", both counted from 0.

        A sample's tokens depend on its prompt, parameters and those two numbers: the seed of
        `params` is the seed of the call, from which each sample's own is derived. Abandoning the
        iterator drops what has not finished; an LLM serves one iterator at a time.

        Args:
            prompts: a list, of any mix of kinds.
            params: for all prompts, or one for each; None is `SamplingParams()`.
            n: samples of each prompt.

        Raises:
            RequestError: a prompt can never be served (too long, say); before any is run.
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
    prompt, sample = output.request_id.split("-")
    return int(prompt), int(sample)
