"""Block-diffusion decoding of one sequence, as plainly as it can be written.

SDAR (arXiv 2510.06303): text is generated block by block on a grid from position 0; a block starts
masked and is denoised in steps, each of which keeps some of the tokens that it draws. Every forward
here reads the whole sequence anew under an explicit mask: no cache, no batch, no code of the engine
but `kernels.philox`, which specifies the noise.

Rows with a constraint are unmasked from left to right (`denoise_guided`); what the constraint
allows comes from a regular expression, by trying every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Literal

import regex  # type: ignore[import-untyped]
import torch
from torch import Tensor

from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox

INF = float("inf")
Forward = Callable[[list[int]], Tensor]
"""Token ids of whole blocks → logits [n, V] float32; those at i are of the token AT i."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The numbers of strategy and model.

    Attributes:
        unmasking: a name of `strategies/dllm/rules`; the options of the rules are named as there.
        denoising_steps: of a block, for the rules that have it; block_length if None.
        eos: ids that end a row unless its parameters ignore them.
    """

    block_length: int
    mask_token_id: int
    unmasking: str
    denoising_steps: int | None = None
    confidence_threshold: float = 0.9
    min_tokens_per_step: int = 1
    entropy_bound: float = 0.1
    edit_threshold: float = 0.5
    max_edit_steps: int = 16
    shifted: bool = False
    sub_block_length: int | None = None
    eos: tuple[int, ...] = ()
    max_model_len: int = 2**40


@dataclass(frozen=True)
class Language:
    """The texts that a regular expression matches, each behind it a stop id.

    Attributes:
        pattern: of bytes.
        texts: id → the bytes that it spells; nothing for ids that are no text.
        cut: text → its tokens.
    """

    pattern: bytes
    texts: Sequence[bytes]
    cut: Callable[[str], Sequence[int]]

    def text(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.texts[i] for i in ids)

    def complete(self, ids: Sequence[int]) -> bool:
        return regex.fullmatch(self.pattern, self.text(ids)) is not None

    def allowed(self, ids: Sequence[int], stop_ids: set[int]) -> set[int]:
        """The tokens that may follow."""
        return {i for i in {*range(len(self.texts)), *stop_ids} if self.legal(ids, i, stop_ids)}

    def legal(self, ids: Sequence[int], token_id: int, stop_ids: set[int]) -> bool:
        """Whether the token may follow."""
        if token_id in stop_ids:
            return self.complete(ids)
        text = self.texts[token_id] if token_id < len(self.texts) else b""
        return bool(text) and self._begins(self.text(ids) + text)

    def begins(self, ids: Sequence[int], stop_ids: set[int]) -> bool:
        """Whether all of these may follow each other, up to the first stop id."""
        for i, token_id in enumerate(ids):
            if not self.legal(ids[:i], token_id, stop_ids):
                return False
            if token_id in stop_ids:
                break
        return True

    def forced(self, ids: Sequence[int], stop_ids: set[int]) -> list[int]:
        """The tokens of what every text that goes on has next, as far as it is whole characters
        and no stop id is among them."""
        start = text = self.text(ids)
        while not regex.fullmatch(self.pattern, text):
            ways = [text + bytes([byte]) for byte in range(256)]
            ways = [way for way in ways if self._begins(way)]
            if len(ways) != 1:
                break
            text = ways[0]
        tokens = self.cut(text[len(start) :].decode(errors="ignore"))
        return list(takewhile(lambda token: token not in stop_ids, tokens))

    def _begins(self, text: bytes) -> bool:
        return regex.fullmatch(self.pattern, text, partial=True) is not None


@dataclass
class Generated:
    """What one sequence became; lists are as long as token_ids unless they say otherwise.

    Attributes:
        step_map: 1 + how many steps of this row had unmasked something before the token's step.
        top_logprobs: of each token up to `params.top_logprobs` pairs of id and log-probability.
        confidences: what the unmasking saw of each token.
        steps: of each block, also of what was cut off, how many positions each step wrote.
        edits: position, step, old and new token of every replaced token, as they happened.
        ids: the prompt and all blocks, also what was cut off.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    step_map: list[int] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    edits: list[tuple[int, int, int, int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "constraint_conflict"] = "length"

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
    entropy: float = 0.0


def generate(
    forward: Forward,
    prompt: Sequence[int],
    params: RequestParams,
    options: Options,
    language: Language | None = None,
) -> Generated:
    """Denoise block after block until one holds a stop or the last token that there may be, or
    cannot be completed within the language."""
    assert not params.has_penalties and not params.stop, "not in the reference"
    length = options.block_length
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else options.eos)}
    most = min(params.max_new_tokens, options.max_model_len - len(prompt))
    assert most >= 1
    out = Generated()
    ids = list(prompt[: len(prompt) - len(prompt) % length])
    out.ids = ids
    known = list(prompt[len(ids) :])  # the tail of the prompt, in the first block only
    while True:
        earlier = sum(count > 0 for block in out.steps for count in block)
        of_row = (len(prompt), stop_ids, params, options)
        if options.shifted and not known and ids:
            steps = begin_block(forward, ids, *of_row)
        elif language is None:
            steps = denoise(forward, ids, known, *of_row)
        else:
            steps = denoise_guided(forward, ids, known, *of_row, language)
        placed: dict[int, tuple[Token, int]] = {}
        for tokens in steps:
            out.edits += [
                (at, earlier + 1, placed[at][0].token_id, token.token_id)
                for at, token in tokens.items()
                if at in placed
            ]
            placed |= {at: (token, earlier + 1) for at, token in tokens.items()}
            earlier += len(tokens) > 0
        out.steps.append([len(tokens) for tokens in steps])
        ids += known + [placed[at][0].token_id for at in sorted(placed)]
        known = []
        whole = len(ids) % length == 0
        assert whole or language is not None
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
        if not whole:
            out.finish_reason = "constraint_conflict"
            return out


def denoise(
    forward: Forward,
    ids: Sequence[int],
    known: Sequence[int],
    prompt_len: int,
    stop_ids: set[int],
    params: RequestParams,
    options: Options,
) -> list[dict[int, Token]]:
    """One block: of each step, the tokens that it wrote, by absolute position.

    Args:
        ids: all whole blocks before.
        known: the block's first tokens.
    """
    start, end = len(ids), len(ids) + options.block_length
    block: dict[int, int] = dict(enumerate(known, start))
    steps: list[dict[int, Token]] = []
    edits, without_mask = options.unmasking == "joint_threshold", 0
    given = set(block)
    while (is_masked := len(block) < options.block_length) or (
        edits and without_mask < options.max_edit_steps
    ):
        without_mask += not is_masked
        inputs = [block.get(at, options.mask_token_id) for at in range(start, end)]
        logits = unmasked(forward([*ids, *inputs]), options)
        logits = logits[start - 1 : end - 1] if options.shifted and start else logits[start:end]
        if options.shifted and not start:
            logits = torch.cat((logits[:1], logits[:-1]))  # the first token is always known
        drawn: dict[int, Token] = {}
        for at in range(start, end):
            if at not in block or (edits and at not in given):
                banned = stop_ids if at < prompt_len + params.min_new_tokens else set()
                token = draw(logits[at - start], at, len(steps), banned, params)
                assert token is not None
                drawn[at] = token
        left = {at: drawn[at] for at in drawn if at not in block}
        if left and options.sub_block_length:
            part = min(left) // options.sub_block_length
            left = {at: each for at, each in left.items() if at // options.sub_block_length == part}
        chosen = choose(left, len(steps), options)
        limit = float(torch.tensor(options.edit_threshold))
        chosen += [at for at in drawn if at in block and drawn[at].token_id != block[at]
                   and drawn[at].confidence > limit]  # fmt: skip
        steps.append({at: drawn[at] for at in chosen})
        block |= {at: drawn[at].token_id for at in chosen}
        if not is_masked and not chosen:
            break
    return steps


def begin_block(
    forward: Forward,
    ids: Sequence[int],
    prompt_len: int,
    stop_ids: set[int],
    params: RequestParams,
    options: Options,
) -> list[dict[int, Token]]:
    """One block whose first token is of the logits that end the blocks before."""
    start = len(ids)
    banned = stop_ids if start < prompt_len + params.min_new_tokens else set()
    first = draw(unmasked(forward([*ids]), options)[-1], start, 0, banned, params)
    assert first is not None
    of_row = (prompt_len, stop_ids, params, options)
    return [{start: first}, *denoise(forward, ids, [first.token_id], *of_row)]


def unmasked(logits: Tensor, options: Options) -> Tensor:
    """Float32 logits of a model that never says the mask token."""
    out = logits.float().clone()
    out[:, options.mask_token_id] = -INF
    return out


def denoise_guided(
    forward: Forward,
    ids: Sequence[int],
    known: Sequence[int],
    prompt_len: int,
    stop_ids: set[int],
    params: RequestParams,
    options: Options,
    language: Language,
) -> list[dict[int, Token]]:
    """`denoise` of a row in a language. The last step may leave positions masked: of the tokens
    that the language allows at the first of them, the parameters leave none. What a rule would
    replace is tried from left to right, beside all that the step has taken."""
    start, length = len(ids), options.block_length
    block, steps, conflict = list(known), list[dict[int, Token]](), False
    edits, without_mask = options.unmasking == "joint_threshold", 0
    while not conflict and (
        (is_masked := len(block) < length) or (edits and without_mask < options.max_edit_steps)
    ):
        without_mask += not is_masked
        first = start + len(block)
        inputs = block + [options.mask_token_id] * (length - len(block))
        logits = unmasked(forward([*ids, *inputs])[start : start + length], options)
        banned = [stop_ids if start + i < prompt_len + params.min_new_tokens else set()
                  for i in range(length)]  # fmt: skip
        draw_at = partial(_draw_at, logits, start, len(steps), banned, params)
        history, done = [*ids, *block][prompt_len:], len(block)
        run, conflict = run_in(
            language, history, length - done, partial(_shifted, draw_at, done),
            partial(permits, options, len(steps)), stop_ids,
        )  # fmt: skip
        steps.append({first + i: token for i, token in enumerate(run)})
        block += [token.token_id for token in run]
        places = range(len(known), done) if edits and not conflict else ()
        for place in places:
            token = draw_at(place, None)
            assert token is not None
            other = [*block[:place], token.token_id, *block[place + 1 :]]
            if (
                token.token_id != block[place]
                and token.confidence > float(torch.tensor(options.edit_threshold))
                and language.begins([*ids, *other][prompt_len:], stop_ids)
            ):
                block = other
                steps[-1][start + place] = token
        if stop_ids.intersection([*ids, *block][prompt_len:]):
            for place in range(len(block), length):
                token = draw_at(place, None)
                assert token is not None
                block.append(token.token_id)
                steps[-1][start + place] = token
        if not is_masked and not steps[-1]:
            break
    return steps


def run_in(
    language: Language,
    history: list[int],
    room: int,
    draw_at: Callable[[int, set[int] | None], Token | None],
    permits: Callable[[int, Token, float], bool],
    stop_ids: set[int],
) -> tuple[list[Token], bool]:
    """What a step takes of a row, and whether it ends in a conflict.

    That is what is forced; then a token of those that the language allows; then what was drawn
    without it, while the rule permits that place and the language the token, and whatever is forced
    in between. Behind a stop id it is all that was drawn.

    Args:
        history: what the row has generated.
        room: masked positions.
        draw_at: place and allowed tokens → what is drawn.
    """
    run: list[Token] = []
    masked, first = True, 0
    while len(run) < room:
        place = len(run)
        ids = history + [token.token_id for token in run]
        if stop_ids.intersection(ids):
            new = [draw_at(place, None)]
        elif forced := language.forced(ids, stop_ids)[: room - place]:
            new = [draw_at(place + i, {token_id}) for i, token_id in enumerate(forced)]
        elif masked:
            new, masked = [draw_at(place, language.allowed(ids, stop_ids))], False
            first = place
            if new == [None]:
                return run, True
        else:
            new = [draw_at(place, None)]
            free = [draw_at(i, None) for i in range(place)]
            before = sum(
                each.entropy for each in (*free[:first], run[first], *free[first + 1 :]) if each
            )
            if not (
                new[0]
                and permits(place, new[0], before)
                and language.legal(ids, new[0].token_id, stop_ids)
            ):
                break
        run += [token for token in new if token is not None]
    return run, False


def _shifted(
    draw_at: Callable[[int, set[int] | None], Token | None],
    start: int,
    place: int,
    allowed: set[int] | None,
) -> Token | None:
    return draw_at(start + place, allowed)


def _draw_at(
    logits: Tensor,
    first: int,
    step: int,
    banned: list[set[int]],
    params: RequestParams,
    place: int,
    allowed: set[int] | None,
) -> Token | None:
    return draw(logits[place], first + place, step, banned[place], params, allowed)


def permits(options: Options, step: int, place: int, token: Token, before: float) -> bool:
    """Whether a step of a guided row may take a token, so many places behind the first masked, with
    so much entropy at the places between."""
    if options.unmasking in ("low_confidence_dynamic", "joint_threshold"):
        is_sure = token.confidence > float(torch.tensor(options.confidence_threshold))
        return is_sure or place < options.min_tokens_per_step
    if options.unmasking == "entropy_bound":
        return before <= options.entropy_bound or place < options.min_tokens_per_step
    counts = schedule(options)
    return place < counts[min(step, len(counts) - 1)]


def choose(drawn: dict[int, Token], step: int, options: Options) -> list[int]:
    """The positions that a step unmasks of those that are masked."""
    places = sorted(drawn)
    by_confidence = sorted(places, key=lambda at: (-drawn[at].confidence, at))
    least = options.min_tokens_per_step
    if options.unmasking in ("low_confidence_dynamic", "joint_threshold"):
        limit = float(torch.tensor(options.confidence_threshold, dtype=torch.float32))
        sure = [at for at in places if drawn[at].confidence > limit]
        return sure if len(sure) >= least else by_confidence[:least]
    if options.unmasking == "entropy_bound":
        by_entropy = sorted(places, key=lambda at: (drawn[at].entropy, at))
        total, count = 0.0, 0
        while count < len(places) and (count < least or total <= options.entropy_bound):
            total += drawn[by_entropy[count]].entropy
            count += 1
        return by_entropy[:count]
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
    logits: Tensor,
    position: int,
    step: int,
    banned: set[int],
    params: RequestParams,
    allowed: set[int] | None = None,
) -> Token | None:
    """From logits [V] of one position; None if none of the allowed tokens is left."""
    law = process(logits, banned, params, allowed)
    if law is None:
        return None
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
    probs = law.softmax(-1)
    entropy = float(torch.special.entr(probs).sum())
    return Token(token, float(probs[token]), logprobs[token], top, entropy)


def process(
    logits: Tensor, banned: set[int], params: RequestParams, allowed: set[int] | None = None
) -> Tensor | None:
    """Ban, constraint, temperature, top-k, top-p, min-p: [V], -inf where a token is excluded; None
    if the constraint left none.

    Tokens that tie with the last that a filter keeps are kept.
    """
    out = logits.clone()
    for token in banned & set(range(len(out))):
        out[token] = -INF
    if out.max() == -INF:
        out = logits.clone()  # no other token is left: the ban is void
    if allowed is not None:
        out[[i for i in range(len(out)) if i not in allowed]] = -INF
        if out.max() == -INF:
            return None
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
    """The logits of a causal model of transformers, given the mask in its place.

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
