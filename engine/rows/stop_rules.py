"""Makes the stop rule of each new row from its request.

A request names stop ids and stop strings, limits of length, and whether EOS ends the row.
`Requests` calls `StopRules.rule` once for each row; the rules themselves are in `stopping.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.engine.rows.stopping import IncrementalDecoder, StopRule
from batchgen.engine.sampling.sampling_params import RequestParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopRules:
    """Makes the stop rules of rows.

    Args:
        tokenizer: decodes stop ids to text. With None, their texts are numbers, and stop strings
            are not supported.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._eos = {token_id: self._token_text(token_id) for token_id in eos_token_ids}

    def rule(self, num_prompt_tokens: int, params: RequestParams) -> StopRule:
        """Make the stop rule of a new row."""
        if not params.max_new_tokens:
            return StopRule(stop_ids={}, strings=(), min_new_tokens=0, max_new_tokens=0)
        stop_ids = {} if params.ignore_eos else dict(self._eos)
        stop_ids |= {token_id: self._token_text(token_id) for token_id in params.stop_token_ids}
        strings = []
        for string in params.stop:
            # Decoded text leaves out special tokens, so a stop string that is a special token is
            # matched by id.
            special = self._special_token_id(string)
            if special is None:
                strings.append(string)
            else:
                stop_ids[special] = string
        decoder = None
        if strings:
            assert self._tokenizer is not None
            decoder = IncrementalDecoder(self._tokenizer)
        return StopRule(
            stop_ids,
            tuple(strings),
            params.min_new_tokens,
            min(params.max_new_tokens, self._max_model_len - num_prompt_tokens),
            decoder,
        )

    def _special_token_id(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is none."""
        assert self._tokenizer is not None
        token_id = self._tokenizer.added_tokens_encoder.get(text)
        if token_id is None or not self._tokenizer.added_tokens_decoder[token_id].special:
            return None
        return int(token_id)

    def _token_text(self, token_id: int) -> str:
        """Return the text of a token, or its id as text without a tokenizer."""
        if self._tokenizer is None:
            return str(token_id)
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
