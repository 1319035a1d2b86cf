"""The configuration of a job: load.py reads it; the other files have its keys."""

from batchgen.compose.load_config import (
    constraint_config,
    growing,
    identity,
    job_file_text,
    load_config,
    resolved,
)
from batchgen.config.constraint_config import (
    CONSTRAINT_KINDS,
    AnyConstraintConfig,
    ConstraintConfig,
    JsonConstraintConfig,
    JsonSchemaConstraintConfig,
    NoConstraintConfig,
    constraint_column,
    job_constraint,
    job_value,
    make_constraint,
)
from batchgen.config.dataset_config import DatasetConfig
from batchgen.config.job_config import (
    COMMON_COLUMNS,
    PARSED,
    EngineGroup,
    JobConfig,
    ModelGroup,
    OutputConfig,
    ProgressConfig,
    SamplingConfig,
    ScoreConfig,
    StepConfig,
    StrategyConfig,
)
from batchgen.config.launcher_config import (
    LauncherConfig,
    LocalLauncherConfig,
    NoLauncherConfig,
    RayLauncherConfig,
    SlurmLauncherConfig,
)
from batchgen.config.prompt_config import (
    ChatPromptConfig,
    PromptConfig,
    TextPromptConfig,
    TokensPromptConfig,
)
from batchgen.config.strategy_options import strategy_options
from batchgen.config.workers_config import WorkersConfig

__all__ = [
    "COMMON_COLUMNS",
    "CONSTRAINT_KINDS",
    "PARSED",
    "AnyConstraintConfig",
    "ChatPromptConfig",
    "ConstraintConfig",
    "DatasetConfig",
    "EngineGroup",
    "JobConfig",
    "JsonConstraintConfig",
    "JsonSchemaConstraintConfig",
    "LauncherConfig",
    "LocalLauncherConfig",
    "ModelGroup",
    "NoConstraintConfig",
    "NoLauncherConfig",
    "OutputConfig",
    "ProgressConfig",
    "PromptConfig",
    "RayLauncherConfig",
    "SamplingConfig",
    "ScoreConfig",
    "SlurmLauncherConfig",
    "StepConfig",
    "StrategyConfig",
    "TextPromptConfig",
    "TokensPromptConfig",
    "WorkersConfig",
    "constraint_column",
    "constraint_config",
    "growing",
    "identity",
    "job_constraint",
    "job_file_text",
    "job_value",
    "load_config",
    "make_constraint",
    "resolved",
    "strategy_options",
]
