"""The settings of a run: their schema, the checks made before a run, and what recipes share."""

from jzero.config.checks import (
    POSITIONS,
    context_mistakes,
    positions_of,
    remembers_kept,
    validate,
)
from jzero.config.presets import (
    ADAPTER_LR_FACTOR,
    ADAPTER_RANK,
    QWEN3_ADAPTER_HUB_IDS,
    QWEN25_HUB_IDS,
    QWEN_LARGEST_FIRST,
    choose_preset,
    tiny_model,
    tiny_model_of_qwen_tokens,
    with_adapter,
)
from jzero.config.renamed import RENAMED_NAMES, check_renamed, new_names
from jzero.config.schema import (
    AdapterConfig,
    ArchitectureConfig,
    Config,
    CriticConfig,
    EvalConfig,
    JudgeConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    SandboxConfig,
    Setting,
    SftConfig,
    TaskConfig,
    TeacherConfig,
    ToolsConfig,
    TrainConfig,
    WarmStartConfig,
    list_settings,
)
from jzero.config.serialization import flatten, from_json, to_json
from jzero.errors import UserError


def __getattr__(name: str) -> object:
    """Tells the author of an older recipe the new name of a class that they import from here."""
    if name in RENAMED_NAMES:
        raise UserError(
            f"jzero.config.{name} is now jzero.config.{RENAMED_NAMES[name]}; "
            "some of its settings have new names too: see jzero/config/renamed.py"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
