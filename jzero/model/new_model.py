"""Builds a new model, without a checkpoint, from the setting `model.arch`."""

from dataclasses import fields, replace

from jzero.config.architecture import config_file, read_architecture
from jzero.errors import UserError
from jzero.model.architecture import QwenConfig
from jzero.model.directory import read_json
from jzero.model.families import FAMILIES, Family, family_of, keep_entries
from jzero.model.huggingface import parse_config


def new_model(vocab_size: int, arch: str) -> QwenConfig:
    """Returns the model that `model.arch` describes, with the vocabulary of the tokenizer.

    Raises UserError if the family does not exist, can only be read from checkpoints, or does not
    support these entries, or if the config.json cannot be read.
    """
    if file := config_file(arch):
        model = parse_config(read_json(file), file)
        check_family(model.model_type)
        return replace(model, vocab_size=vocab_size)
    entries = vars(read_architecture(arch))
    family = check_family(entries["model_type"])
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


def check_family(model_type: str) -> Family:
    """Returns the family of a new model. Raises UserError if models of it cannot be new."""
    family = family_of(model_type)
    if family.nested is not keep_entries:
        raise UserError(
            f"model.arch has model_type={model_type}, which has a vision tower that jzero does not "
            f"make: set it to {model_type}_text, which is its language model"
        )
    return family


def check_experts(model: QwenConfig) -> None:
    """Raises UserError if the family and the number of experts do not go together."""
    has_experts = family_of(model.model_type).has_experts
    if has_experts and not model.num_experts:
        raise UserError(
            f"model.arch.model_type={model.model_type} has experts: set num_experts, "
            "num_experts_per_tok and moe_intermediate_size, or model.arch=tiny-qwen3-moe"
        )
    if model.num_experts and not has_experts:
        names = ", ".join(name for name, family in FAMILIES.items() if family.has_experts)
        raise UserError(
            f"model.arch.num_experts={model.num_experts}: model_type={model.model_type} has no "
            f"experts; set it to 0, or choose a family that has them: {names}"
        )
