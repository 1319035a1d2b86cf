"""Separates the reasoning of a model from its answer, at a marker such as `</think>`:
`"<think>1+1 is 2</think>2"` → reasoning `"1+1 is 2"`, answer `"2"`. A job calls
`ReasoningMarkers.split` for each output.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow as pa

from batchgen.engine.constraint.vocabulary import Vocabulary
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.storage.shards.output_fields import REASONING, described_field
from batchgen.storage.shards.output_schema import SplitOutput
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReasoningMarkers:
    """Finds where reasoning (thoughts) ends in a row's output.

    The marker is searched for in the bytes of all tokens, including special tokens, which the text
    leaves out. So it may be one special token, or any tokens that together contain its bytes.

    Attributes:
        fields: the column of thoughts.
    """

    fields = (
        described_field(
            REASONING,
            pa.string(),
            "the thoughts before output.reasoning_end; null on error, and if the row has none",
        ),
    )

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        special_ids: Sequence[int],
        *,
        start: str | None,
        end: str,
    ) -> None:
        """Prepare to split the outputs of one model.

        Args:
            special_ids: ids of tokens that are special even if the tokenizer does not say so.
            start: the marker with which thoughts begin; None if every output begins with thoughts.
            end: the marker with which thoughts end.

        Raises:
            ConfigError: there is no tokenizer, or it does not tell the bytes of the tokens.
        """
        if tokenizer is None:
            raise ConfigError(
                "output.reasoning_end needs a tokenizer, and the model comes without one: drop it"
            )
        try:
            words = Vocabulary(tokenizer, vocab_size, special_ids)
        except ConstraintError as error:
            raise ConfigError(f"output.reasoning_end: {error}") from None
        self._texts = words.texts
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *(id for id, token in added if token.special)}
        self._special = frozenset(special)
        self._start = None if start is None else start.encode()
        self._end = end.encode()

    def split(self, output: RequestOutput) -> SplitOutput:
        """Return the output with the text that follows the thoughts, and the column of thoughts.

        If the end marker is missing, all text is thoughts and the answer is empty. With a start
        marker, a row has thoughts only if its output begins with the marker, or if its prompt ends
        after a start marker without an end. Without thoughts, or with an error, the column is null.
        """
        ids = output.token_ids
        spelled = self._spell(ids)
        if output.finish_reason == "error" or not self._thinks(output, spelled):
            return SplitOutput(output)
        at = spelled.find(self._end)
        if at < 0:
            thoughts = self._without_start(output.text)
            return SplitOutput(replace(output, text=""), {REASONING: thoughts})
        # Tokenizers may drop the space of the first token: then positions in the text are 1 less.
        first = self._shown(ids, spelled, len(spelled))[:1]
        num_dropped = int(first.isspace() and not output.text[:1].isspace())
        thoughts_end = len(self._shown(ids, spelled, at)) - num_dropped
        answer_start = len(self._shown(ids, spelled, at + len(self._end))) - num_dropped
        thoughts = self._without_start(output.text[: max(thoughts_end, 0)])
        answer = replace(output, text=output.text[max(answer_start, 0) :])
        return SplitOutput(answer, {REASONING: thoughts})

    def _thinks(self, output: RequestOutput, spelled: bytes) -> bool:
        """Return whether an output, whose tokens have the bytes `spelled`, has thoughts."""
        if self._start is None or spelled.lstrip().startswith(self._start):
            return True
        prompt = self._spell(output.prompt_token_ids)
        return prompt.rfind(self._start) > prompt.rfind(self._end)

    def _without_start(self, thoughts: str) -> str:
        """Return thoughts without the start marker, if they begin with it."""
        start = "" if self._start is None else self._start.decode()
        bare = thoughts.lstrip()
        return bare[len(start) :] if start and bare.startswith(start) else thoughts

    def _spell(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of all tokens, including special tokens."""
        return b"".join([self._texts[id] for id in ids])

    def _shown(self, ids: Sequence[int], spelled: bytes, end: int) -> str:
        """Return the text of the first `end` of the bytes `spelled`, without special tokens."""
        ends = list(accumulate(len(self._texts[id]) for id in ids))
        whole = bisect_right(ends, end)
        texts = [self._texts[id] for id in ids[:whole] if id not in self._special]
        if whole < len(ids) and ids[whole] not in self._special:
            texts.append(spelled[ends[whole - 1] if whole else 0 : end])
        return b"".join(texts).decode("utf-8", "replace")
