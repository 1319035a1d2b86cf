"""The job: rows from the source, through the engine, to the writer; each exactly once."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from batchgen.config import JobConfig, identity, resolved, sampling_params
from batchgen.dataset import Row, RowSource
from batchgen.dataset_card import dataset_card
from batchgen.engine.outputs import OutputColumn, RequestError, RequestOutput
from batchgen.engine.sampling_params import SamplingParams
from batchgen.errors import JobError
from batchgen.fingerprint import derive_seed
from batchgen.job_folder import JobFolder
from batchgen.manifest import Manifest, write_atomic
from batchgen.metrics import Metrics, Totals
from batchgen.output_schema import PROMPT_TOKEN_IDS, FinishedRow, OutputSchema
from batchgen.progress import Progress, summary
from batchgen.prompts import Prompt, fit_prompt
from batchgen.shards import shard_files
from batchgen.signals import JobStopped, StopSignals
from batchgen.writer import OutputWriter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Engine(Protocol):
    """What a job needs of the engine."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        """Queue a request; RequestError if it can never be served."""
        ...

    def step(self) -> list[RequestOutput]:
        """One step of the engine; returns the requests that it finished."""
        ...

    @property
    def stats(self) -> "DataclassInstance":
        """Counts since the engine started, for metrics.json."""
        ...


@dataclass(frozen=True)
class JobParts:
    """What a job runs on, with everything but the weights already opened and checked.

    Attributes:
        prompt: rows to token ids.
        columns: the per-token columns that the engine will give for this job's parameters.
        fingerprints: of the model's files and the tokenizer, by name.
        build_engine: loads the weights; called last, and only if there are rows to compute.
    """

    source: RowSource
    prompt: Prompt
    columns: Sequence[OutputColumn]
    fingerprints: Mapping[str, str]
    build_engine: Callable[[], Engine]


@dataclass(frozen=True)
class JobResult:
    """How a job ended without an error.

    Attributes:
        error_rows: output rows without an answer, of a complete job.
        stopped_by: the number of the signal that stopped it, None if the job is complete.
        message: for the user.
    """

    error_rows: int
    stopped_by: int | None
    message: str

    @property
    def exit_code(self) -> int:
        """0 all rows have an answer, 3 some have an error, 128 + signal if stopped."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return 3 if self.error_rows else 0


def run_job(config: JobConfig, parts: JobParts) -> JobResult:
    """Run a job to its end, or go on with one that was stopped or killed.

    Everything that can be refused is refused before the weights load. SIGINT and SIGTERM stop the
    job cleanly; a second one at once.

    Raises:
        ConfigError: a user's mistake; nothing was written.
        JobError: output cannot be written or is damaged. Finished rows are safe.
        Exception: whatever the engine or the source raises. Finished rows are safe.
    """
    folder = Path(config.output.dir)
    with StopSignals() as signals:
        try:
            return _run(config, parts, signals)
        except JobStopped:
            assert signals.received is not None
            message = f"Stopped before the first row. {_resume(folder)}"
            return JobResult(0, signals.received, message)


def _run(config: JobConfig, parts: JobParts, signals: StopSignals) -> JobResult:
    output, source = config.output, parts.source
    schema = OutputSchema.build(
        source.schema, parts.columns, prompt_token_ids=PROMPT_TOKEN_IDS in output.columns
    )
    fingerprints = {"dataset": source.fingerprint, **parts.fingerprints}
    manifest = Manifest.build(identity(config), fingerprints)
    samples = config.sampling.n
    with (
        JobFolder(Path(output.dir), manifest, overwrite=output.overwrite) as folder,
        OutputWriter(folder.data, folder.journal, schema, output.rows_per_shard, samples) as writer,
    ):
        write_atomic(folder.path / "config.yaml", yaml.safe_dump(resolved(config), sort_keys=False))
        metrics = Metrics(folder.path / "metrics.json", writer.resumed)
        todo = _Todo(source, writer)
        is_done = todo.is_empty()
        if is_done and metrics.was_complete:
            return _already_complete(folder)
        with _recorded(metrics, folder.path):
            if not is_done:
                total = None if source.num_rows is None else source.num_rows * samples
                generation = _Generation(config, parts, writer, metrics)
                signals.deferred = True
                with Progress(total, writer.resumed) as progress:
                    if not generation.run(todo, signals, progress):
                        return _stopped(writer, metrics, signals, folder.path)
            signals.deferred = True
            writer.finish(todo.num_rows)
            return _complete(config, folder, schema, manifest, metrics)


class _Todo:
    """The (row, samples) that are not done, in order.

    Attributes:
        num_rows: rows of the source so far; all of them once the iterator is at its end.
    """

    def __init__(self, source: RowSource, writer: OutputWriter) -> None:
        self._writer = writer
        self.num_rows = writer.num_leading_rows
        self._rows = source.rows(self.num_rows)
        self._next = self._missing()

    def is_empty(self) -> bool:
        """Whether nothing is left to compute; reads up to the first row that is not done."""
        first = next(self._next, None)
        if first is not None:
            self._next = itertools.chain([first], self._next)
        return first is None

    def __iter__(self) -> Iterator[tuple[Row, list[int]]]:
        return self._next

    def _missing(self) -> Iterator[tuple[Row, list[int]]]:
        for row in self._rows:
            self.num_rows = row.index + 1
            if samples := self._writer.missing(row.index):
                yield row, samples


@dataclass(frozen=True, slots=True)
class _Request:
    """One (row, sample) on its way; with `error` instead of `prompt` if it has no prompt."""

    row_id: str
    row_index: int
    sample_index: int
    fields: Mapping[str, Any]
    prompt: list[int]
    error: RequestError | None

    def finished(
        self, output: RequestOutput | None = None, error: RequestError | None = None
    ) -> FinishedRow:
        return FinishedRow(
            self.row_id, self.row_index, self.sample_index, self.fields, output, error
        )


class _Generation:
    """Keeps the engine busy with a bounded window of requests until the rows run out."""

    def __init__(
        self, config: JobConfig, parts: JobParts, writer: OutputWriter, metrics: Metrics
    ) -> None:
        """Load the engine."""
        self._source = parts.source
        self._prompt = parts.prompt
        self._too_long = config.prompt.too_long
        self._params = sampling_params(config)
        self._writer = writer
        self._metrics = metrics
        self._engine = parts.build_engine()
        # Twice what can run, so that a step which finishes every running row finds as many waiting.
        self._window = 2 * config.engine.max_num_seqs
        self._in_flight: dict[str, _Request] = {}

    def run(self, todo: _Todo, signals: StopSignals, progress: Progress) -> bool:
        """Generate until all rows are written; False if a signal came first."""
        requests = self._requests(todo)
        started = time.monotonic()
        while True:
            finished = self._refill(requests)
            if self._in_flight:
                for output in self._engine.step():
                    request = self._in_flight.pop(output.request_id)
                    finished.append(request.finished(output=output))
            elif not finished:
                self._save_metrics()
                return True
            if finished:
                self._writer.write(finished)
                self._count(finished)
                progress.add(len(finished))
            self._metrics.attempt.generate_s = round(time.monotonic() - started, 3)
            if self._metrics.due():
                self._save_metrics()
            if progress.due():
                progress.show(self._metrics, len(self._in_flight))
            if signals.received is not None:
                self._save_metrics()
                return False

    def _save_metrics(self) -> None:
        self._metrics.attempt.engine = dataclasses.asdict(self._engine.stats)
        self._metrics.save("running")

    def _refill(self, requests: Iterator[_Request]) -> list[FinishedRow]:
        """Fill the window; returns the rows that failed before they reached the engine."""
        failed: list[FinishedRow] = []
        while len(self._in_flight) + len(failed) < self._window:
            request = next(requests, None)
            if request is None:
                break
            error = request.error or self._submit(request)
            if error is not None:
                failed.append(request.finished(error=error))
        return failed

    def _submit(self, request: _Request) -> RequestError | None:
        request_id = f"{request.row_index}.{request.sample_index}"
        seed = derive_seed(self._params.seed, request.row_id, request.sample_index)
        params = dataclasses.replace(self._params, seed=seed)
        try:
            self._engine.add_request(request_id, request.prompt, params)
        except RequestError as error:
            return error
        self._in_flight[request_id] = request
        return None

    def _requests(self, todo: _Todo) -> Iterator[_Request]:
        """A request per missing sample; a row's prompt is made once for all of them."""
        for row, samples in todo:
            prompt: list[int] = []
            fields: Mapping[str, Any] = dict.fromkeys(self._source.schema.names)
            failure: RequestError | None = None
            try:
                fields = self._source.passthrough(row)
                prompt = self._fit(self._prompt.token_ids(row))
            except RequestError as error:
                failure = error
            for sample in samples:
                yield _Request(row.id, row.index, sample, fields, prompt, failure)

    def _fit(self, prompt: list[int]) -> list[int]:
        """The prompt, cut if that was asked for, so that the whole answer has room."""
        room = self._engine.max_model_len - self._params.max_new_tokens
        return fit_prompt(prompt, max(1, room), self._too_long)

    def _count(self, finished: Sequence[FinishedRow]) -> None:
        attempt = self._metrics.attempt
        attempt.rows += len(finished)
        for row in finished:
            if row.output is None:
                attempt.error_rows += 1
            else:
                attempt.prompt_tokens += len(row.output.prompt_token_ids)
                attempt.generated_tokens += len(row.output.token_ids)


@contextmanager
def _recorded(metrics: Metrics, folder: Path) -> Iterator[None]:
    """Keep metrics.json true however the job ends, and tell the user of an error what is safe."""
    metrics.save("running")
    try:
        yield
    except JobStopped:
        metrics.save("stopped")
        raise
    except Exception as error:
        error.add_note(f"Finished rows are safe. {_resume(folder)}")
        # On a full disk this fails too, and must not hide why.
        with contextlib.suppress(OSError, JobError):
            metrics.save("failed")
        raise


def _stopped(
    writer: OutputWriter, metrics: Metrics, signals: StopSignals, folder: Path
) -> JobResult:
    writer.flush()
    metrics.save("stopped")
    done = metrics.attempt.rows + metrics.attempt.rows_resumed
    return JobResult(0, signals.received, f"Stopped with {done:,} rows done. {_resume(folder)}")


def _complete(
    config: JobConfig, folder: JobFolder, schema: OutputSchema, manifest: Manifest, metrics: Metrics
) -> JobResult:
    folder.remove_journal()
    totals = metrics.totals = Totals.read(list(shard_files(folder.data).values()))
    card = dataset_card(resolved(config), manifest.fingerprints, schema.arrow, totals)
    write_atomic(folder.path / "README.md", card)
    metrics.save("complete")
    return JobResult(totals.error_rows, None, summary(totals, str(folder.path), metrics))


def _already_complete(folder: JobFolder) -> JobResult:
    folder.remove_journal()
    totals = Totals.read(list(shard_files(folder.data).values()))
    message = "This job is complete already; nothing was computed.\n"
    return JobResult(totals.error_rows, None, message + summary(totals, str(folder.path)))


def _resume(folder: Path) -> str:
    return f"The output so far is in {folder}; run the same command to go on from there."
