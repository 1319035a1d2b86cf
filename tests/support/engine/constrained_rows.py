"""Rows with constraints of every kind for tiny models, and a plain loop that computes their tokens.

For every test that needs some. The loop uses no engine, no batch and no matcher of the engine.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xgrammar
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.matcher import Matcher
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import FinishReason, RequestOutput
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.rows.stopping import decode
from batchgen.engine.sampling.sampler import sample_tokens
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import RequestParams
from tests.support.engine.engine_rows import Request, weights
from tests.support.engine.schemas import SCHEMAS

Logits = Callable[[Sequence[int]], Tensor]
"""Token ids → [V], the model's logits behind the last."""

WORDS = ('{"', '":', '",', '":"', '"}', "},{", "true", "false", "null", "ab", "abc", "12", "</th")
WIDTH = 331
"""Columns of the logits: wider than the tokenizer, and no multiple of 32."""
MAX_LEN = 90
SIMPLE = EngineConfig(
    max_num_seqs=64,
    max_batched_tokens=2048,
    chunk_tokens=0,
    max_model_len=MAX_LEN,
    kv_cache_gib=0.01,
    overlap=False,
    prefix_caching=False,
)


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes, some longer tokens, and two special ones."""
    letters = bytes_to_unicode()
    vocab: dict[str, int] = {letter: i for i, letter in enumerate(letters.values())}
    merges = []
    for word in WORDS:
        spelt = "".join(letters[byte] for byte in word.encode())
        for end in range(2, len(spelt) + 1):
            if spelt[:end] not in vocab:
                merges.append((spelt[: end - 1], spelt[end - 1]))
                vocab[spelt[:end]] = len(vocab)
    raw = Tokenizer(models.BPE(vocab, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|turn|>")])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


def encode(text: str) -> list[int]:
    return list(make_tokenizer().encode(text, add_special_tokens=False))


NUM_TOKENS = len(make_tokenizer())
END, TURN = (make_tokenizer().get_vocab()[text] for text in ("<|end|>", "<|turn|>"))


@functools.cache
def compiler() -> GrammarCompiler:
    """One for all engines of a test session: they need not compile the same again."""
    return GrammarCompiler(make_tokenizer(), WIDTH, (END,))


def load(folder: Path, device: str = "cpu") -> CausalLM:
    """A model of little entropy, whose rows repeat themselves as n-grams like it."""
    model = load_model(folder, device=torch.device(device), dtype=torch.float32)
    weights(model)["model.norm.weight"].mul_(2.5)
    return model


_TAG = {
    "type": "tag",
    "begin": "<ab>",
    "content": {"type": "regex", "pattern": "[0-9]{2,9}"},
    "end": ">",
}
_SCHEMAS = (
    *("integer_range", "enum_mixed", "any_of_objects", "length", "array_counts", "recursion_root"),
    *("object_counts", "pattern_alternatives", "tuple_and_more", "number_range", "object_nested"),
    *("format_date", "object_optional", "array", "one_of_tagged", "const_object", "object_map"),
)
CONSTRAINTS: tuple[Constraint, ...] = (
    *(Constraint.make("json_schema", SCHEMAS[name]) for name in _SCHEMAS),
    Constraint.make("json_schema", SCHEMAS["any_of_objects"], max_whitespace=2),
    Constraint.make("json", None),
    Constraint.make("regex", r"(ab|abc)+[12]{2,9}"),
    Constraint.make("regex", r"[^x]*"),
    Constraint.make("choice", ["ab", "abcabcabc", "éab", 'a "quoted" one']),
    Constraint.make("grammar", 'root ::= "" | "(" root ")" root'),
    Constraint.make("structural_tag", {"type": "structural_tag", "format": _TAG}),
    Constraint.make("json_schema", SCHEMAS["array_counts"], start_after="\n"),
    Constraint.make("regex", "[a-c]{1,3}", start_after="ab"),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    {
        "temperature": 0,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "logprobs": True,
        "logprobs_mode": "processed",
    },
    {"temperature": 0.7, "top_k": 5, "logprobs": True},
    {
        "temperature": 1.3,
        "top_p": 0.8,
        "logprobs": True,
        "logprobs_mode": "processed",
        "top_logprobs": 4,
    },
    {"min_p": 0.1, "top_logprobs": 7},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.7, "logprobs": True},
    {"min_new_tokens": 9, "logprobs": True},
    {"temperature": 0.5, "repetition_penalty": 0.6, "frequency_penalty": -0.2},
    {"temperature": 0.2, "stop_token_ids": (*encode("}"), *encode("2"), TURN)},
    {"temperature": 0.8, "stop": ("1", 'a"', "b")},
)


def mixed_requests(count: int, seed: int = 0, free: int = 3) -> list[Request]:
    """Rows with every option and constraint; every so many rows one is `free` of any.

    Prompts share a beginning, repeat themselves, or come twice.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(NUM_TOKENS - 2) for _ in range(13)]
    order = rng.sample(CONSTRAINTS, len(CONSTRAINTS))
    requests: list[Request] = []
    constraints = itertools.cycle(order)
    for i, options in zip(range(count), itertools.cycle(OPTIONS)):
        own = [rng.randrange(NUM_TOKENS - 2) for _ in range(rng.randint(1, 25))]
        prompt = [shared + own, (own * 4)[:40], own][i % 3]
        if i % 6 == 5:
            prompt = requests[-1][0]  # another sample
        constraint = None if i % free == free - 1 else next(constraints)
        length = max(rng.randint(1, 40), int(options.get("min_new_tokens", 0)))
        params = RequestParams(
            max_new_tokens=length, seed=1000 * seed + i, constraint=constraint, **options
        )
        requests.append((prompt, params))
    return requests


def assert_same(
    one: RequestOutput, other: RequestOutput, atol: float = 0.0, more: Sequence[str] = ()
) -> None:
    """Equal in every bit, or the floats within `atol`; `other` has more columns."""
    assert one.token_ids == other.token_ids
    assert (one.text, one.finish_reason, one.stop) == (other.text, other.finish_reason, other.stop)
    assert one.constraint_satisfied == other.constraint_satisfied
    assert (one.error is None) == (other.error is None)
    assert {*one.columns, *more} == {*other.columns}
    for name, values in one.columns.items():
        found = other.columns[name]
        if name == "top_logprob_ids":  # of tokens that are excluded any may stand there
            known = np.isfinite(one.columns["top_logprobs"])
            values, found = np.where(known, values, -1), np.where(known, found, -1)
        np.testing.assert_allclose(found, values, rtol=0, atol=atol, err_msg=name)


# --- the plain loop -------------------------------------------------------------------------------


def reference(logits_of: Logits, prompt: list[int], params: RequestParams) -> RequestOutput:
    """What a row is, token by token."""
    stops = {*params.stop_token_ids, END}
    token_ids: list[int] = []
    text, stop = "", None
    columns: dict[str, list[Any]] = {name: [] for name in _column_names(params)}
    reason: FinishReason | None = None
    limit = min(params.max_new_tokens, MAX_LEN - len(prompt))
    while reason is None:
        logits = logits_of(prompt + token_ids)
        masked = logits.clone()
        masked[~allowed(params.constraint, stops, token_ids)] = -torch.inf
        left = masked.clone()
        if len(token_ids) < params.min_new_tokens:
            left[list(stops)] = -torch.inf
        if params.constraint is not None and bool((left == -torch.inf).all()):
            reason = "constraint_conflict"
            break
        token_id = _draw(logits, masked, prompt, token_ids, params, tuple(stops), columns)
        token_ids.append(token_id)
        text = decode(make_tokenizer(), token_ids)
        can_stop = len(token_ids) >= params.min_new_tokens
        found = [string for string in params.stop if string in text]
        if token_id in stops and can_stop:
            reason, stop = "stop", str(make_tokenizer().decode([token_id]))
            text = decode(make_tokenizer(), token_ids[:-1])
        elif found and can_stop:
            stop = min(found, key=text.index)
            reason, text = "stop", text[: text.index(stop)]
        elif len(token_ids) == limit:
            reason = "length"
    satisfied = None
    if params.constraint is not None:
        cut = stop is not None and token_ids[-1] not in stops
        satisfied = not cut and (
            (token_ids[-1:] != [] and token_ids[-1] in stops and reason == "stop")
            or bool(allowed(params.constraint, stops, token_ids)[END])
        )
    return RequestOutput(
        request_id="",
        prompt_token_ids=prompt,
        token_ids=token_ids,
        text=text,
        finish_reason=reason,
        stop=stop,
        columns={name: _stack(name, rows, params) for name, rows in columns.items()},
        constraint_satisfied=satisfied,
    )


def allowed(constraint: Constraint | None, stops: set[int], token_ids: Sequence[int]) -> Tensor:
    """[WIDTH] bool: what may follow the tokens, by a matcher made for the question."""
    if constraint is None:
        return torch.ones(WIDTH, dtype=torch.bool)
    grammar = compiler().compile(constraint)
    words = torch.empty((1, -(-WIDTH // 32)), dtype=torch.int32)
    if constraint.start_after:
        matcher = Matcher(grammar, stops)
        matcher.commit(list(token_ids))
        matcher.fill(words, 0)
    else:
        state = xgrammar.GrammarMatcher(grammar.compiled, override_stop_tokens=sorted(stops))
        assert all(state.accept_token(token_id) for token_id in token_ids)
        state.fill_next_token_bitmask(words, 0)
    bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
    return torch.from_numpy(bits[:WIDTH].astype(np.bool_))


def _column_names(params: RequestParams) -> list[str]:
    names = ["logprobs"] if params.logprobs else []
    return names + (["top_logprobs", "top_logprob_ids"] if params.top_logprobs else [])


def _draw(
    logits: Tensor,
    masked: Tensor,
    prompt: list[int],
    token_ids: list[int],
    params: RequestParams,
    stops: tuple[int, ...],
    columns: Mapping[str, list[Any]],
) -> int:
    """The ordinary draw from the logits that the mask leaves, and its columns."""
    history = prompt + token_ids
    sampling = SamplingInputs.build(
        params=[params],
        prompt_lens=[len(prompt)],
        histories=[history],
        stop_ids=[stops],
        capacities=[MAX_LEN],
        device=logits.device,
    )
    step = sample_tokens(masked.unsqueeze(0), sampling, torch.tensor([len(history)]))
    token_id = int(step.token_ids)
    raw = logits.log_softmax(-1)
    values, ids = raw.topk(max(1, params.top_logprobs))
    own = {"logprobs": raw[token_id], "top_logprobs": values, "top_logprob_ids": ids}
    for name, rows in columns.items():
        of_mode = own[name] if params.logprobs_mode == "raw" else step.columns[name][0, 0]
        rows.append(of_mode.numpy())
    return token_id


def _stack(name: str, rows: list[Any], params: RequestParams) -> npt.NDArray[Any]:
    tail = () if name == "logprobs" else (params.top_logprobs,)
    return np.array(rows).reshape(len(rows), *tail)
