"""The request that a job makes to the engine for a row, before samples get their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.request_params import derive_seed
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.dataset.seed_stream import stream_seed
from batchgen.inputs.images.row_images import RowImage


class RowRequest(NamedTuple):
    """The parts of a row's requests that all its samples share."""

    prompt: list[int]
    params: RequestParams
    answer: GivenAnswer | None = None  # the given answer that is scored; None if the row generates
    choices: Sequence[
        list[int]
    ] = ()  # the tokens of each choice, which are scored in requests of their own
    images: Sequence[RowImage] = ()  # the images of the prompt, in order

    def of_sample(self, row_id: str, sample_index: int, stream: str | None) -> RowRequest:
        """The request of one sample, with its own seed: one that follows from the job's seed and
        `stream` (see `seed_stream`), the row's id and the sample's index."""
        seed = derive_seed(stream_seed(self.params.seed, stream), row_id, sample_index)
        prompt, params, answer, choices, images = self
        return RowRequest(prompt, params.with_seed(seed), answer, choices, images)
