"""The Python interface with a tiny model: prompts of all kinds, nesting, errors, streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen import LLM, Output, SamplingParams
from batchgen.engine.sampling.sampling_params import RequestParams

PARAMS = SamplingParams(max_tokens=8, seed=5)
CHAT = [{"role": "user", "content": "hi"}]
LONG = [5] * 300


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", kv_cache_gib=0.01, max_num_seqs=8) as llm:
        yield llm


def tokens(outputs: list[list[Output]]) -> list[list[list[int]]]:
    return [[output.token_ids for output in samples] for samples in outputs]


def test_one_prompt_gives_its_outputs_and_many_give_a_list_of_them(llm: LLM) -> None:
    one = llm.generate("ab", PARAMS, n=2)
    many = llm.generate(["ab", "cd"], PARAMS, 2)
    assert [o.request_id for o in one] == ["0-0", "0-1"]
    assert [[o.request_id for o in samples] for samples in many] == [["0-0", "0-1"], ["1-0", "1-1"]]
    assert [[(o.prompt_index, o.sample_index, o.prompt) for o in samples] for samples in many] == [
        [(0, 0, "ab"), (0, 1, "ab")], [(1, 0, "cd"), (1, 1, "cd")],
    ]  # fmt: skip
    assert tokens([one]) == tokens(many[:1])
    assert one[0].token_ids != one[1].token_ids
    assert llm.generate([], PARAMS) == []
    assert tokens(llm.generate(["ab"], PARAMS)) == tokens([one[:1]])
    assert tokens([llm.generate("ab", PARAMS.replace(n=2))]) == tokens([one])


def ids_of(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return list(llm.tokenizer.encode(text))


def test_a_prompt_may_be_of_any_kind(llm: LLM) -> None:
    ids = ids_of(llm, "ab")
    expected = tokens([llm.generate("ab", PARAMS)])[0]
    same: list[Any] = [
        ids, tuple(ids), np.array(ids), torch.tensor(ids), {"prompt": "ab"},
        {"prompt_token_ids": ids},
    ]  # fmt: skip
    for prompt in same:
        (output,) = llm.generate(prompt, PARAMS)
        assert (output.token_ids, output.prompt_token_ids) == (expected[0], ids)
    many = llm.generate([*same, "ab"], PARAMS)
    assert [output.prompt_token_ids for (output,) in many] == [ids] * 7
    assert len(llm.generate((text for text in ("ab", "cd")), PARAMS)) == 2
    assert len(llm.generate(np.array([ids, ids]), PARAMS)) == 2


def test_conversations_are_written_with_the_chat_template(llm: LLM) -> None:
    ids = ids_of(llm, "user: hi\nassistant:")
    one: list[Any] = [llm.generate(CHAT, PARAMS), llm.chat(CHAT, PARAMS), llm.chat("hi", PARAMS)]
    for outputs in one:
        assert [output.prompt_token_ids for output in outputs] == [ids]
    mixed: list[Any] = [CHAT, "ab", ids]
    found = [output.prompt_token_ids for (output,) in llm.generate(mixed, PARAMS)]
    assert found == [ids, ids_of(llm, "ab"), ids]
    many = llm.chat([CHAT, "hi"], PARAMS, n=2)
    assert [[output.prompt_token_ids for output in samples] for samples in many] == [[ids] * 2] * 2
    template = "{{ messages[0].content }}{{ mark }}"
    (output,) = llm.chat("hi", PARAMS, template_kwargs={"chat_template": template, "mark": "!"})
    assert output.prompt_token_ids == ids_of(llm, "hi!")
    refused: list[Any] = llm.chat(CHAT[0], PARAMS)
    assert [output.error.type for output in refused] == ["bad_prompt"]
    with pytest.raises(ValueError, match=r"^template_kwargs.thinking: the model's chat template"):
        llm.chat("hi", PARAMS, chat_template_kwargs={"thinking": True})


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("prompt", "type", "says"),
    [
        ("", "empty_prompt", "no tokens"),
        ([], "empty_prompt", "no tokens"),
        (LONG, "prompt_too_long", "300 tokens, and max_model_len is 256"),
        ([5, 999], "bad_token_ids", "[999] are not in the vocabulary"),
        (None, "bad_prompt", "a prompt must be a text, a list of token ids or a list of messages"),
        (3.5, "bad_prompt", "got 3.5"),
        ([5, "a"], "bad_prompt", "got [5, 'a']"),
        (b"ab", "bad_prompt", "got b'ab'"),
        ({"prompt": "ab", "multi_modal_data": {"audio": 1}}, "bad_prompt", "multi_modal_data"),
        ([{"role": "user"}], "bad_messages", "role and content must be strings"),
        ([{"role": "user", "content": "x"}, "y"], "bad_messages", "message 1"),
    ],
)
def test_a_prompt_that_cannot_be_served_has_an_error_in_its_place(
    llm: LLM, prompt: Any, type: str, says: str
) -> None:
    alone = llm.generate(["ab", "x", "cd"], PARAMS)
    found = llm.generate(["ab", prompt, "cd"], PARAMS, n=2)
    assert [[output.finish_reason == "error" for output in samples] for samples in found] == [
        [False, False], [True, True], [False, False],
    ]  # fmt: skip
    for sample, output in enumerate(found[1]):
        assert output.error is not None
        assert output.error.type == type
        assert says in str(output.error)
        assert (output.token_ids, output.text, output.request_id) == ([], "", f"1-{sample}")
        assert repr(output) == (f"Output(error {type}: {output.error}, prompt 1, sample {sample})")
    assert [tokens(found)[i][:1] for i in (0, 2)] == [tokens(alone)[i] for i in (0, 2)]


def test_one_prompt_that_cannot_be_served(llm: LLM) -> None:
    (output,) = llm.generate(LONG, PARAMS)
    assert output.error is not None and output.prompt_token_ids == LONG
    (output,) = llm.generate([{"content": "x"}], PARAMS)
    assert output.error is not None and output.error.type == "bad_messages"
    assert str(output.error).startswith("message 0: ")


def test_shapes_of_outputs(llm: LLM) -> None:
    (output,) = llm.generate("ab", PARAMS.replace(logprobs=5, max_tokens=4))
    assert output.logprobs is not None and output.logprobs.shape == (4,)
    assert output.top_logprobs is not None and output.top_logprobs.shape == (4, 5)
    assert output.top_logprob_ids is not None and output.top_logprob_ids.shape == (4, 5)
    assert (np.diff(output.top_logprobs) <= 0).all()
    assert repr(output) == f"Output({output.text!r}, 4 tokens, length, prompt 0, sample 0)"
    (plain,) = llm.generate("ab", PARAMS)
    found = [plain.logprobs, plain.top_logprobs, plain.top_logprob_ids]
    assert found == [None, None, None]


@pytest.mark.thorough
def test_parameters_for_each_prompt(llm: LLM) -> None:
    each = [PARAMS.replace(max_tokens=2), PARAMS.replace(max_tokens=3, n=2)]
    found = llm.generate(["ab", "cd"], each)
    assert [[len(output.token_ids) for output in samples] for samples in found] == [[2], [3, 3]]
    (unlimited,) = llm.generate("ab", SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(unlimited.token_ids) == 254


def test_a_constraint_in_the_parameters(llm: LLM) -> None:
    outputs = llm.generate("ab", SamplingParams(constraint={"choice": ["yes", "no"]}, n=3))
    assert {output.text for output in outputs} <= {"yes", "no"}
    assert all(output.constraint_satisfied for output in outputs)


class _Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_the_bar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(terminal: bool, **given: Any) -> str:
        stream = _Terminal()
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            llm.generate(["ab", "cd"], PARAMS, n=2, **given)
        return stream.text

    assert "4/4" in shown(True) and "tok/s" in shown(True)
    assert shown(True, progress=False) == shown(True, use_tqdm=False) == shown(False) == ""
    assert "4/4" in shown(False, progress=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"params": [PARAMS]}, "1 params for 2 prompts: give one SamplingParams for all, or a"),
        ({"params": 5}, "5 for 2 prompts: give one SamplingParams"),
        ({"params": [PARAMS, 5]}, "params must be batchgen.SamplingParams, got 5"),
        ({"params": RequestParams()}, "give one SamplingParams for all"),
        ({"n": 0}, "n must be at least 1"),
        ({"params": PARAMS, "sampling_params": SamplingParams()}, "mean the same and differ"),
        ({"prompt_adapter_request": "x"}, "has no argument 'prompt_adapter_request'"),
        ({"chat_template_kwargs": {}}, "LLM.generate has no argument 'chat_template_kwargs'"),
        ({"temperature": 1}, "write params=SamplingParams(temperature=…)"),
        ({"max_tokens": 1}, "write params=SamplingParams(max_tokens=…)"),
        ({"params": SamplingParams(columns="step_map")}, "no column 'step_map'"),
    ],
)
def test_mistakes_in_a_call_are_raised(llm: LLM, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        llm.generate(["ab", "cd"], **given)
    assert says in str(error.value)
    assert not llm.engine.has_unfinished()


def test_what_is_no_prompt_at_all(llm: LLM) -> None:
    wrongs: list[Any] = [None, 5, b"ab"]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="prompts must be a text, a list of token ids"):
            llm.generate(wrong)
    with pytest.raises(ValueError, match="no argument 'progress'"):
        llm.stream("ab", progress=True)
    assert tokens([llm.generate("ab", sampling_params=PARAMS)]) == tokens(
        [llm.generate("ab", PARAMS)]
    )


def test_streams_side_by_side_are_as_alone(llm: LLM) -> None:
    prompts = [["ab", "cd", "ef"], ["ab", "gh"], ["ij"] * 4]
    alone = [sorted(key(o) for o in llm.stream(group, PARAMS, 2)) for group in prompts]
    streams = [llm.stream(group, PARAMS, 2) for group in prompts]
    found: list[list[Any]] = [[] for _ in prompts]
    for turn in zip_longest(*streams):  # one output of each stream after the other
        for outputs, output in zip(found, turn, strict=True):
            outputs += [] if output is None else [key(output)]
    assert list(map(sorted, found)) == alone
    assert not llm.engine.has_unfinished()


def key(output: Output) -> tuple[str, list[int]]:
    return output.request_id, output.token_ids


def test_an_abandoned_stream_drops_its_rows_only(llm: LLM) -> None:
    alone = sorted(key(o) for o in llm.stream(["ab", "cd"], PARAMS))
    kept = llm.stream(["ab", "cd"], PARAMS)
    first = next(kept)
    dropped = llm.stream(["ef"] * 20, PARAMS)
    next(dropped)
    dropped.close()  # type: ignore[attr-defined]
    assert sorted([key(first), *map(key, kept)]) == alone
    assert not llm.engine.has_unfinished()
    never_begun = llm.stream(["ef"], PARAMS)
    del never_begun
    assert not llm.engine.has_unfinished()


@pytest.mark.thorough
def test_streams_in_threads(llm: LLM) -> None:
    groups = [["ab", "cd"], ["ef"], ["gh", "ij", "kl"]]
    alone = [tokens(llm.generate(group, PARAMS)) for group in groups]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        found[number] = [tokens(llm.generate(groups[number], PARAMS)) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [expected] * 5 for i, expected in enumerate(alone)}


def test_closing(model: Path) -> None:
    with LLM(str(model), device="cpu", kv_cache_gib=0.01, dtype=torch.float32) as llm:
        assert repr(llm) == (
            f"LLM({str(model)!r}, ar, cpu, float32, max_model_len 256: {llm.engine.memory})"
        )
        assert "KV cache 0.01 GiB" in repr(llm)
        long = PARAMS.replace(max_tokens=200, ignore_eos=True)
        stream = llm.stream(["ab", "cd"], [PARAMS.replace(max_tokens=1), long])
        next(stream)
    assert repr(llm) == f"LLM({str(model)!r}, closed)"
    for use in (lambda: llm.generate("ab"), lambda: llm.stream("ab"), lambda: list(stream)):
        with pytest.raises(ValueError, match="this LLM is closed"):
            use()
    llm.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"tensor_parallel_size": 3}, "tensor_parallel=3 does not divide the model's"),
        ({"pipeline_parallel_size": 2}, "did you mean tensor_parallel_size?"),
        ({"max_model_length": 5}, "did you mean max_model_len"),
        ({"max_model_len": 5000}, "max_model_len is 5000, but the model has positions for 256"),
    ],
)
def test_mistakes_in_the_model_are_raised(model: Path, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        LLM(str(model), device="cpu", **given)
    assert says in str(error.value)


def test_a_model_without_a_tokenizer_takes_token_ids(tiny_model: Any) -> None:
    with LLM(str(tiny_model("llama")), device="cpu", kv_cache_gib=0.01) as llm:
        (output,) = llm.generate([5, 6], PARAMS)
        assert len(output.token_ids) <= 8 and output.text == ""
        with pytest.raises(ValueError, match="comes without a tokenizer: give prompts as token"):
            llm.generate(["ab", [5, 6]], PARAMS)
