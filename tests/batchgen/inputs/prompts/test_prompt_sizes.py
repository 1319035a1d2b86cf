"""Prompts that are too long, and texts and templates that strangers make too long."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Value
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from batchgen.config.groups.prompt_config import ChatPromptConfig, PromptConfig, TextPromptConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.prompts.row_prompts import build_prompt, fit_prompt
from batchgen.util.errors import ConfigError
from tests.support.jobs.byte_prompts import BOS, COLUMNS, byte_tokenizer, chat, row


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.integers(1, 50),
    st.sampled_from([None, BOS]),
    st.booleans(),
)
def test_truncate_left_keeps_the_tail(
    tail: list[int], max_len: int, bos_id: int | None, starts_with_bos: bool
) -> None:
    ids = [BOS] * starts_with_bos + tail
    cut = fit_prompt(ids, max_len, "truncate_left", bos_id)
    assert len(cut) == min(len(ids), max_len)
    if len(ids) > max_len > 1 and ids[0] == bos_id:
        assert cut == [bos_id, *ids[len(ids) - max_len + 1 :]]
    else:
        assert cut == ids[len(ids) - len(cut) :]


def test_a_prompt_that_is_too_long_says_what_to_do() -> None:
    assert fit_prompt([1, 2, 3], 3, "error") == [1, 2, 3]
    with pytest.raises(RequestError) as raised:
        fit_prompt([1, 2, 3], 2, "error")
    assert raised.value.type == "prompt_too_long"
    assert str(raised.value) == (
        "the prompt has 3 tokens, but the answer leaves room for only 2: raise "
        "engine.max_model_len, lower sampling.max_new_tokens, or set "
        "prompt.too_long=truncate_left"
    )


class _NeverTokenises(PreTrainedTokenizerFast):
    """A tokenizer that may not be asked for tokens."""

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was tokenised")


@pytest.mark.parametrize(
    "config", [TextPromptConfig(text="{{ q }}"), ChatPromptConfig(user="{{ q }}")]
)
def test_a_text_that_no_tokens_could_hold_is_refused_untokenised(config: PromptConfig) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = _NeverTokenises
    columns = dict.fromkeys(COLUMNS, Value("string"))
    prompt = build_prompt(config, tokenizer, vocab_size=257, columns=columns, room=512)
    with pytest.raises(
        RequestError, match=r"prompt has 6,000,0\d\d bytes, .* 512 tokens .*2,097,152"
    ):
        prompt.token_ids(row(q="é" * 3_000_000))


@pytest.mark.thorough
def test_a_text_that_long_tokens_could_hold_is_tokenised() -> None:
    tokenizer = byte_tokenizer()
    columns = dict.fromkeys(COLUMNS, Value("string"))
    config = TextPromptConfig(text="{{ q }}", add_special_tokens=False)
    prompt = build_prompt(config, tokenizer, vocab_size=257, columns=columns, room=2_100_000)
    assert len(prompt.token_ids(row(q="a" * 2_100_000))) == 2_100_000


def test_chat_templates_have_the_same_bounds() -> None:
    prompt = chat(
        "{% for m in messages %}{{ m.content * 10**10 if m.content == 'x' else m.content }}"
        "{% endfor %}"
    )
    assert prompt.text(row(q="good")) == "good"
    with pytest.raises(RequestError, match=r"^the model's chat template: .* more than 67,108,864"):
        prompt.text(row(q="x"))
    with pytest.raises(ConfigError, match=r"the model's chat template .* more than 67,108,864"):
        chat("{{ 'a'|center(3000000000) }}")


def test_chat_templates_keep_what_transformers_gives_them() -> None:
    prompt = chat(
        "{%- for m in messages %}\n  {%- generation %}{{ m|tojson }}{% endgeneration %}\n"
        "{%- if loop.first %}{% continue %}{% endif %}{% endfor %}{{ strftime_now('%%') }}"
    )
    assert prompt.text(row(q="é<")) == '{"role": "user", "content": "é<"}%'
    with pytest.raises(ConfigError, match="cannot take the roles user: no good"):
        chat("{{ raise_exception('no good') }}")
