"""A model of lighteval that is served by batchgen's engine.

    lighteval custom MODEL[,KEY=VALUE…] .../batchgen/plugins/lighteval_model.py TASKS

Keys are arguments of `LLM` and of `SamplingParams`, and `use_chat_template` and `system_prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from lighteval.models import abstract_model
from lighteval.models.custom.custom_model import CustomModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.models.utils import uses_chat_template
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.tasks.requests import Doc
from lighteval.utils.cache_management import SampleCache

from batchgen.plugins.harness_requests import (
    EngineAnswers,
    Scored,
    cut_left,
    each_once,
    rolling_windows,
)
from batchgen.python.llm import LLM
from batchgen.python.params import PARAMETER_NAMES, SamplingParams
from batchgen.util.errors import ConfigError


class BatchgenModel(abstract_model.LightevalModel):  # type: ignore[misc]
    """All documents of a task go to the engine at once. lighteval takes the one class of its models
    that this file has."""

    def __init__(self, config: CustomModelConfig) -> None:
        """Load the model that the config's `model_name` names, with its keys."""
        self.config = config
        name, *pairs = config.model_name.split(",")
        keys: dict[str, Any] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise ConfigError(f"{pair!r} behind the model's name must be KEY=VALUE")
            keys[key] = yaml.safe_load(value)
        chat = keys.pop("use_chat_template", None)
        system = keys.pop("system_prompt", config.system_prompt)
        self._sampling = {key: keys.pop(key) for key in list(keys) if key in PARAMETER_NAMES}
        self._llm = LLM(name, **keys)
        self._answers = EngineAnswers(self._llm)
        if self.tokenizer is None:
            raise ConfigError(f"{name} comes without a tokenizer, and lighteval asks for texts")
        self._chat = uses_chat_template(tokenizer=self.tokenizer, override_chat_template=chat)
        self._prompts = PromptManager(self._chat, self.tokenizer, system)
        self._cache = SampleCache(config)  # lighteval asks for it; nothing is put into it

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._llm.tokenizer

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer adds special tokens: a chat template has written them already."""
        return not self._chat

    @property
    def max_length(self) -> int:
        """The most tokens of a row."""
        return self._llm.engine.max_model_len

    def cleanup(self) -> None:
        """Give the device's memory back."""
        self._llm.close()

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """Generate to each document as many samples as it asks for."""
        texts = [self._prompts.prepare_prompt(doc) for doc in docs]
        params = [self._params(doc) for doc in docs]
        prompts = [
            list(self.tok_encode(text))[-max(1, self.max_length - own.max_new_tokens) :]
            for text, own in zip(texts, params, strict=True)
        ]
        responses = []
        for text, doc, outputs in zip(
            texts, docs, self._llm.generate(prompts, params), strict=True
        ):
            if outputs[0].error is not None:
                raise ConfigError(f"{_name(doc)}: {outputs[0].error}")
            responses.append(
                ModelResponse(
                    input=text,
                    input_tokens=outputs[0].prompt_token_ids,
                    text=[output.text for output in outputs],
                    output_tokens=[output.token_ids for output in outputs],
                )
            )
        return responses

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """Score the choices of each document; prompt and choice are tokenised apart, as lighteval's
        `accelerate` backend does it."""
        texts = [self._prompts.prepare_prompt(doc) for doc in docs]
        asked = []
        for text, doc in zip(texts, docs, strict=True):
            contexts, choices = self.tok_encode_pair(text, doc.choices, pairwise=True)
            pairs = zip(contexts, choices, strict=True)
            asked.append([cut_left(one, two, self.max_length, _name(doc)) for one, two in pairs])
        return self._scored(texts, asked)

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """Score the whole prompt of each document, in windows if it is longer than the model."""
        texts = [self._prompts.prepare_prompt(doc) for doc in docs]
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        asked = []
        for text, doc in zip(texts, docs, strict=True):
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = rolling_windows(ids, eos if bos is None else bos, self.max_length - 1)
            asked.append([cut_left(*pair, self.max_length, _name(doc)) for pair in windows])
        return self._scored(texts, asked)

    def _params(self, doc: Doc) -> SamplingParams:
        given = {"max_new_tokens": doc.generation_size, **self._sampling, "n": doc.num_samples}
        if not self._chat and "stop" not in given:  # the end of a turn ends answers of chats
            given["stop"] = doc.stop_sequences or None
        params = SamplingParams(**{"temperature": 0.0, **given})
        if params.n > 1 and params.temperature == 0:
            raise ConfigError(
                f"{_name(doc)} asks for {params.n} samples, which are equal at temperature 0: "
                "write temperature=… behind the model's name"
            )
        return params

    def _scored(
        self, texts: Sequence[str], asked: Sequence[Sequence[Scored]]
    ) -> list[ModelResponse]:
        flat = [one for own in asked for one in own]
        results = iter(each_once(flat, self._answers.score))
        responses = []
        for text, own in zip(texts, asked, strict=True):
            found = [next(results) for _ in own]
            responses.append(
                ModelResponse(
                    input=text,
                    input_tokens=list(own[0].prompt) if own else [],
                    output_tokens=[list(one.answer) for one in own],
                    logprobs=[logprob for logprob, _ in found],
                    argmax_logits_eq_gold=[is_greedy for _, is_greedy in found],
                )
            )
        return responses


def _name(doc: Doc) -> str:
    """How messages call a document."""
    return f"{doc.task_name}/{doc.id}"
