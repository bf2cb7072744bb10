"""The settings of a run: schema, checks before a run, and shared parts of recipes."""

from jzero.config import schedules, teachers, turns
from jzero.config.architecture import TINY_MODELS, read_architecture, tiny_arch
from jzero.config.checks import (
    ON_PUSH_FIELDS,
    POSITIONS,
    context_mistakes,
    num_kept,
    positions_of,
    validate,
)
from jzero.config.data_sources import Rows, Sources
from jzero.config.flags import Flag, apply_flags, put_value, split_flags, value_of
from jzero.config.placement import Apart, Jobs, Together
from jzero.config.presets import (
    ADAPTER_LR_FACTOR,
    ADAPTER_RANK,
    GEMMA3_HUB_IDS,
    QWEN3_ADAPTER_HUB_IDS,
    QWEN25_HUB_IDS,
    QWEN_LARGEST_FIRST,
    add_adapter,
    choose_preset,
    has_adapter,
    tiny_model,
    tiny_model_of_qwen_tokens,
    with_adapter,
)
from jzero.config.schema import (
    MOST_WAITING_PUSHES,
    AdapterConfig,
    Card,
    Checkpoint,
    Config,
    Critic,
    End,
    EvalConfig,
    EveryCheckpoint,
    HubConfig,
    JudgeServer,
    Local,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    Push,
    Remote,
    RewardConfig,
    RolloutConfig,
    SandboxLimits,
    Setting,
    Sft,
    TaskConfig,
    ToolsConfig,
    TrainConfig,
    WarmStart,
    known_names,
    list_sections,
    list_settings,
)
from jzero.config.serialization import flatten, from_json, read_section, to_json
