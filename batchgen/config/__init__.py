"""The job's configuration; see groups.py for its keys."""

from batchgen.config.groups import (
    ChatPromptConfig,
    DatasetConfig,
    EngineGroup,
    JobConfig,
    ModelGroup,
    OutputConfig,
    PromptConfig,
    SamplingConfig,
    StrategyConfig,
    TextPromptConfig,
    TokensPromptConfig,
)
from batchgen.config.load import identity, load_config, resolved, sampling_params

__all__ = [
    "ChatPromptConfig",
    "DatasetConfig",
    "EngineGroup",
    "JobConfig",
    "ModelGroup",
    "OutputConfig",
    "PromptConfig",
    "SamplingConfig",
    "StrategyConfig",
    "TextPromptConfig",
    "TokensPromptConfig",
    "identity",
    "load_config",
    "resolved",
    "sampling_params",
]
