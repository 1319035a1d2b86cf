"""What a job runs on: everything but the weights, opened and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.config.groups.constraint_config import ChoiceConstraintConfig
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.outputs import OutputColumn, RequestOutput, RowCount
from batchgen.engine.requests import output_columns
from batchgen.engine.rows.stopping import decode
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.strategy import Strategy
from batchgen.inputs.constraint.choice_columns import CHOICE_LOGPROBS, CHOICE_SCORES
from batchgen.inputs.images.row_images import RowImages
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.jobs.generation.choice_scores import choice_ids
from batchgen.jobs.resolve.job_model import model_sampling
from batchgen.jobs.resolve.opened_job import OpenedJob, open_job
from batchgen.pages.tokens.decode_tokens import decode_with

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.inputs.dataset.source import Row, Source
    from batchgen.jobs.generation.job_engine import Engine
    from batchgen.jobs.generation.spending import Attempts
    from batchgen.storage.shards.output_schema import SplitOutput


from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial


def all_is_answer() -> Callable[[RequestOutput], SplitOutput]:
    """What takes all of an output for the answer."""
    from batchgen.storage.shards.output_schema import SplitOutput  # it loads pyarrow

    return SplitOutput


@dataclass(frozen=True)
class JobParts:
    """What a job runs on; everything but the weights has been opened and checked.

    Attributes:
        prompt: makes the token ids of a row.
        bos_id: the id with which the tokenizer begins a text; a prompt that is cut keeps it.
        max_model_len: how many tokens prompt and answer may have together.
        columns: the per-token columns that the engine returns for this job's parameters.
        fingerprints: digests of what decides the answers besides configuration and data set, by
            name: the files of the models, the dtype, the constraint.
        check_params: raises ValueError for parameters of a row that cannot be honoured.
        name: which of the jobs that share an engine this is; empty for one alone.
        build_engine: loads the weights. It is called last, and only if there are rows to compute.
        strategy: declares counts per row, which become columns, and lines for the job's summary.
        choices: makes the token ids of each choice of a row's constraint, if choices are scored.
        answer: makes the token ids of a row's answer that is scored; None if rows generate.
        split: leaves the answer alone in an output's text, and makes the columns `beside` it.
        beside: the columns of what rows say beside their text, such as thoughts.
        decode: the text of token ids, to show prompts to people; None without a tokenizer.
        decode_all: the text with special tokens, to show single tokens.
        close: ends what works in the background.
        images: makes the images of rows; None if these have none.
        grades_at_once: whether shards are graded as soon as they are there, because other jobs wait
            for the grades; only in a folder of this machine.
        title: what the bar begins with; empty for a job by itself.
        contract: what decides the bits of rows besides models, data and configuration, by name.
        watch: is called every few seconds while rows are computed; an error that it raises ends the
            job.
        model_sampling: what the model recommends for sampling, by key.
        elsewhere: the attempts of other jobs that share this one's budget.
    """

    source: Source
    prompt: Prompt
    bos_id: int | None
    max_model_len: int
    columns: Sequence[OutputColumn]
    fingerprints: Mapping[str, str]
    build_engine: Callable[[], Engine]
    check_params: Callable[[SamplingParams], None] = lambda _: None
    strategy: Strategy | None = None
    answer: Callable[[Row], list[int]] | None = None
    choices: Callable[[Constraint | None], list[list[int]]] = lambda _: []
    name: str = ""
    split: Callable[[RequestOutput], SplitOutput] = field(default_factory=all_is_answer)
    beside: Sequence[pa.Field] = ()
    decode: Callable[[list[int]], str] | None = None
    decode_all: Callable[[list[int]], str] | None = None
    images: RowImages | None = None
    close: Callable[[], None] = lambda: None
    grades_at_once: bool = False
    title: str = ""
    contract: Callable[[], Mapping[str, str]] = dict
    watch: Callable[[], None] = lambda: None
    model_sampling: Mapping[str, float] = field(default_factory=dict)
    elsewhere: Callable[[], Attempts] = tuple

    @property
    def counts(self) -> Sequence[RowCount]:
        """What the strategy counts for each row."""
        return () if self.strategy is None else self.strategy.counts

    @property
    def by_schedule(self) -> frozenset[str]:
        """The columns that do not depend on the row alone, see `Strategy.by_schedule`."""
        return frozenset() if self.strategy is None else self.strategy.by_schedule


def job_parts(config: JobConfig) -> JobParts:
    """Open and check all that a job runs on, except the weights: those load when rows need them."""
    opened = open_job(config, wait=True)
    return parts_of(opened, config, opened.fingerprints(config))


def parts_of(opened: OpenedJob, config: JobConfig, fingerprints: Mapping[str, str]) -> JobParts:
    """What a job runs on that has been opened; `fingerprints` are those of models, dtype and
    constraint."""
    tokenizer = opened.model.tokenizer
    return JobParts(
        source=opened.source,
        prompt=opened.prompt,
        bos_id=None if tokenizer is None else tokenizer.bos_token_id,
        max_model_len=opened.max_model_len,
        columns=(
            *output_columns(config.params, opened.strategy, opened.context_columns),
            *((CHOICE_LOGPROBS, CHOICE_SCORES) if config.scores_choices else ()),
        ),
        fingerprints=fingerprints,
        build_engine=partial(opened.build_engine, config),
        check_params=opened.check_params,
        strategy=opened.strategy,
        answer=None if opened.answer is None else opened.answer.token_ids,
        choices=_choices(config, opened),
        split=all_is_answer() if opened.reasoning is None else opened.reasoning.split,
        beside=() if opened.reasoning is None else opened.reasoning.fields,
        decode=None if tokenizer is None else partial(decode, tokenizer),
        decode_all=None if tokenizer is None else decode_with(tokenizer),
        images=opened.images,
        close=partial(_close, opened),
        contract=partial(opened.contract, config),
        model_sampling=model_sampling(opened.model.path),
    )


def _close(opened: OpenedJob) -> None:
    if opened.compiler is not None:
        opened.compiler.close()
    if opened.images is not None:
        opened.images.close()
    opened.source.close()


def _choices(
    config: JobConfig, opened: OpenedJob
) -> Callable[[Constraint | None], list[list[int]]]:
    tokenizer, constraint = opened.model.tokenizer, config.constraint
    if not isinstance(constraint, ChoiceConstraintConfig) or not constraint.scores:
        return lambda _: []
    assert tokenizer is not None
    end = opened.model.eos_token_ids[0] if constraint.scores_end else None
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    return partial(choice_ids, encode=encode, end=end)
