"""The model that the settings `model.arch` describe, before there are any weights."""

from dataclasses import fields

from jzero.config.schema import ArchitectureConfig
from jzero.errors import UserError
from jzero.model.architecture import QwenConfig
from jzero.model.families import as_it_is, family_of


def new_model(vocab_size: int, arch: ArchitectureConfig) -> QwenConfig:
    """Returns the model of the settings `model.arch`.

    Raises UserError where the family does not exist, is read from checkpoints alone, or cannot
    compute these settings.
    """
    family = family_of(arch.model_type)
    if family.flat is not as_it_is:
        raise UserError(
            f"model.arch.model_type={arch.model_type} has a vision tower, which jzero does not "
            f"make: set it to {arch.model_type}_text, which is its language model"
        )
    entries = vars(arch)
    shared = {field.name for field in fields(QwenConfig)} & entries.keys()
    own = family.own_fields(entries)
    if family.stack is not None:
        reasons = list(family.refusals(entries))
        if reasons:
            raise UserError(f"model.arch: {'; '.join(reasons)}")
    else:  # settings of a hybrid, which this family does not read
        shared -= {"partial_rotary_factor"}
    values = {name: entries[name] for name in shared} | own
    return QwenConfig(vocab_size=vocab_size, **values)
