"""Runs prompts through the engine of an `LLM`, for its methods `generate`, `chat` and `stream`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from tqdm import tqdm

from batchgen.api.python.call_prompts import PromptIds, ReadPrompt, TokenizedPrompt
from batchgen.api.python.output import Output
from batchgen.api.python.params import SamplingParams
from batchgen.api.python.streams import StreamRequest, Streams
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.request_params import sample_params


def generate_outputs(
    streams: Streams,
    prompts: list[ReadPrompt],
    params: list[SamplingParams],
    ids: PromptIds,
    *,
    with_bar: bool,
) -> list[list[Output]]:
    """Generate all outputs, with a progress bar on stderr if `with_bar`.

    Returns:
        For each prompt, its outputs in the order of their sample numbers.
    """
    engine = streams.engine
    outputs: list[list[Output]] = [[] for _ in prompts]
    tokens = engine.generated_tokens
    started = time.monotonic()
    total = sum(prompt_params.n for prompt_params in params)
    with tqdm(total=total, unit="output", disable=not with_bar, dynamic_ncols=True) as bar:
        for output in stream_outputs(streams, prompts, params, ids):
            outputs[output.prompt_index].append(output)
            seconds = max(time.monotonic() - started, 1e-9)
            speed = (engine.generated_tokens - tokens) / seconds
            bar.set_postfix_str(f"{speed:,.0f} tok/s", refresh=False)
            bar.update()
    for samples in outputs:
        samples.sort(key=lambda output: output.sample_index)
    return outputs


def stream_outputs(
    streams: Streams, prompts: list[ReadPrompt], params: list[SamplingParams], ids: PromptIds
) -> Iterator[Output]:
    """Check the prompts, and return an iterator that yields outputs as they finish (`LLM.stream`).

    Raises:
        ValueError: the LLM was closed, or its model cannot take such prompts.
    """
    streams.engine  # noqa: B018  (raises an error if it was closed)
    ids.check(prompts)
    return _outputs(streams, prompts, params, ids)


def _outputs(
    streams: Streams, prompts: list[ReadPrompt], params: list[SamplingParams], ids: PromptIds
) -> Iterator[Output]:
    """Tokenize the prompts, run a request for each sample, and yield the outputs."""
    requests = []
    for index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
        try:
            tokenized: TokenizedPrompt | RequestError = ids.of(prompt)
        except RequestError as error:
            tokenized = error
        for sample in range(prompt_params.n):
            seeded = sample_params(prompt_params.request, str(index), sample)
            requests.append(StreamRequest(index, sample, tokenized, seeded))
    with closing(streams.run(requests)) as stream:
        for request, finished in stream:
            index, sample = request.prompt_index, request.sample_index
            yield Output.of(finished, prompts[index].raw, index, sample)
