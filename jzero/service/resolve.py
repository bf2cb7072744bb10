"""Settings of a run or a decoder that follow from its model."""

from dataclasses import replace

from jzero.config import Config, context_mistakes, positions_of, validate
from jzero.errors import UserError
from jzero.model import huggingface, peft
from jzero.model.base_model import BaseModel
from jzero.model.families import window_of


def with_given_adapter(config: Config) -> Config:
    """Returns the config with rank, alpha and targets of the initial adapter (model.adapter.path).

    Only config.json of the model is read. Raises UserError if the settings are inconsistent, or the
    adapter cannot be read.
    """
    given = config.model.adapter
    if not given.path:
        return config
    validate(config)
    directory = huggingface.resolve(config.model.path, ("config.json",))
    model, _ = huggingface.load_config(directory)
    adapter = peft.with_path(given, model)
    return replace(config, model=replace(config.model, adapter=adapter))


def check_context(config: Config, base: BaseModel) -> None:
    """Raises UserError if the run's sequences may be longer than the model allows."""
    positions = config.model.max_position_embeddings or positions_of(base.hf_config)
    mistakes = list(context_mistakes(config, positions, window_of(base.hf_config)))
    if mistakes:
        raise UserError("; ".join(mistakes))
