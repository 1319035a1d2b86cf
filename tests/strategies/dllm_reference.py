"""Block-diffusion decoding of one sequence, as plainly as it can be written.

SDAR (arXiv 2510.06303): text is generated block by block on a grid from position 0; a block starts
masked and is denoised in steps, each of which keeps some of the tokens that it draws. Every forward
here reads the whole sequence anew under an explicit mask: no cache, no batch, no code of the engine
but `kernels.philox`, which specifies the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from batchgen.engine.sampling_params import SamplingParams
from batchgen.kernels.philox import Stream, gumbel_noise, philox

INF = float("inf")
Forward = Callable[[list[int]], Tensor]
"""Token ids of whole blocks → logits [n, V] float32; those at i are of the token AT i."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of the strategy and the model.

    Attributes:
        unmasking: `sequential`, `low_confidence_static` or `low_confidence_dynamic`.
        denoising_steps: of a block, for the first two; block_length if None.
        eos: ids that end a row unless its parameters ignore them.
    """

    block_length: int
    mask_token_id: int
    unmasking: str
    denoising_steps: int | None = None
    confidence_threshold: float = 0.9
    eos: tuple[int, ...] = ()
    max_model_len: int = 2**40


@dataclass
class Generated:
    """What one sequence became; lists are as long as token_ids unless they say otherwise.

    Attributes:
        step_map: 1 + how many steps of this row had unmasked something before the token's step.
        top_logprobs: of each token up to `params.top_logprobs` pairs of id and log-probability.
        confidences: what the unmasking saw of each token.
        steps: of each block, also of what was cut off, how many positions each step unmasked.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    step_map: list[int] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"

    @property
    def num_forwards(self) -> int:
        """Denoise steps; no commit is counted."""
        return sum(map(len, self.steps))


@dataclass(frozen=True)
class Token:
    """One position's draw in one step."""

    token_id: int
    confidence: float
    logprob: float
    top_logprobs: list[tuple[int, float]]


def generate(
    forward: Forward, prompt: Sequence[int], params: SamplingParams, options: Options
) -> Generated:
    """Denoise block after block until one holds a stop or the last token that there may be."""
    assert not params.has_penalties and not params.stop, "not in the reference"
    length = options.block_length
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else options.eos)}
    most = min(params.max_new_tokens, options.max_model_len - len(prompt))
    assert most >= 1
    out = Generated()
    ids = list(prompt[: len(prompt) - len(prompt) % length])
    known = list(prompt[len(ids) :])  # the tail of the prompt, in the first block only
    while True:
        earlier = sum(count > 0 for block in out.steps for count in block)
        steps = denoise(forward, ids, known, len(prompt), stop_ids, params, options)
        placed: dict[int, tuple[Token, int]] = {}
        for tokens in steps:
            placed |= {at: (token, earlier + 1) for at, token in tokens.items()}
            earlier += len(tokens) > 0
        out.steps.append([len(tokens) for tokens in steps])
        ids += known + [placed[at][0].token_id for at in sorted(placed)]
        known = []
        assert len(ids) % length == 0
        for at in sorted(placed):
            token, step = placed[at]
            out.token_ids.append(token.token_id)
            out.logprobs.append(token.logprob)
            out.top_logprobs.append(token.top_logprobs)
            out.confidences.append(token.confidence)
            out.step_map.append(step)
            count = len(out.token_ids)
            if token.token_id in stop_ids and count >= params.min_new_tokens:
                out.finish_reason = "stop"
                return out
            if count == most:
                return out


def denoise(
    forward: Forward,
    ids: Sequence[int],
    known: Sequence[int],
    prompt_len: int,
    stop_ids: set[int],
    params: SamplingParams,
    options: Options,
) -> list[dict[int, Token]]:
    """One block: of each step, the tokens that it unmasked, by absolute position.

    Args:
        ids: all whole blocks before.
        known: the block's first tokens.
    """
    start, end = len(ids), len(ids) + options.block_length
    block: dict[int, int] = dict(enumerate(known, start))
    steps: list[dict[int, Token]] = []
    while len(block) < options.block_length:
        inputs = [block.get(at, options.mask_token_id) for at in range(start, end)]
        logits = forward([*ids, *inputs])[start:end].float()
        drawn: dict[int, Token] = {}
        for at in range(start, end):
            if at not in block:
                banned = stop_ids if at < prompt_len + params.min_new_tokens else set()
                drawn[at] = draw(logits[at - start], at, len(steps), banned, params)
        chosen = choose(drawn, len(steps), options)
        steps.append({at: drawn[at] for at in chosen})
        block |= {at: drawn[at].token_id for at in chosen}
    return steps


def choose(drawn: dict[int, Token], step: int, options: Options) -> list[int]:
    """The positions that a step unmasks of those that are masked."""
    places = sorted(drawn)
    by_confidence = sorted(places, key=lambda at: (-drawn[at].confidence, at))
    if options.unmasking == "low_confidence_dynamic":
        limit = float(torch.tensor(options.confidence_threshold, dtype=torch.float32))
        return [at for at in places if drawn[at].confidence > limit] or by_confidence[:1]
    count = schedule(options)[step]
    if options.unmasking == "low_confidence_static":
        return by_confidence[:count]
    assert options.unmasking == "sequential"
    return places[:count]


def schedule(options: Options) -> list[int]:
    """How many positions each step of a block unmasks."""
    length = options.block_length
    counts = [0] * (length if options.denoising_steps is None else options.denoising_steps)
    for i in range(length):
        counts[i % len(counts)] += 1
    return counts


def draw(
    logits: Tensor, position: int, step: int, banned: set[int], params: SamplingParams
) -> Token:
    """From logits [V] of one position."""
    law = process(logits, banned, params)
    scores = law
    if not params.greedy:
        seed = torch.tensor([(params.seed + 2**63) % 2**64 - 2**63])
        words = philox(seed, torch.tensor([position]), step, Stream.SAMPLE, len(logits))
        scores = law + gumbel_noise(words)[0]
    token = int(scores.argmax())
    source = law if params.logprobs_mode == "processed" else logits
    logprobs: list[float] = source.log_softmax(-1).tolist()
    order = sorted(range(len(logits)), key=lambda i: (-logprobs[i], i))
    top = [(i, logprobs[i]) for i in order[: params.top_logprobs] if logprobs[i] > -INF]
    return Token(token, float(law.softmax(-1)[token]), logprobs[token], top)


def process(logits: Tensor, banned: set[int], params: SamplingParams) -> Tensor:
    """Ban, temperature, top-k, top-p, min-p: [V], -inf where a token is excluded.

    Tokens that tie with the last that a filter keeps are kept.
    """
    out = logits.clone()
    for token in banned & set(range(len(out))):
        out[token] = -INF
    if out.max() == -INF:
        out = logits.clone()  # no other token is left: the ban is void
    if params.greedy:
        return out
    if params.temperature != 1:
        out = (out - out.max()) / params.temperature
    if params.top_k:
        out[out < out.sort(descending=True).values[: params.top_k][-1]] = -INF
    if params.top_p < 1:
        values = out.sort(descending=True).values
        mass = values.softmax(-1).double().cumsum(-1)
        before = torch.cat((mass.new_zeros(1), mass[:-1]))
        out[out < values[before < params.top_p].min()] = -INF
    if params.min_p:
        out[out.softmax(-1) < params.min_p * out.softmax(-1).max()] = -INF
    return out


def block_causal(num_tokens: int, block_length: int) -> Tensor:
    """[num_tokens, num_tokens] bool: query i sees key j of its own block and of all before."""
    block = torch.arange(num_tokens) // block_length
    return block.unsqueeze(1) >= block


def model_forward(model: Any, block_length: int) -> Forward:
    """Of a causal model of transformers, given the mask in its place.

    Args:
        model: with attention `eager` (or `sdpa`), in float32.
    """

    def forward(ids: list[int]) -> Tensor:
        seen = block_causal(len(ids), block_length)
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0]
        return logits

    return forward
