"""The model that a run starts from: its configuration and its tokenizer."""

from pathlib import Path
from typing import NamedTuple

from jzero.config import POSITIONS, Config, ModelConfig, context_mistakes
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.model import huggingface, qwen, tokenizer

POSITIONS_FROM_SCRATCH = 32768  # max_position_embeddings of a model from random weights


class BaseModel(NamedTuple):
    """A model without its weights, which `Learner.load_params` reads."""

    directory: Path | None  # of the model to load; None for random parameters
    model: qwen.QwenConfig
    # The model's config.json; of random parameters only max_position_embeddings.
    hf_config: JsonObject
    tokenizer: tokenizer.PreTrainedTokenizerFast

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Returns the ids of the tokens that end a response."""
        return tokenizer.eos_ids(self.tokenizer, str(self.directory or ""))


def read_base_model(config: ModelConfig) -> BaseModel:
    """Reads the model that `config.path` names, or describes a new one of shape `config.arch`.

    Raises UserError if the path, the model or the tokenizer cannot be used.
    """
    if config.path:
        directory = huggingface.resolve(config.path)
        model, hf_config = huggingface.load_config(directory)
        if config.max_position_embeddings:
            hf_config = hf_config | {POSITIONS: config.max_position_embeddings}
        tok = tokenizer.load(config.tokenizer or str(directory))
        return BaseModel(directory, model, hf_config, tok)
    tok = tokenizer.load(config.tokenizer)
    model = qwen.QwenConfig(vocab_size=len(tok), **vars(config.arch))
    # Rotary embeddings have no last position: the limit is the architecture's claim, and not the
    # longest episode of one run.
    positions = config.max_position_embeddings or POSITIONS_FROM_SCRATCH
    return BaseModel(None, model, {POSITIONS: positions}, tok)


def check_context(config: Config, base: BaseModel) -> None:
    """Raises UserError if the run's sequences may be longer than the model has positions."""
    mistakes = list(context_mistakes(config, base.hf_config.get(POSITIONS)))
    if mistakes:
        raise UserError("; ".join(mistakes))
