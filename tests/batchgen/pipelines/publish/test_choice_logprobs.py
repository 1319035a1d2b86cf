"""Log-probabilities of OpenAI's choices, for tokens that are parts of characters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchgen.engine.constraint.vocabulary import Vocabulary
from batchgen.pipelines.publish.trainers.choice_logprobs import ChoiceLogprobs

TEXTS = [b" the", "日".encode()[:2], "日".encode()[2:], b"!", b"<end>", b"!", b"A", b""]
WORDS = cast(Vocabulary, SimpleNamespace(texts=TEXTS, plain=frozenset({0, 1, 2, 3, 5, 6})))
ROW: dict[str, Any] = {
    "token_ids": [0, 1, 2, 3, 4],
    "logprobs": [-0.5, -1.0, -1.5, -2.0, -2.5],
    "top_logprob_ids": [[0, 3, 5], [1, 2, 6], [2, 1, 7], [3, 5, 99], [4, 0, 1]],
    "top_logprobs": [[-0.5, -3.0, -4.0]] * 5,
}


def logprobs(text: str | None, number: int = 3) -> dict[str, Any]:
    columns = ("token_ids", "logprobs", "top_logprobs", "top_logprob_ids")
    found = ChoiceLogprobs(columns, WORDS, lambda row: number, []).of(ROW, text)
    assert found is not None
    return found


def test_a_chat_has_the_bytes_of_each_token() -> None:
    content = logprobs(None)["content"]
    assert [entry["token"] for entry in content] == [" the", r"\xe6\x97", r"\xa5", "!", "<end>"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == " the日!<end>"
    assert [one["token"] for one in content[1]["top_logprobs"]] == [r"\xe6\x97", r"\xa5", "A"]
    assert content[1]["top_logprobs"][0]["bytes"] == [0xE6, 0x97]
    assert content[2]["top_logprobs"][2] == {"token": "", "logprob": -4.0, "bytes": []}


def test_equal_texts_of_a_completion_do_not_replace_each_other() -> None:
    found = logprobs(" the日!")
    assert found["tokens"] == [" the", r"bytes:\xe6\x97", r"bytes:\xa5", "!", "<end>"]
    assert found["top_logprobs"][0] == {" the": -0.5, "!": -3.0, "token_id:5": -4.0}
    assert found["top_logprobs"][3] == {"!": -0.5, "token_id:5": -3.0, "": -4.0}
    assert all(len(likely) == 3 for likely in found["top_logprobs"])
    assert logprobs("", number=0)["top_logprobs"] is None


@pytest.mark.parametrize(
    ("text", "offsets"), [(" the日!", [0, 4, 4, 5, 6]), ("the日!", [0, 3, 3, 4, 5])]
)
def test_offsets_are_those_of_the_text(text: str, offsets: list[int]) -> None:
    assert logprobs(text)["text_offset"] == offsets
    assert [text[at : at + 1] for at in offsets] == [text[0], "日", "日", "!", ""]
