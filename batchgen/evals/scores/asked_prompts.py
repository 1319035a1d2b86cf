"""What a job asked in each row, so that two jobs can be known to be one exam."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from batchgen.engine.interface.outputs import RequestError
from batchgen.evals.scores.graded_folder import GradedJob
from batchgen.storage.shards.image_column import PROMPT_IMAGES
from batchgen.util.templates.row_templates import RowTemplate
from batchgen.util.templates.used_columns import COLUMN_KEYS, prompt_templates, used_columns
from batchgen.util.text.row_json import json_text

_KEYS = ("row_id", "row_index", "sample_index")


def prompt_digests(jobs: Sequence[GradedJob]) -> list[dict[str, str]]:
    """For each job a digest of every row's prompt, by the row's id.

    The prompts are rendered again from the columns that the jobs have copied, without the model's
    chat format: two models that are asked the same have the same prompts. Where a job lacks a
    column of its prompts, the templates and the fingerprint of its data set stand for them.
    """
    whole = all(set(_wanted(job)) <= set(job.columns) for job in jobs)
    return [_rendered(job) if whole else _by_configuration(job) for job in jobs]


def _wanted(job: GradedJob) -> list[str]:
    return used_columns(job.config["prompt"])


def _rendered(job: GradedJob) -> dict[str, str]:
    prompt = job.config["prompt"]
    names = job.columns[len(_KEYS) : job.columns.index(job.text_column)]
    parts: list[Callable[[Mapping[str, Any], int], Any]] = []
    for key, source in prompt_templates(prompt):
        parts.append(RowTemplate(f"prompt.{key}", source, names).render)
    columns = [prompt[key] for key in COLUMN_KEYS if prompt.get(key) is not None]
    digests: dict[str, str] = {}
    images = [PROMPT_IMAGES] if PROMPT_IMAGES in job.columns and PROMPT_IMAGES not in names else []
    for row in job.rows(list(dict.fromkeys([*_KEYS, *names, *images]))):
        if row["row_id"] in digests:
            continue
        fields = {name: row[name] for name in names}
        made: list[Any] = [[column, fields[column.split(".")[0]]] for column in columns] or [None]
        made += [[image["digest"] for image in row[name] or ()] for name in images]
        try:
            made += [render(fields, row["row_index"]) for render in parts]
        except RequestError as error:  # the row had no prompt, for the same reason
            made.append([error.type, str(error)])
        digests[row["row_id"]] = _digest(json_text(made))
    return digests


def _by_configuration(job: GradedJob) -> dict[str, str]:
    given = job.config["prompt"]
    prompt = [prompt_templates(given), [given.get(key) for key in COLUMN_KEYS]]
    same = json.dumps([prompt, job.config.get("rows"), job.fingerprints["dataset"]], sort_keys=True)
    digest = _digest(same)
    return {row["row_id"]: digest for row in job.rows(["row_id"])}


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
