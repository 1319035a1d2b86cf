"""Opens a pipeline's folder: computes the address of each step, and finds its current and older
versions.

The *address* of a step is a digest of everything that its rows depend on: its configuration, its
models, and the addresses of the steps that it reads. A changed step has another address and
therefore a new folder. It copies the rows of its older versions that are still valid.
`run_pipeline` and `plan_steps` use `OpenPipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.jobs.generation.spending import Attempts
from batchgen.jobs.resolve.job_model import answers_depend_on
from batchgen.pipelines.run.addresses import Prints, addresses
from batchgen.pipelines.run.pipeline import Pipeline
from batchgen.storage.folder.pipeline_record import (
    PIPELINE_FILE,
    RECORD,
    PipelineRecord,
    StepVersions,
    step_folder_name,
)
from batchgen.storage.folder.step_folders import locked_record, read_record, refuse_linked
from batchgen.storage.leases.job_files import MANIFEST
from batchgen.storage.stores.metrics_file import METRICS, parse_metrics
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError, JobError


class OpenPipeline:
    """A pipeline with the address of each step. Close it with `with`.

    Attributes:
        pipeline: the steps.
        record: the new content of pipeline.json.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """Compute the addresses. Writes nothing. Raises ConfigError for a mistake in a model, or if
        the folder is not a pipeline's."""
        self.pipeline = pipeline
        self._prints = _prints(pipeline)
        self._storage = open_storage(pipeline.out, WorkersConfig())
        _refuse_foreign(self._storage.display_name, self._names())
        if self._storage.in_place and self._storage.path.is_dir():
            refuse_linked(self._storage.path)
        self._before = read_record(self._storage) or PipelineRecord()
        # (step, base address) → the edition that this process has begun, see `new_edition`
        self._newer: dict[tuple[str, str], int] = {}
        self.record = self._settled()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._storage.close()

    @property
    def address(self) -> Mapping[str, str]:
        """The current address of each step."""
        current = {name: self.record.steps[name].current for name in self.pipeline.steps}
        return {name: at for name, at in current.items() if at is not None}

    def engine_of(self, name: str) -> str:
        """Return the recipe of a step's engine. Steps with equal recipes can share an engine."""
        config = self.pipeline.steps[name].config
        prints = {key: value for key, value in self._prints[name].items() if key != "constraint"}
        group, layers = config.model, config.output.hidden_layers
        model = (group.load_format, group.quantization, group.kv_cache_dtype, group.dtype)
        return repr((sorted(prints.items()), model, config.strategy, config.engine, layers))

    def folder(self, name: str) -> str:
        """Return the current folder of a step, a path or URL."""
        return f"{self.pipeline.out.rstrip('/')}/{self.record.current[name]}"

    def older_folders(self, name: str) -> list[str]:
        """Return the folders of the older versions of a step, the newest first."""
        out = self.pipeline.out.rstrip("/")
        return [f"{out}/{step_folder_name(name, at)}" for at in self.record.steps[name].older]

    def config(self, name: str) -> JobConfig:
        """Return the job of a step. It reads the current folders of other steps, and copies rows of
        its own older versions."""
        folders = {other: self.folder(other) for other in self.pipeline.steps}
        config = self.pipeline.steps[name].within(folders)
        older = filter(self._is_begun, self.older_folders(name))
        reuse = (*older, *(config.output.reuse or ()))
        return replace(config, output=replace(config.output, reuse=reuse))

    def attempts_elsewhere(self, name: str) -> Attempts:
        """Return the attempts of the other steps that share the budget of a step. Steps without a
        budget of their own share the budget that stands above the steps. Older versions do not
        count."""
        steps = self.pipeline.steps
        budget = steps[name].config.budget
        sharing = [
            other for other in steps if other != name and steps[other].config.budget == budget
        ]
        attempts: list[Mapping[str, Any]] = []
        for other in sharing if budget.limits else ():
            path = self._storage.path / self.record.current[other] / METRICS
            content = self._storage.read(path)
            if content is not None:
                attempts += parse_metrics(content, str(path)).get("attempts", [])
        return attempts

    def _is_begun(self, folder: str) -> bool:
        """Whether the folder of a version of a step has a job."""
        name = folder.rpartition("/")[2]
        return self._storage.exists(self._storage.path / name / MANIFEST)

    def write(self) -> None:
        """Write pipeline.json and pipeline.yaml. Versions that other processes wrote meanwhile are
        kept."""
        storage = self._storage
        storage.make_folder(storage.path)
        with locked_record(storage) as self._before:
            self.record = self._settled()
            storage.write(storage.path / PIPELINE_FILE, self.pipeline.text())
            storage.write(storage.path / RECORD, self.record.text())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the record and the exports against other processes.

        Raises:
            JobError: another configuration was started in the folder meanwhile, so its exports are
                the current ones.
        """
        with locked_record(self._storage) as now:
            expected = {name: self.record.current[name] for name in self.pipeline.steps}
            for name, folder in expected.items():
                if (other := now.current.get(name)) != folder:
                    raise JobError(
                        f"{self._storage.display_name}: meanwhile another configuration was "
                        f"started in this folder, with step {name} in {other or 'no folder'} "
                        f"instead of {folder}, and its exports are the current ones. All rows of "
                        "this configuration are complete: run its command again to make it the "
                        "current one"
                    )
            yield

    def new_edition(self, name: str) -> None:
        """Give a step and its readers new addresses, because the rows that the step reads have
        changed.

        The edition of the version is increased by one. Workers that detect the same change thus
        choose the same address.
        """
        version = self.record.steps[name].versions[self.address[name]]
        self._newer[name, version.base] = version.edition + 1
        self.write()

    def _settled(self) -> PipelineRecord:
        """Return the record with the current address of each step, and all earlier versions."""
        before = self._before.steps

        def edition(name: str, base: str) -> int:
            recorded = before[name].versions.values() if name in before else ()
            editions = [version.edition for version in recorded if version.base == base]
            return max([*editions, self._newer.get((name, base), 0)], default=0)

        settled = addresses(self.pipeline.steps, self._prints, edition)
        steps = {}
        for name, (address, version) in settled.items():
            older = dict(before[name].versions) if name in before else {}
            steps[name] = StepVersions(address, {**older, address: older.get(address, version)})
        removed = {name: step for name, step in before.items() if name not in settled}
        return PipelineRecord(
            {**steps, **{name: StepVersions(None, s.versions) for name, s in removed.items()}}
        )

    def _names(self) -> list[str]:
        try:
            return self._storage.names(self._storage.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise ConfigError(
                f"output.dir={self._storage.display_name} is a file: give a folder"
            ) from None


def _prints(pipeline: Pipeline) -> dict[str, Prints]:
    """Return the fingerprints of each step's models. Steps with equal models share one
    computation."""
    computed: dict[str, Prints] = {}
    prints = {}
    for name, step in pipeline.steps.items():
        config = step.config
        key = repr((config.model, config.strategy, config.engine, config.constraint))
        if key not in computed:
            try:
                computed[key] = answers_depend_on(config)
            except ConfigError as error:
                raise ConfigError(f"step {name}: {error}") from None
        prints[name] = computed[key]
    return prints


def _refuse_foreign(display_name: str, names: list[str]) -> None:
    """Raise ConfigError if the folder, which holds these names, is not a pipeline's."""
    if MANIFEST in names:
        raise ConfigError(
            f"output.dir={display_name} holds the output of a job: give the pipeline its own folder"
        )
    foreign = sorted(name for name in names if not name.startswith("."))
    if foreign and RECORD not in names and PIPELINE_FILE not in names:
        listed = ", ".join(foreign[:3]) + (" …" if len(foreign) > 3 else "")
        raise ConfigError(
            f"output.dir={display_name} holds files that do not belong to a pipeline ({listed}): "
            "choose a new or empty folder"
        )
