"""One sample of one row on its way through the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.storage.shards.output_schema import FinishedRow


@dataclass(slots=True)
class SampleRequest:
    """One sample of one row, from before it is queued until it is finished; `request` is the error
    of a row that has no prompt. `ended` is what has ended of the sample and its choices, where
    choices are scored. `begun_tokens` is how many tokens earlier attempts had generated."""

    row_id: str
    row_index: int
    sample_index: int
    fields: Mapping[str, Any]
    request: RowRequest | RequestError
    key: bytes | None = None
    ended: list[RequestOutput] = field(default_factory=list)
    begun_tokens: int = 0

    def of_sample(self, stream: str | None) -> RowRequest:
        """What the request asks for, with its own seed in a job's `stream`."""
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
