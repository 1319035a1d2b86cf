"""The interface between resolving a job and running it: an opened and checked job without weights.

`resolve/opened_job.py` implements it with models; `jobs/run` and `jobs/generation` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.hidden_columns import Pooling
from batchgen.engine.interface.outputs import OutputColumn, RequestOutput, RowCount
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.inputs.images.row_images import RowImages
from batchgen.inputs.prompts.answer_text import Answer
from batchgen.inputs.prompts.row_prompts import Prompt

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.inputs.dataset.source import Source
    from batchgen.inputs.model.job_engine import Engine
    from batchgen.pages.tokens.channels import HarmonyChannels
    from batchgen.pages.tokens.reasoning import ReasoningMarkers
    from batchgen.storage.shards.output_schema import SplitOutput


@dataclass(frozen=True, kw_only=True)
class ResolvedJob:
    """A job whose rows, prompts and columns are known, and whose engine can be built.

    Attributes:
        source: the rows.
        prompt: makes the token ids of a row.
        max_model_len: the most tokens of prompt and answer together.
        columns: the per-token columns that the engine returns for this job's parameters.
        fingerprints: digests by name of everything that decides the answers besides the
            configuration and the data set: the files of the models, the dtype, the constraint.
        strategy: the decoding strategy; it declares counts of a row and lines of the job's summary.
        bos_id: the id with which the tokenizer begins a text; a prompt that is cut keeps it.
        answer: makes the token ids of the answer that is scored; None if rows generate.
        pooling, normalise: how embeddings are made, by the configuration or else by the checkpoint;
            None if neither says.
        images: loads the images of rows; None if rows have no images.
        reasoning: separates answers from the model's other text; None if the whole text is the
            answer.
        model_sampling: the sampling options that the model recommends, by key.
        decode: turns token ids into text, to show prompts to people; None without a tokenizer.
        decode_all: the same with special tokens, to show single tokens.
        name: the job's name among those that share an engine; empty for a job alone.
        port: returns the job's part of an engine that several jobs share; None if the job builds an
            engine.
        grades_at_once: whether shards are graded as soon as they are complete, because other jobs
            wait for the grades; only in a folder of this machine.
        watch: is called every few seconds while rows are computed; an error that it raises ends the
            job.
        elsewhere: returns the attempts of other jobs that share this job's budget, as in
            metrics.json.
    """

    source: Source
    prompt: Prompt
    max_model_len: int
    columns: Sequence[OutputColumn] = ()
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    strategy: Strategy | None = None
    bos_id: int | None = None
    answer: Answer | None = None
    pooling: Pooling | None = None
    normalise: bool | None = None
    images: RowImages | None = None
    reasoning: ReasoningMarkers | HarmonyChannels | None = None
    model_sampling: Mapping[str, float] = field(default_factory=dict)
    decode: Callable[[list[int]], str] | None = None
    decode_all: Callable[[list[int]], str] | None = None
    name: str = ""
    port: Callable[[], Engine] | None = None
    grades_at_once: bool = False
    watch: Callable[[], None] = lambda: None
    elsewhere: Callable[[], Sequence[Mapping[str, Any]]] = tuple

    @property
    def counts(self) -> Sequence[RowCount]:
        """The counts of each row that the strategy declares."""
        return () if self.strategy is None else self.strategy.counts

    @property
    def by_schedule(self) -> frozenset[str]:
        """The columns whose values depend on other rows of the batch, see
        `Strategy.by_schedule`."""
        return frozenset() if self.strategy is None else self.strategy.by_schedule

    def build_engine(self) -> Engine:
        """Build the engine. This is called last, and only if there are rows to compute."""
        assert self.port is not None
        return self.port()

    def check_params(self, params: RequestParams) -> None:
        """Check the sampling parameters of a row.

        Raises:
            ValueError: an option cannot be honoured; the message names it.
        """

    def choices(self, constraint: Constraint | None) -> list[list[int]]:
        """The token ids of each choice of a row's constraint; empty if choices are not scored."""
        return []

    @property
    def beside(self) -> Sequence[pa.Field]:
        """The columns of the texts that are written besides the answer, such as the reasoning."""
        return () if self.reasoning is None else self.reasoning.fields

    @property
    def split(self) -> Callable[[RequestOutput], SplitOutput]:
        """The function that separates the answer of an output from its other texts, which become
        the columns `beside`."""
        if self.reasoning is not None:
            return self.reasoning.split
        from batchgen.storage.shards.output_schema import SplitOutput  # loads pyarrow

        return SplitOutput

    def contract(self) -> Mapping[str, str]:
        """The facts by name that decide the bits of rows besides models, data and configuration."""
        return {}

    def close(self) -> None:
        """Stop background work, and delete temporary files."""
        if self.images is not None:
            self.images.close()
        self.source.close()
