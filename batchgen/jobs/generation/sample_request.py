"""The state of one sample of one row on its way through the engine. `Generation` keeps one for each
request."""

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
        row_id, row_index: the row.
        sample_index: the number of the sample.
        fields: the columns that are copied from the data set.
        request: the request for the engine, without the sample's seed; the error of a row that has
            no prompt.
        key: the digest by which later jobs find the row; None if the job keeps no keys.
        ended: the outputs so far of the sample and of its choices, in a job that scores choices.
        begun_tokens: tokens of the answer that earlier attempts had generated.
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
        """The request with the seed of this sample in the random stream `stream` of the job."""
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
        """Make the finished row of an output, or of an error. `extra` are the values of columns
        besides those of the output, such as the reasoning (`SplitOutput.columns`)."""
        images = None
        if not isinstance(self.request, RequestError):
            images = [image.reference for image in self.request.images]
        return FinishedRow(
            row_id=self.row_id,
            row_index=self.row_index,
            sample_index=self.sample_index,
            fields=self.fields,
            output=output,
            error=error,
            extra=extra or {},
            key=self.key,
            is_copied=is_copied,
            images=images,
            begun_tokens=self.begun_tokens,
        )
