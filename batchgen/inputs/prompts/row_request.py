"""What a job asks of the engine for a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.request_params import derive_seed
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.dataset.seed_stream import stream_seed
from batchgen.inputs.images.row_images import RowImage


class RowRequest(NamedTuple):
    """What the requests of a row ask for."""

    prompt: list[int]
    params: RequestParams
    answer: GivenAnswer | None = None  # what is scored; None if the row generates
    choices: Sequence[list[int]] = ()  # the tokens of each choice that is scored beside the row
    images: Sequence[RowImage] = ()  # those of the prompt, in order

    def of_sample(self, row_id: str, sample_index: int, stream: str | None) -> RowRequest:
        """The request of one sample of the row, with its own seed in a job's `stream`."""
        seed = derive_seed(stream_seed(self.params.seed, stream), row_id, sample_index)
        prompt, params, answer, choices, images = self
        return RowRequest(prompt, params.with_seed(seed), answer, choices, images)
