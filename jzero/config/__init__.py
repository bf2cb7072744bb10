"""The settings of a run: their schema, the helpers of recipes, and the checks made before anything starts."""

from jzero.config.checks import CHOICES, LEAST, validate
from jzero.config.presets import QWEN25_HUB_IDS, choose_preset
from jzero.config.schema import (
    ArchitectureConfig,
    Config,
    CriticConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TaskConfig,
    TrainConfig,
    WarmStartConfig,
    flatten,
    to_json,
)
