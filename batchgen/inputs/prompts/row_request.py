"""The request that a job makes to the engine for a row. `RowRequest.of_sample` gives each sample
its seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.request_params import derive_seed
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.dataset.seed_stream import stream_seed
from batchgen.inputs.images.row_images import RowImage


class RowRequest(NamedTuple):
    """What the requests of a row's samples have in common.

    Attributes:
        prompt: the token ids of the prompt.
        params: the sampling parameters; their seed is the job's.
        answer: the answer of the data set to score; None if the row generates one.
        choices: the token ids of each choice, which are scored in separate requests.
        images: the images of the prompt, in order.
    """

    prompt: list[int]
    params: RequestParams
    answer: GivenAnswer | None = None
    choices: Sequence[list[int]] = ()
    images: Sequence[RowImage] = ()

    def of_sample(self, row_id: str, sample_index: int, stream: str | None) -> RowRequest:
        """Return the request of one sample. Its seed is derived from the job's seed, `stream` (see
        `seed_stream`), the row's id and the sample's index."""
        seed = derive_seed(stream_seed(self.params.seed, stream), row_id, sample_index)
        return self._replace(params=self.params.with_seed(seed))
