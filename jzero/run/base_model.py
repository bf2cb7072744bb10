"""The model that a run starts from: its configuration and its tokenizer."""

from pathlib import Path
from typing import NamedTuple

from jzero.config import ModelConfig
from jzero.errors import UserError
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

    Raises UserError if the path, the model or the tokenizer cannot be used, or if the tokenizer has
    ids beyond the model's vocabulary.
    """
    if config.path:
        directory = huggingface.resolve(config.path)
        model, hf_config = huggingface.load_config(directory)
        tok = tokenizer.load(config.tokenizer or str(directory))
        check_vocabulary(directory, model.vocab_size, tok)
        return BaseModel(directory, model, hf_config, tok)
    tok = tokenizer.load(config.tokenizer)
    model = qwen.QwenConfig(vocab_size=tokenizer.num_ids(tok), **vars(config.arch))
    return BaseModel(None, model, {}, tok)


def check_vocabulary(
    directory: Path, vocab_size: int, tok: tokenizer.PreTrainedTokenizerFast
) -> None:
    """Raises UserError if a token has no embedding. JAX would read another token's in its place."""
    num_ids = tokenizer.num_ids(tok)
    if num_ids > vocab_size:
        raise UserError(
            f"{directory / 'config.json'} has vocab_size={vocab_size}, and the tokenizer has ids "
            f"up to {num_ids - 1}: set model.tokenizer to the tokenizer of this model"
        )
    for token in tokenizer.generation_eos_ids(directory):
        if token >= vocab_size:
            raise UserError(
                f"{directory / tokenizer.GENERATION} has eos_token_id={token}, beyond the model's "
                f"vocabulary of {vocab_size}: mend it"
            )
