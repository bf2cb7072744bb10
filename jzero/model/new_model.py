"""Builds a new model, without a checkpoint, from the settings `model.arch`."""

from dataclasses import fields

from jzero.config.schema import ArchitectureConfig
from jzero.errors import UserError
from jzero.model.architecture import QwenConfig
from jzero.model.families import FAMILIES, family_of, unchanged


def new_model(vocab_size: int, arch: ArchitectureConfig) -> QwenConfig:
    """Returns the model that `model.arch` describes.

    Raises UserError if the family does not exist, can only be read from checkpoints, or does not
    support these settings.
    """
    family = family_of(arch.model_type)
    if family.flat is not unchanged:
        raise UserError(
            f"model.arch.model_type={arch.model_type} has a vision tower, which jzero does not "
            f"make: set it to {arch.model_type}_text, which is its language model"
        )
    entries = vars(arch)
    # Fields that `model.arch` and QwenConfig share by name, then the fields of this family.
    shared = {field.name for field in fields(QwenConfig)} & entries.keys()
    family_fields = family.extra_fields(entries)
    if family.stack is not None:
        reasons = list(family.refusals(entries))
        if reasons:
            raise UserError(f"model.arch: {'; '.join(reasons)}")
    else:  # only hybrids read this setting
        shared -= {"partial_rotary_factor"}
    values = {name: entries[name] for name in shared} | family_fields
    return QwenConfig(vocab_size=vocab_size, **values)


def check_experts(model: QwenConfig) -> None:
    """Raises UserError if the family and the number of experts do not go together."""
    has_experts = family_of(model.model_type).has_experts
    if has_experts and not model.num_experts:
        raise UserError(
            f"model.arch.model_type={model.model_type} has experts: set model.arch.num_experts, "
            "model.arch.num_experts_per_tok and model.arch.moe_intermediate_size"
        )
    if model.num_experts and not has_experts:
        names = ", ".join(name for name, family in FAMILIES.items() if family.has_experts)
        raise UserError(
            f"model.arch.num_experts={model.num_experts}: model_type={model.model_type} has no "
            f"experts; set it to 0, or choose a family that has them: {names}"
        )
