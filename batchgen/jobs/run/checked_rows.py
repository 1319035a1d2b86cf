"""Prepares what a job needs for each row: its request, its output columns, and the job's manifest
(manifest.json, which records what decides the rows).

Runs, plans and dry runs call these functions before they look into the job's folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from batchgen.config.compose.config_identity import config_identity, growing
from batchgen.config.groups.constraint_config import (
    JsonConstraintConfig,
    JsonSchemaConstraintConfig,
)
from batchgen.config.groups.job_config import PARSED, JobConfig
from batchgen.config.groups.prompt_config import ChatPromptConfig, OpenAIPromptConfig
from batchgen.config.groups.sampling_config import UntilConfig
from batchgen.inputs.constraint.row_params import RowParams
from batchgen.inputs.dataset.seed_stream import depth_of, stream_of
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_prompts import fit_prompt, prompt_room
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.generation.valid_samples import ValidWhere
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.storage.shards.enough import Enough
from batchgen.storage.shards.output_fields import PROMPT_TOKEN_IDS
from batchgen.storage.shards.output_schema import OutputSchema
from batchgen.storage.shards.parsed_column import ParsedColumn
from batchgen.storage.stores.manifest import READ_JOB, ROWS, Manifest
from batchgen.util.errors import ConfigError


class CheckedRows(NamedTuple):
    """The result of `check_rows`.

    Attributes:
        request: makes the request of a row.
        schema: the output columns of the job.
        where: decides which samples are valid; None without `sampling.until`.
    """

    request: Callable[[Row], RowRequest]
    schema: OutputSchema
    where: ValidWhere | None


def check_rows(config: JobConfig, parts: ResolvedJob) -> CheckedRows:
    """Check everything that can be checked without the job's folder.

    Raises:
        ConfigError: prompts have no room, the rows lack the column of their constraints or options,
            columns have the same name, or `sampling.until.where` is wrong.
    """
    schema = output_schema(config, parts)
    return CheckedRows(row_request(config, parts), schema, ValidWhere.build(config, schema))


def max_rows(config: JobConfig, num_rows: int | None) -> int | None:
    """The most rows that the job can have; None if that is not known."""
    return config.dataset.limit if num_rows is None else num_rows


def output_schema(config: JobConfig, parts: ResolvedJob) -> OutputSchema:
    """The columns of the job's output files."""
    columns, constraint = config.output.columns, config.constraint
    parsed, until = None, config.sampling.until
    if PARSED in columns:
        assert isinstance(constraint, (JsonConstraintConfig, JsonSchemaConstraintConfig))
        # Where the reasoning is separated, the text begins with the JSON.
        marker = "" if parts.beside else constraint.start_after or ""
        parsed = ParsedColumn.build(config.params.constraint, marker)
    return OutputSchema.build(
        parts.source.schema,
        parts.columns,
        parts.counts,
        prompt_token_ids=PROMPT_TOKEN_IDS in columns,
        constrained=config.constrained,
        parsed=parsed,
        extra=parts.beside,
        text_column=config.output.text_column,
        answers=parts.answer is not None,
        replays=config.replays,
        images=parts.images is not None,
        enough=None if until is None else _enough(until),
        is_read=config.pooling is not None,
    )


def _enough(until: UntilConfig) -> Enough:
    """The rule by which a row has enough samples.

    Raises:
        ConfigError: no row could reach the width before it has all its samples.
    """
    enough = Enough(until.valid, until.most, until.width)
    if enough.fewest > until.most:
        raise ConfigError(
            f"sampling.until.width={until.width:g} needs {enough.fewest:,} samples of a row or "
            f"more, but sampling.until.most={until.most} ends it before that: raise most, or width"
        )
    return enough


def row_request(
    config: JobConfig, parts: ResolvedJob, *, with_images: bool = True
) -> Callable[[Row], RowRequest]:
    """Make the function from a row to its request, which raises RequestError for a row that cannot
    have one.

    A prompt is cut or refused so that the longest answer has room. Otherwise an answer could end at
    the model's limit, and nobody would see why. Without `with_images` only the headers of image
    files are read, and requests have no images.

    Raises:
        ConfigError: the longest answer leaves no room for any prompt.
    """
    if parts.max_model_len - config.sampling.max_new_tokens < 1:
        raise ConfigError(
            f"sampling.max_new_tokens={config.sampling.max_new_tokens} leaves no room for a "
            f"prompt: both together have at most {parts.max_model_len} tokens; lower it, or "
            "raise engine.max_model_len if the model allows it"
        )
    row_params = RowParams(config, parts.source.features, parts.check_params)

    def request(row: Row) -> RowRequest:
        if row.failure is not None:
            raise row.failure
        params = row_params.sampling(row)
        answer = None if parts.answer is None else parts.answer.of(row)
        # The most tokens that may follow the prompt.
        num_after = params.max_new_tokens if answer is None else len(answer)
        params = row_params.constrained(row, params)
        choices = parts.choices(params.constraint)
        for choice in choices:
            num_after = max(num_after, len(choice))
        room = prompt_room(parts.max_model_len, num_after)
        prompt = parts.prompt
        ids, images = (
            prompt.token_ids_and_images(row) if with_images else (prompt.token_ids(row), [])
        )
        too_long = "error" if images else config.prompt.too_long  # images cannot be cut
        ids = fit_prompt(ids, room, too_long, parts.bos_id)
        return RowRequest(ids, params, answer, choices, images)

    return request


def pin_values(config: JobConfig, parts: ResolvedJob) -> JobConfig:
    """The configuration with the values that are fixed when the job first starts: the pooling of
    embeddings, and the date that prompts name."""
    output = config.output
    if parts.pooling is not None:
        output = replace(output, pooling=parts.pooling)
    if parts.normalise is not None:
        output = replace(output, normalise=parts.normalise)
    config = replace(config, output=output)
    if parts.prompt.day is None:
        return config
    assert isinstance(config.prompt, (ChatPromptConfig, OpenAIPromptConfig))
    return replace(config, prompt=replace(config.prompt, date=parts.prompt.day))


def job_manifest(config: JobConfig, parts: ResolvedJob, schema: OutputSchema) -> Manifest:
    """The manifest of a job as it is requested now, without digests of its rows."""
    config = pin_values(config, parts)
    from batchgen.jobs.run.image_files import content_fingerprint  # loads the libraries for data

    fingerprints = parts.fingerprints
    read = parts.source.jobs
    groups = config_identity(config, [name for name in fingerprints if name.endswith("_model")])
    if (stream := stream_of(config.sampling.stream, read)) is not None:
        groups["sampling"]["stream"] = stream
    if (where := ValidWhere.build(config, schema)) is not None:
        groups["sampling"]["until"]["post"] = where.described
    if depth := depth_of(read):
        groups["dataset"]["depth"] = depth
    has_several = len(read) > 1
    jobs = {f"{READ_JOB} {job.name}" if has_several else READ_JOB: job.digest for job in read}
    return Manifest.build(
        groups,
        {"dataset": content_fingerprint(parts.source, parts.prompt), **fingerprints, **jobs},
        {field.name: str(field.type) for field in schema.arrow},
        {**growing(config), ROWS: parts.source.data.num_ready},
    )
