"""Runs rows through the engine: makes requests of rows, and output rows of finished requests.

`run/computed_rows.py` creates a `Generation` for each attempt of a job. Some words are used
throughout: a job runs in *turns*, so that several jobs can share an engine (`turns.py`); *waves*
decide which samples of a row begin when (`sample_waves.py`); *begun* rows are those that an earlier
attempt has generated a part of (`begun_answers.py`).
"""

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.inputs.dataset.seed_stream import stream_of
from batchgen.inputs.dataset.source import Row, Source
from batchgen.inputs.images.row_images import without_pixels
from batchgen.inputs.model.job_engine import Engine
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.generation.begun_answers import STOP_SECONDS, BegunAnswers
from batchgen.jobs.generation.choice_scores import SCORED, with_scores
from batchgen.jobs.generation.fail_fast import FailFast
from batchgen.jobs.generation.progress import Progress
from batchgen.jobs.generation.sample_request import SampleRequest
from batchgen.jobs.generation.sample_waves import EverySample
from batchgen.jobs.generation.shard_queue import ShardQueue
from batchgen.jobs.generation.spending import Spending
from batchgen.jobs.generation.turns import Turns
from batchgen.jobs.reuse.row_reuse import RowReuse
from batchgen.storage.costs.cost_recorder import CostRecorder
from batchgen.storage.metrics.job_metrics import Metrics
from batchgen.storage.shards.column_kinds import PROMPT_IMAGES
from batchgen.storage.shards.output_schema import FinishedRow, SplitOutput
from batchgen.storage.shards.output_writer import OutputWriter
from batchgen.util.request_id import RequestId
from batchgen.util.signals import StopSignals

_IDLE_SECONDS = 0.05  # between two looks at the queue while nothing runs


class Generation:
    """Keeps the engine busy with a bounded window of requests until the rows run out."""

    def __init__(
        self,
        config: JobConfig,
        source: Source,
        request: Callable[[Row], RowRequest],
        split: Callable[[RequestOutput], SplitOutput],
        engine: Engine,
        writer: OutputWriter,
        metrics: Metrics,
        waves: EverySample,
        spending: Spending,
        costs: CostRecorder,
        begun: BegunAnswers,
        reuse: RowReuse | None = None,
        job: str = "",
    ) -> None:
        """Prepare to run rows.

        Args:
            request: makes the request of a row; raises RequestError for a row that cannot have one.
            split: separates the answer from the other texts of an output, such as its reasoning.
            writer: writes finished rows into shards.
            metrics: the figures of this attempt, for metrics.json.
            waves: decides when the samples of a row begin.
            spending: says when the budget is used up.
            costs: records the device time of requests.
            begun: records unfinished answers, so that a later attempt continues them.
            reuse: finds older rows to copy; None if none are copied.
            job: the name of the job among those that share the engine.
        """
        self._job = job
        self._source = source
        self._request, self._split = request, split
        self._has_images = PROMPT_IMAGES in writer.schema.arrow.names
        self._stream = stream_of(config.sampling.stream, source.jobs)
        self._writer = writer
        self._waves = waves
        self._metrics = metrics
        self._spending = spending
        self._reuse = reuse
        self._engine = engine
        self._costs, self._begun = costs, begun
        engine.measure_costs()
        self._scores_choices = config.scores_choices
        stops = config.output.on_all_errors == "stop"
        enabled = stops and not metrics.attempt.rows_resumed
        self._fail_fast = FailFast(enabled, writer.others_have_rows)
        # Twice as many requests as can run: if a step finishes all of them, the next ones are
        # queued already.
        self._window = 2 * engine.max_num_seqs
        self._in_flight: dict[Hashable, SampleRequest] = {}

    def turns(
        self,
        todo: ShardQueue,
        signals: StopSignals,
        progress: Progress,
        watch: Callable[[], None] = lambda: None,
    ) -> Turns[bool]:
        """Generate until all rows are written, by this worker or by others.

        The generator yields the seconds that the job can wait for its next turn. It returns True at
        the end, and False if a signal came or the budget was spent first. `watch` is called each
        time metrics are saved; an error that it raises ends the job.
        """
        requests = self._requests(todo)
        started = time.monotonic()
        while not todo.is_over():
            todo.in_flight = len(self._in_flight) + self._waves.pending
            finished = [] if self._fail_fast.wait else self._refill(requests)
            if self._in_flight:
                yield 0.0
                for output in self._engine.step():
                    if (row := self._ended(output)) is not None:
                        finished.append(row)
                self._costs.add(self._engine.take_costs())
            elif not finished:
                # A job that follows a running one gets more rows, which may not fail.
                num_rows = self._writer.num_rows
                if held := [] if todo.is_following else self._fail_fast.ended(num_rows):
                    self._write(held, progress)
                else:  # other workers do what is left, or rows are waited for
                    yield _IDLE_SECONDS
            passed = self._fail_fast.passed(finished, len(self._in_flight))
            self._write(self._waves.finished(passed), progress)
            seconds = time.monotonic() - started
            self._metrics.attempt.generate_s = round(seconds, 3)
            if self._metrics.timeline.due(seconds):
                self._add_point(seconds)
            if self._costs.due():
                self._costs.save()
            if self._begun.due():
                self._save_begun()
            if self._metrics.due():
                self._writer.sync()
                self._save_metrics()
                progress.set_others(self._metrics.others, self._metrics.attempt.worker)
                watch()
            elif finished and self._metrics.report_due():
                # The worker that completes the job does not wait until this one saves its figures.
                self._note_engine()
                self._metrics.report()
            if progress.due():
                progress.show(self._engine.generated_tokens, self._engine.running_lengths)
            if signals.received is not None or self._spending.is_spent:
                self._stop(progress)
                return False
        self._metrics.attempt.rows_recorded = 0
        self._add_point(time.monotonic() - started)
        self._end_costs()
        self._save_metrics()
        return True

    def _stop(self, progress: Progress) -> None:
        """Write the finished rows, record the tokens of the rows in flight, and save the
        figures."""
        self._write(self._waves.rest(), progress)
        self._save_begun(STOP_SECONDS)
        self._end_costs()
        self._save_metrics()

    def _save_begun(self, seconds: float | None = None) -> None:
        """Record the tokens of the rows in flight, unless all rows may be failing."""
        if self._fail_fast.holds_rows:
            return
        attempt, requests = self._metrics.attempt, self._in_flight
        attempt.rows_recorded = self._begun.save(
            lambda one: requests[one].of_sample(self._stream), seconds
        )

    def _end_costs(self) -> None:
        """Write the costs of all requests, those of unfinished ones included."""
        self._costs.add(self._engine.take_costs(wait=True))
        self._costs.save()

    def _write(self, finished: list[FinishedRow], progress: Progress) -> None:
        # `write` leaves out rows that another worker has written meanwhile; that worker counts
        # them.
        if new := self._writer.write(finished) if finished else []:
            if self._reuse is not None:
                self._reuse.keep(new)
            self._count(new)
            progress.add(new)
        self._waves.written(finished)

    def _add_point(self, seconds: float) -> None:
        rows = self._metrics.attempt.rows
        self._metrics.timeline.add(seconds, rows, self._engine.generated_tokens)

    def _save_metrics(self) -> None:
        self._note_engine()
        self._metrics.save("running")

    def _note_engine(self) -> None:
        self._metrics.in_flight = self._engine.num_running
        self._metrics.attempt.device_s = round(self._costs.seconds, 6)
        self._metrics.attempt.engine = dataclasses.asdict(self._engine.stats)

    def _refill(self, requests: Iterator[SampleRequest | None]) -> list[FinishedRow]:
        """Queue requests until the window is full. Returns the rows that need no engine: they
        failed, or were copied from older rows."""
        done: list[FinishedRow] = []
        while len(self._in_flight) + len(done) < self._window:
            request = next(requests, None)
            if request is None:
                break
            if isinstance(request.request, RequestError):
                done.append(request.finished(error=request.request))
            elif (row := self._submit(request)) is not None:
                done.append(row)
        return done

    def _has_room(self) -> bool:
        """Whether the engine could run more requests than it has."""
        return len(self._in_flight) < self._engine.max_num_seqs

    def _submit(self, request: SampleRequest) -> FinishedRow | None:
        """Queue a request and return None, or return the row of a request that was refused or could
        be copied."""
        request_id = RequestId(self._job, request.row_index, request.sample_index)
        prepared = request.of_sample(self._stream)
        if self._reuse is not None:
            request.key = key = self._reuse.key(prepared)
            if (copied := self._reuse.copy(key, request_id, prepared)) is not None:
                return request.finished(*copied, is_copied=True)
        prompt, params, answer, choices, row_images = prepared
        images = [row_image.image for row_image in row_images]
        try:
            # The longest choice first: if it fits into the engine, all choices do.
            by_length = (
                sorted(enumerate(choices), key=lambda pair: -len(pair[1])) if choices else ()
            )
            for number, ids in by_length:
                of_choice = request_id._replace(choice=number)
                self._engine.add_request(of_choice, prompt, SCORED, ids, images)
            begun = self._begun.find(request_id, prepared)
            if self._engine.add_request(request_id, prompt, params, answer, images, begun=begun):
                request.begun_tokens = 0 if begun is None else len(begun.token_ids)
        except RequestError as error:
            self._begun.forget(request_id)
            return request.finished(error=error)
        self._in_flight[request_id] = request
        return None

    def _ended(self, output: RequestOutput) -> FinishedRow | None:
        """The row that an output finishes; None if the row still waits for scores of its
        choices."""
        request_id = output.request_id
        if self._scores_choices:
            request_id = request_id._replace(choice=None)
            request = self._in_flight.get(request_id)
            if request is None:  # a choice of a row that was refused
                return None
            assert isinstance(request.request, RowRequest)
            request.ended.append(output)
            if len(request.ended) <= len(request.request.choices):  # the row and its choices
                return None
            output = with_scores(request.ended)
        self._begun.forget(request_id)
        return self._in_flight.pop(request_id).finished(*self._split(output))

    def _requests(self, todo: ShardQueue) -> Iterator[SampleRequest | None]:
        """Make a request of each missing sample. Yields None whenever no sample can begin at
        present."""
        for task in self._waves.tasks(iter(todo), self._has_room):
            if task is None:
                yield None
                continue
            row, samples = task
            fields: Mapping[str, Any] | None = None
            prepared: RowRequest | RequestError
            # If the copied columns themselves are wrong, the error row has nulls in them.
            try:
                fields = self._source.passthrough(row)
                if self._has_images:
                    fields = without_pixels(fields)
                prepared = self._request(row)
            except RequestError as error:
                prepared = error
            if fields is None:
                fields = dict.fromkeys(self._source.schema.names)
            for sample in samples:
                yield SampleRequest(row.id, row.index, sample, fields, prepared)

    def _count(self, finished: Sequence[FinishedRow]) -> None:
        self._metrics.tally.add(finished)
        attempt = self._metrics.attempt
        attempt.rows += len(finished)
        for row in finished:
            if row.output is None:
                attempt.error_rows += 1
            elif row.is_copied:
                attempt.rows_copied += 1
            else:
                output = row.output
                attempt.prompt_tokens += len(output.prompt_token_ids)
                attempt.prompt_tokens += len(output.answer_token_ids or ())
                attempt.generated_tokens += len(output.token_ids)
                for image in row.images or ():
                    attempt.images += 1
                    attempt.image_tokens += image["tokens"]
                attempt.rows_begun += row.begun_tokens > 0
                attempt.tokens_begun += row.begun_tokens
