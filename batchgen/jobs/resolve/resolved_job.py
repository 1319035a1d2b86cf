"""The interface between resolving a job and running it: an opened and checked job without
weights."""

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
        fingerprints: digests, by name, of what decides the answers besides configuration and data
            set: the files of the models, the dtype, the constraint.
        strategy: declares counts per row, which become columns, and lines for the job's summary.
        bos_id: the id with which the tokenizer begins a text; a prompt that is cut keeps it.
        answer: makes the token ids of the answer that is scored; None if rows generate.
        pooling, normalise: how embeddings are made: as `output` says, else as the checkpoint says;
            None if neither does.
        images: makes the images of rows; None if these have none.
        reasoning: separates answers from the model's other text; None if the whole text is the
            answer.
        model_sampling: what the model recommends for sampling, by key.
        decode: the text of token ids, to show prompts to people; None without a tokenizer.
        decode_all: the text with special tokens, to show single tokens.
        name: the job's name among those that share an engine; empty for a job alone.
        port: returns the engine that it shares with other jobs; None for an engine of its own.
        grades_at_once: whether shards are graded as soon as they are there, because other jobs wait
            for the grades; only in a folder of this machine.
        watch: is called every few seconds while rows are computed; an error that it raises ends the
            job.
        elsewhere: the attempts of other jobs that share this one's budget, as in metrics.json.
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
        """What the strategy counts for each row."""
        return () if self.strategy is None else self.strategy.counts

    @property
    def by_schedule(self) -> frozenset[str]:
        """The columns that do not depend on the row alone, see `Strategy.by_schedule`."""
        return frozenset() if self.strategy is None else self.strategy.by_schedule

    def build_engine(self) -> Engine:
        """The engine. This is called last, and only if there are rows to compute."""
        assert self.port is not None
        return self.port()

    def check_params(self, params: RequestParams) -> None:
        """Raise ValueError if parameters of a row cannot be honoured; the message names one."""

    def choices(self, constraint: Constraint | None) -> list[list[int]]:
        """The token ids of each choice of a row's constraint, if choices are scored."""
        return []

    @property
    def beside(self) -> Sequence[pa.Field]:
        """The columns of what rows say beside their text, such as thoughts."""
        return () if self.reasoning is None else self.reasoning.fields

    @property
    def split(self) -> Callable[[RequestOutput], SplitOutput]:
        """Makes the function that separates the answer from an output's other text, which becomes
        the columns `beside` it."""
        if self.reasoning is not None:
            return self.reasoning.split
        from batchgen.storage.shards.output_schema import SplitOutput  # it loads pyarrow

        return SplitOutput

    def contract(self) -> Mapping[str, str]:
        """The facts, by name, that decide the bits of rows besides models, data and
        configuration."""
        return {}

    def close(self) -> None:
        """Stop background work, and delete temporary files."""
        if self.images is not None:
            self.images.close()
        self.source.close()
