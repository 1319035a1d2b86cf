"""The configuration of a job: a frozen dataclass for each Hydra group, checked when it is made.

The fields are the keys that users write; the files in `conf/` explain them with their units. Ranges
are checked here, types before that (`convert_value.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from batchgen.config.groups.adapter_names import (
    ADAPTER,
    LoRATemplate,
    check_choice,
    named_places,
    only_one,
)
from batchgen.config.groups.class_names import CLASSES, class_short_name
from batchgen.config.groups.constraint_config import (
    ChoiceConstraintConfig,
    ConstraintConfig,
    NoConstraintConfig,
    job_constraint,
)
from batchgen.config.groups.convert_value import check
from batchgen.config.groups.dataset_config import DatasetConfig as DatasetConfig
from batchgen.config.groups.output_config import OutputConfig, ProgressConfig, ScoreConfig
from batchgen.config.groups.prompt_config import PROMPT_KINDS as PROMPT_KINDS
from batchgen.config.groups.prompt_config import PromptConfig as PromptConfig
from batchgen.config.groups.prompt_config import answer_key
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.config.groups.workers_config import BudgetConfig, WorkersConfig
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.hidden_columns import CLASS_SCORES, EMBEDDING, POOLED, Pooling
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.util.errors import ConfigError

_MOST_IN_SHARD = 1_000_000_000
"""The most answers of a shard: a running job keeps a flag in memory for each of them."""
# The column with the parsed JSON of an answer.
PARSED = "parsed"
_PER_TOKEN = ("logprobs", "top_logprobs")
COMMON_COLUMNS = (*_PER_TOKEN, "prompt_token_ids", PARSED)
"""The columns of `output.columns` that every strategy has. Strategies declare the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGroup:
    """The model and its adapters. `engine.models.config.ModelConfig` has the model's
    config.json."""

    path: str
    name: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "gguf", "dummy"] = "auto"
    quantization: Literal["fp8"] | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    trust_remote_code: bool = False
    lora: str | tuple[str, ...] | Mapping[str, str] | None = None
    lora_column: str | None = None
    lora_grid: bool = False
    lora_fold: bool = False
    lora_template: LoRATemplate = "base"

    def __post_init__(self) -> None:
        check_choice(self.lora, self.lora_column, self.lora_grid)
        if self.lora_fold and not self.has_one_adapter:
            raise ConfigError(
                "model.lora_fold adds one adapter to the weights of the whole job: give "
                "model.lora=PATH alone, or set it to false"
            )
        if self.lora_template == "adapter" and not self.has_one_adapter:
            raise ConfigError(
                "model.lora_template=adapter takes the tokenizer and chat template of the only "
                "adapter of the job: give model.lora=PATH alone, or set it to base"
            )
        check(bool(self.path), "model.path", "a folder, a .gguf file or a hub name", self.path)
        if self.trust_remote_code:
            raise ConfigError(
                "model.trust_remote_code must be false: batchgen never runs code that comes with "
                "a model; models it knows need none"
            )

    @property
    def has_one_adapter(self) -> bool:
        """Whether all rows have the same adapter."""
        return self.adapter_column is None and only_one(self.lora)

    @property
    def adapter_column(self) -> str | None:
        """The column that names each row's adapter; None if all rows have the same adapter or
        none."""
        return self.grid_column or self.lora_column

    @property
    def grid_column(self) -> str | None:
        """The column of a row's adapter, if each row runs with each adapter; otherwise None."""
        return ADAPTER if self.lora_grid else None

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of several adapters, `base` included; empty if all rows have the same one."""
        if self.has_one_adapter:
            return ()
        return tuple(named_places(self.lora))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """A class and its arguments by name: an entry of `rows` or `post`.

    Attributes:
        target: the short name of one of batchgen's classes (`config.groups.class_names`), or the
            import path of a class of the user's.
        options: the arguments.
    """

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", class_short_name(self.target))


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig(StepConfig):
    """The class that starts the workers of a job, and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig(StepConfig):
    """The class of the decoding paradigm, and its arguments."""

    def __post_init__(self) -> None:
        StepConfig.__post_init__(self)
        parts, names = self.target.split("."), CLASSES["strategy"]
        check(
            self.target in names or (len(parts) > 1 and all(part.isidentifier() for part in parts)),
            "strategy._target_",
            f"{', '.join(names)} or the import path of a class",
            self.target,
        )


@dataclass(frozen=True, kw_only=True)
class EngineGroup(EngineConfig):
    """How the work is divided on the device. Only `max_model_len` affects the output."""

    device: Literal["auto", "cuda", "cpu"] = "auto"

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise ConfigError(f"engine.{error}") from None


@dataclass(frozen=True, kw_only=True)  # no slots: `params` is kept in the object's __dict__
class JobConfig:
    """The whole configuration of one job.

    `rows` are steps that choose rows or add columns before the prompt is made, `post` steps that
    add columns to finished rows, such as their mark.
    """

    model: ModelGroup
    dataset: DatasetConfig
    rows: tuple[StepConfig, ...] = ()
    prompt: PromptConfig
    sampling: SamplingConfig
    strategy: StrategyConfig
    constraint: ConstraintConfig = field(default_factory=NoConstraintConfig)
    engine: EngineGroup
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    launcher: LauncherConfig | None = None
    post: tuple[StepConfig, ...] = ()
    score: ScoreConfig = field(default_factory=ScoreConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    output: OutputConfig
    progress: ProgressConfig = field(default_factory=ProgressConfig)

    def __post_init__(self) -> None:
        kind = self.constraint.kind
        if kind != "none" and self.sampling.ignore_eos:
            raise ConfigError(
                "sampling.ignore_eos must be false with a constraint: a constrained row ends with "
                "EOS"
            )
        self._check_markers()
        until, samples = self.sampling.until, self.sampling.most_samples
        in_shard = self.output.rows_per_shard * samples
        if in_shard > _MOST_IN_SHARD:
            key = "sampling.n" if until is None else "sampling.until.most"
            raise ConfigError(
                f"output.rows_per_shard={self.output.rows_per_shard} with {key}={samples} makes "
                f"shards of {in_shard:,} answers: choose fewer rows, at most "
                f"{_MOST_IN_SHARD // samples:,}"
            )
        if PARSED in self.output.columns and kind not in ("json_schema", "json"):
            raise ConfigError(
                f"output.columns: {PARSED} is for JSON, but the constraint is {kind}: use "
                "constraint=json_schema or constraint=json, or leave the column out"
            )
        if self.scores_choices and self.sampling.n > 1:
            raise ConfigError(
                "constraint.scores describes a row and not its samples, but sampling.n is "
                f"{self.sampling.n}: set it to 1"
            )
        if self.scores_choices and until is not None:
            raise ConfigError(
                "constraint.scores describes a row and not its samples, but sampling.until draws "
                "samples: leave one of the two out"
            )
        answer = answer_key(self.prompt)
        self._check_pooled(answer)
        if answer is not None or not self.sampling.max_new_tokens:
            self._check_answer(answer)
        _ = self.params  # checks the ranges of the group sampling

    @property
    def scores_choices(self) -> bool:
        """Whether each choice of a row's constraint is scored."""
        return isinstance(self.constraint, ChoiceConstraintConfig) and self.constraint.scores

    def _check_answer(self, key: str | None) -> None:
        """Check the keys of a job that generates nothing: it scores answers from `key`, or only
        reads its rows if `key` is None."""
        limit = self.sampling.max_new_tokens
        per_token = [name for name in self.output.columns if name in _PER_TOKEN]
        if key is None and not set(self.output.columns).difference(COMMON_COLUMNS):
            raise ConfigError(
                "sampling.max_new_tokens=0 generates nothing: give an answer to score with "
                "prompt.answer='{{ COLUMN }}' or prompt.answer_ids_column, ask for an embedding "
                f"or for class scores with output.columns=[{EMBEDDING}] or [{CLASS_SCORES}], or "
                "set it to 1 or more"
            )
        if key is None and per_token:
            raise ConfigError(
                f"output.columns: {per_token[0]} describes generated or scored tokens, but this "
                "job only reads its rows: leave it out"
            )
        if limit:
            raise ConfigError(
                f"{key} is scored and nothing is generated after it, but "
                f"sampling.max_new_tokens is {limit}: set it to 0, or {key}=null"
            )
        for ok, what in (
            (self.constraint.kind == "none", f"constraint={self.constraint.kind} restricts"),
            (self.sampling.column is None, "sampling.column has options for"),
            (self.output.reasoning_end is None, "output.reasoning_end cuts"),
            (self.sampling.n == 1, f"sampling.n={self.sampling.n} asks for several samples of"),
            (self.sampling.until is None, "sampling.until draws more samples of"),
        ):
            if not ok:
                raise ConfigError(
                    f"{what} the generated text, but with {key or 'sampling.max_new_tokens=0'} "
                    "nothing is generated: leave it out"
                )

    def _check_pooled(self, answer: str | None) -> None:
        """Check that only jobs that just read their rows have columns of pooled hidden states."""
        pooled = [name for name in self.output.columns if name in POOLED]
        if pooled and self.sampling.max_new_tokens:
            raise ConfigError(
                f"output.columns: {pooled[0]} needs rows that are only read, but "
                f"sampling.max_new_tokens is {self.sampling.max_new_tokens}: set it to 0"
            )
        if pooled and answer is not None:
            raise ConfigError(
                f"output.columns: {pooled[0]} needs rows that are only read, but {answer} is "
                f"scored: set {answer}=null, and write the answer into the prompt"
            )

    @property
    def pooling(self) -> Pooling | None:
        """How rows that are only read are pooled; None if rows generate or have answers."""
        if self.sampling.max_new_tokens or answer_key(self.prompt) is not None:
            return None
        return self.output.pooling or "last"

    @property
    def replays(self) -> bool:
        """Whether the answers that are scored are trajectories: token ids of block diffusion, each
        with the step in which it was unmasked."""
        return self.prompt.answer_step_map_column is not None

    @property
    def is_scored(self) -> bool:
        """Whether scores are computed when the job ends: of marks, or of another column of
        numbers."""
        return bool(self.post) or self.score.column != "mark"

    @property
    def constrained(self) -> bool:
        """Whether rows can have a constraint."""
        return self.constraint.kind != "none" or self.sampling.column is not None

    @property
    def constraint_marker(self) -> str:
        """The text that ends free text before the constrained text; empty if there is none."""
        constraint = self.constraint
        marker = None if isinstance(constraint, NoConstraintConfig) else constraint.start_after
        return marker or self.output.reasoning_end or ""

    def _check_markers(self) -> None:
        """Check that reasoning and the free text before a constraint end at the same marker."""
        constraint, end = self.constraint, self.output.reasoning_end
        if end is None or isinstance(constraint, NoConstraintConfig):
            return
        if constraint.start_after != end:
            raise ConfigError(
                f"output.reasoning_end={end} with a constraint needs constraint.start_after={end}: "
                f"it applies after the reasoning; got {constraint.start_after!r}"
            )

    @cached_property
    def params(self) -> RequestParams:
        """The sampling parameters that all requests of the job share.

        Two of them are replaced for each request: `seed`, here the job's seed, and `constraint`,
        here None if rows have different ones. They are made once, because a schema may be large.
        """
        values = asdict(self.sampling)
        for name in ("n", "until", "column", "stream"):
            del values[name]
        columns = self.output.columns
        try:
            constraint = job_constraint(self.constraint)
        except ConstraintError as error:
            raise ConfigError(f"constraint: {error}") from None
        try:
            return RequestParams(
                **values,
                logprobs="logprobs" in columns,
                top_logprobs=self.output.top_logprobs if "top_logprobs" in columns else 0,
                logprobs_mode=self.output.logprobs_mode,
                columns=tuple(name for name in columns if name not in COMMON_COLUMNS),
                pooling=self.pooling,
                normalise=bool(self.output.normalise),
                constraint=constraint,
            )
        except ValueError as error:
            raise ConfigError(f"sampling.{error}") from None
