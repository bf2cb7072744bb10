"""The model that a run starts from: its configuration and its tokenizer."""

from pathlib import Path
from typing import NamedTuple

from jzero.config import ModelConfig
from jzero.files import JsonObject
from jzero.model import huggingface, qwen, tokenizer


class BaseModel(NamedTuple):
    """A model without its weights, which `Learner.load_params` reads."""

    directory: Path | None  # of the model to load; None for random parameters
    model: qwen.QwenConfig
    hf_config: JsonObject  # the model's config.json; empty for random parameters
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
        tok = tokenizer.load(config.tokenizer or str(directory))
        return BaseModel(directory, model, hf_config, tok)
    tok = tokenizer.load(config.tokenizer)
    model = qwen.QwenConfig(vocab_size=len(tok), **vars(config.arch))
    return BaseModel(None, model, {}, tok)
