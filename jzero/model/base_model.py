"""Reads the model from which a run starts: its configuration and its tokenizer."""

from pathlib import Path
from typing import NamedTuple

from jzero.config import POSITIONS, ModelConfig, positions_of
from jzero.config.architecture import config_file
from jzero.config.drafts import Draft
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.model import adapters, chat_template, end_tokens, huggingface, mtp, qwen, tokenizer
from jzero.model.directory import read_json
from jzero.model.new_model import check_experts, new_model

POSITIONS_FROM_SCRATCH = 32768  # max_position_embeddings of a randomly initialized model


class BaseModel(NamedTuple):
    """A model without its weights, which `Learner.load_params` reads."""

    directory: Path | None  # the model to load; None for random parameters
    model: qwen.QwenConfig
    # The model's config.json; for random parameters only max_position_embeddings.
    hf_config: JsonObject
    tokenizer: tokenizer.PreTrainedTokenizerFast

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Returns the ids of the tokens that end a response."""
        return end_tokens.eos_ids(self.tokenizer, str(self.directory or ""))


def read_base_model(config: ModelConfig, draft: Draft | None = None) -> BaseModel:
    """Reads the model at `config.path`, or describes a new one with the architecture `config.arch`.

    draft: rollout.draft, whose drafts may need a head (`mtp.py`).

    Raises UserError if the path, the model or the tokenizer cannot be used, if the tokenizer has
    ids beyond the model's vocabulary, or if the model does not support the adapter or the drafts.
    """
    if config.path:
        directory = huggingface.resolve(config.path)
        model, hf_config = huggingface.load_config(directory)
        model = mtp.with_head(model, draft, hf_config)
        if config.max_position_embeddings:
            hf_config = hf_config | {POSITIONS: config.max_position_embeddings}
        tok = tokenizer.load(config.tokenizer or str(directory))
        chat_template.set_prompt_date(tok, config.prompt_date)
        check_vocabulary(directory, model.vocab_size, tok)
        check_experts(model)
        adapters.check(model, config.adapter)
        return BaseModel(directory, model, hf_config, tok)
    tok = tokenizer.load(config.tokenizer)
    chat_template.set_prompt_date(tok, config.prompt_date)
    model = mtp.with_head(new_model(tokenizer.num_ids(tok), config.arch), draft)
    check_experts(model)
    adapters.check(model, config.adapter)
    # Rotary embeddings have no last position: the limit describes the architecture, and not the
    # longest episode of one run.
    file = config_file(config.arch)
    positions = (
        config.max_position_embeddings
        or (positions_of(read_json(file)) if file else None)
        or POSITIONS_FROM_SCRATCH
    )
    return BaseModel(None, model, {POSITIONS: positions}, tok)


def check_vocabulary(
    directory: Path,
    vocab_size: int,
    tok: tokenizer.PreTrainedTokenizerFast,
) -> None:
    """Raises UserError if a token has no embedding."""
    # JAX would silently read another token's embedding.
    num_ids = tokenizer.num_ids(tok)
    if num_ids > vocab_size:
        raise UserError(
            f"{directory / 'config.json'} has vocab_size={vocab_size}, and the tokenizer has ids "
            f"up to {num_ids - 1}: set model.tokenizer to the tokenizer of this model"
        )
    # The sampler would never produce an end token beyond the vocabulary.
    file, eos_ids = end_tokens.named_eos_ids(directory)
    for token in eos_ids:
        if token >= vocab_size:
            raise UserError(
                f"{directory / file} has eos_token_id={token}, beyond the model's "
                f"vocabulary of {vocab_size}: correct it"
            )
