"""One sample of one row on its way through the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.storage.shards.output_schema import FinishedRow


@dataclass(slots=True)
class SampleRequest:
    """One sample of one row, from before it is queued until it is finished.

    Attributes:
        row_id, row_index, sample_index: which sample of which row it is.
        fields: the columns that are copied from the data set.
        request: what the engine is asked; the error of a row that has no prompt.
        key: the digest by which later jobs find the row; None if the job keeps no keys.
        ended: the finished parts of the sample, where choices are scored with it.
        begun_tokens: the number of its tokens that earlier attempts had generated.
    """

    row_id: str
    row_index: int
    sample_index: int
    fields: Mapping[str, Any]
    request: RowRequest | RequestError
    key: bytes | None = None
    ended: list[RequestOutput] = field(default_factory=list)
    begun_tokens: int = 0

    def of_sample(self, stream: str | None) -> RowRequest:
        """The request with the sample's own seed in a job's `stream`."""
        assert isinstance(self.request, RowRequest)
        return self.request.of_sample(self.row_id, self.sample_index, stream)

    def finished(
        self,
        output: RequestOutput | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        error: RequestError | None = None,
        is_copied: bool = False,
    ) -> FinishedRow:
        key, request = (self.row_id, self.row_index, self.sample_index), self.request
        images = None
        if not isinstance(request, RequestError):
            images = [image.reference for image in request.images]
        return FinishedRow(
            *key,
            self.fields,
            output,
            error,
            extra or {},
            self.key,
            is_copied,
            images=images,
            begun_tokens=self.begun_tokens,
        )
