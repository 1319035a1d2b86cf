"""The configuration groups `output`, `progress` and `score`: what a job writes, shows and scores.
The files in conf/ explain the keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from batchgen.config.groups.convert_value import check
from batchgen.config.groups.dataset_config import DatasetConfig as DatasetConfig
from batchgen.config.groups.prompt_config import PROMPT_KINDS as PROMPT_KINDS
from batchgen.config.groups.prompt_config import PromptConfig as PromptConfig
from batchgen.engine.interface.hidden_columns import (
    EMBEDDING,
    HIDDEN_STATES,
    Pooling,
)
from batchgen.engine.sampling.sampling_params import LogprobsMode
from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """The columns that are written, and the folder that they are written to."""

    dir: str
    columns: tuple[str, ...] = ()
    pooling: Pooling | None = None
    normalise: bool | None = None
    hidden_layers: tuple[int, ...] = ()
    top_logprobs: int = 5
    logprobs_mode: LogprobsMode = "raw"
    rows_per_shard: int = 1000
    text_column: str = "text"
    reasoning_end: str | None = None
    reasoning_start: str | None = None
    whole_text: bool = False
    overwrite: bool = False
    retry_errors: bool = False
    on_all_errors: Literal["stop", "continue"] = "stop"
    report: bool = True
    reuse: tuple[str, ...] | None = None
    begun_every: float = 120.0

    def __post_init__(self) -> None:
        check(bool(self.dir), "output.dir", "a folder", self.dir)
        object.__setattr__(self, "dir", user_folder(self.dir, "output.dir"))
        if self.reuse is not None:
            folders = tuple(user_folder(folder, "output.reuse") for folder in self.reuse)
            object.__setattr__(self, "reuse", folders)
        if len(set(self.columns)) != len(self.columns):
            raise ConfigError(f"output.columns names a column twice: {list(self.columns)}")
        self._check_hidden()
        for key in ("reasoning_end", "reasoning_start"):
            allowed = "null or a text such as '</think>'"
            check(getattr(self, key) != "", f"output.{key}", allowed, "")
        if self.reasoning_start is not None and self.reasoning_end is None:
            raise ConfigError(
                "output.reasoning_start is set without output.reasoning_end: set both, as in "
                "output.reasoning_start='<think>' output.reasoning_end='</think>'"
            )
        if self.whole_text and self.reasoning_end is not None:
            raise ConfigError(
                "output.whole_text=true leaves the reasoning in the text, and output.reasoning_end "
                "takes it out: choose one"
            )
        check(bool(self.text_column), "output.text_column", "a name", self.text_column)
        check(1 <= self.top_logprobs <= 256, "output.top_logprobs", "1 to 256", self.top_logprobs)
        check(self.rows_per_shard >= 1, "output.rows_per_shard", "at least 1", self.rows_per_shard)
        allowed = "0 (never) or a number of seconds"
        check(0 <= self.begun_every < math.inf, "output.begun_every", allowed, self.begun_every)

    def _check_hidden(self) -> None:
        """Check the keys for columns of hidden states."""
        if EMBEDDING not in self.columns and (self.pooling is not None or self.normalise):
            key = "normalise" if self.pooling is None else "pooling"
            raise ConfigError(
                f"output.{key} applies to embeddings, but output.columns has no {EMBEDDING}: "
                "add it, or leave the key out"
            )
        if (HIDDEN_STATES in self.columns) != bool(self.hidden_layers):
            raise ConfigError(
                f"output.columns={HIDDEN_STATES} and output.hidden_layers go together: name the "
                "layers, such as output.hidden_layers=[20], or leave both out"
            )


Reporter = Literal["trackio", "wandb", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressConfig:
    """What the job shows on the terminal while it runs, and the trackers that it reports to."""

    show: float = 30.0
    report_to: tuple[Reporter, ...] = ()
    project: str = "batchgen"

    def __post_init__(self) -> None:
        check(bool(self.project.strip()), "progress.project", "a name", self.project)
        allowed = "0 (never) or a number of seconds"
        check(0 <= self.show < math.inf, "progress.show", allowed, self.show)


CutTexts = Literal["as_marked", "wrong", "left_out"]
"""How scores count texts that reached `sampling.max_new_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig:
    """How `post` steps run, and how their marks become scores."""

    workers: int | None = None
    seconds: float = 10.0
    column: str = "mark"
    subset: str | None = None
    cluster: str | None = None
    choices: str | None = None
    ks: tuple[int, ...] | None = None
    cut_texts: CutTexts = "as_marked"

    def __post_init__(self) -> None:
        ks = self.ks
        workers = self.workers
        allowed = "null (one on each core) or 1 to 1024"
        check(workers is None or 1 <= workers <= 1024, "score.workers", allowed, workers)
        check(0 < self.seconds < math.inf, "score.seconds", "a number above 0", self.seconds)
        check(ks is None or (bool(ks) and min(ks) >= 1), "score.ks", "numbers from 1 on", ks)
        if self.column != "mark" and self.cut_texts == "wrong":
            raise ConfigError(
                "score.cut_texts=wrong gives cut texts the mark 0, but scores are computed from "
                f"the column {self.column} (score.column): choose as_marked or left_out"
            )
