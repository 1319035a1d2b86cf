"""Decides whether two jobs sat the same *exam*: equal prompts and equal targets in every row.

`batchgen compare` compares the scores of jobs only if `exam_differences` finds none. A prompt is
compared by a digest: of the rendered templates, if the job has copied the columns that they read to
its output (`dataset.columns`), or else of the templates and the data set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any

from batchgen.engine.interface.outputs import RequestError
from batchgen.evals.scores.graded_folder import GradedJob
from batchgen.evals.scores.job_score import job_targets
from batchgen.evals.scores.paired_comparison import Exam, row_differences
from batchgen.storage.shards.column_kinds import PROMPT_IMAGES
from batchgen.util.templates.row_templates import RowTemplate
from batchgen.util.templates.used_columns import COLUMN_KEYS, prompt_templates, used_columns
from batchgen.util.text.row_json import json_text

_DATASET = "dataset"
"""The name of the data set's fingerprint, a digest of its content, in a job's manifest."""
_KEYS = ("row_id", "row_index", "sample_index")
"""The first columns of all rows."""


class JobExam:
    """The prompts of a job and the targets of its answers, read when they are first compared."""

    def __init__(self, job: GradedJob) -> None:
        self._job = job

    @property
    def has_columns(self) -> bool:
        """Whether the job has copied all columns that its prompts read."""
        return set(used_columns(self._job.config["prompt"])) <= set(self._job.columns)

    @property
    def may_change(self) -> bool:
        """Whether prompts can differ under the same configuration: they have images, whose files
        may have changed, or the data set is not known."""
        return PROMPT_IMAGES in self._job.columns or _DATASET not in self._job.fingerprints

    @cached_property
    def rendered(self) -> dict[str, str]:
        """Row id → a digest of the row's prompt. Prompts are rendered again from the columns that
        the job has copied, without the model's chat format, so that two models with the same
        questions have the same digests."""
        return _rendered(self._job)

    @cached_property
    def by_configuration(self) -> tuple[str, dict[str, str]]:
        """A digest of the templates, the steps and the fingerprint of the data set; and row id →
        that digest, in place of one of the row's prompt. So between two jobs either no row differs
        or all rows do."""
        return _by_configuration(self._job)

    @cached_property
    def targets(self) -> dict[str, str]:
        """The targets with which the answers to each row were compared, where they are known."""
        return job_targets(self._job.path)


def exam_differences(a: JobExam, b: JobExam) -> tuple[str, ...]:
    """The differences between the exams of two jobs, one sentence each.

    If a job lacks a column of its prompts, the templates and the fingerprint of its data set are
    compared instead. If these are equal, prompts are rendered only if they `may_change`.
    """
    (digest_a, prompts_a), (digest_b, prompts_b) = a.by_configuration, b.by_configuration
    may_differ = digest_a != digest_b or a.may_change or b.may_change
    if may_differ and a.has_columns and b.has_columns:
        prompts_a, prompts_b = a.rendered, b.rendered
    return row_differences(Exam(prompts_a, a.targets), Exam(prompts_b, b.targets))


def _rendered(job: GradedJob) -> dict[str, str]:
    """See `JobExam.rendered`. A digest is of the copied columns, the images' digests and the
    rendered templates, or of the error that rendering raises."""
    prompt = job.config["prompt"]
    # Rows begin with _KEYS, then the columns copied from the data set, then the generated text.
    names = job.columns[len(_KEYS) : job.columns.index(job.text_column)]
    renderers: list[Callable[[Mapping[str, Any], int], Any]] = []
    for key, source in prompt_templates(prompt):
        renderers.append(RowTemplate(f"prompt.{key}", source, names).render)
    # The columns that the prompt takes without a template, such as `messages_column`.
    columns = [prompt[key] for key in COLUMN_KEYS if prompt.get(key) is not None]
    digests: dict[str, str] = {}
    # The digests of the images that the job has read, unless the data set has such a column.
    images = [PROMPT_IMAGES] if PROMPT_IMAGES in job.columns and PROMPT_IMAGES not in names else []
    for row in job.rows(list(dict.fromkeys([*_KEYS, *names, *images]))):
        if row["row_id"] in digests:  # another sample of the row
            continue
        fields = {name: row[name] for name in names}
        values: list[Any] = [[column, fields[column.split(".")[0]]] for column in columns]
        values += [[image["digest"] for image in row[name] or ()] for name in images]
        try:
            values += [render(fields, row["row_index"]) for render in renderers]
        except RequestError as error:  # the row had no prompt, for the same reason
            values.append([error.type, str(error)])
        digests[row["row_id"]] = _digest(json_text(values))
    return digests


def _by_configuration(job: GradedJob) -> tuple[str, dict[str, str]]:
    """See `JobExam.by_configuration`."""
    prompt_config = job.config["prompt"]
    keys = (*COLUMN_KEYS, "images", "image_column")
    prompt = [prompt_templates(prompt_config), [prompt_config.get(key) for key in keys]]
    decisive = [prompt, job.config.get("rows"), job.fingerprints.get(_DATASET)]
    digest = _digest(json.dumps(decisive, sort_keys=True))
    return digest, {row["row_id"]: digest for row in job.rows(["row_id"])}


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
