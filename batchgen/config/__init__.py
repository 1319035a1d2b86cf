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
from batchgen.config.load import (
    COMMON_COLUMNS,
    identity,
    load_config,
    resolved,
    sampling_params,
    strategy_options,
)

__all__ = [
    "COMMON_COLUMNS",
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
    "strategy_options",
]
