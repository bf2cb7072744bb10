"""The tokens that end a model's responses.

    ids = end_tokens.eos_ids(tok, directory)     # of the tokenizer, and of the model's files
    warning = end_tokens.missing_stop(tok, ids, stop_strings)

A model's files and its chat template may disagree about them, so both are read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from jzero.errors import UserError, shown
from jzero.model.directory import file_in, read_json
from jzero.model.tokenizer import reply_tokens
from jzero.types import JsonValue

CONFIG = "config.json"
GENERATION = "generation_config.json"


def end_of_turn(tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns the text of the token that ends the assistant's messages in the chat template."""
    # The first token after a response is the one that ends it.
    first = reply_tokens(tokenizer, "reply", None)[:1]
    return tokenizer.backend_tokenizer.decode(first, skip_special_tokens=False)


def missing_stop(
    tokenizer: PreTrainedTokenizerFast,
    stop_ids: Sequence[int],
    stop_strings: Sequence[str],
) -> str:
    """Returns a warning if the chat template's end of turn ends no response, and "" otherwise.

    stop_ids, stop_strings: end a response. A policy that writes the end of its turn then continues
    with a turn of the user, which it invents.
    """
    if not tokenizer.chat_template:
        return ""
    try:
        [token, *_] = reply_tokens(tokenizer, "reply", None)
    except UserError:
        return ""  # the template does not take a second turn
    if token in stop_ids or token not in tokenizer.added_tokens_decoder:
        return ""
    text = end_of_turn(tokenizer)
    if any(stop in text for stop in stop_strings):
        return ""
    return (
        f"warning: the chat template ends the assistant's turn with {text}, and the model's files "
        f"do not name it as an end token: set rollout.stop={text}, or add {token} to eos_token_id "
        f"in {GENERATION}"
    )


def eos_ids(tokenizer: PreTrainedTokenizerFast, directory: str = "") -> tuple[int, ...]:
    """Returns every token that ends a response, first the EOS token of the tokenizer itself.

    The other tokens are from the files in the model's `directory` (`named_eos_ids`). Raises
    UserError if there are none at all.
    """
    tokenizer_eos = tokenizer.eos_token_id
    assert tokenizer_eos is None or isinstance(tokenizer_eos, int), f"{tokenizer_eos=}"
    # The order matters: the tokenizer's own token comes first, and duplicates are dropped.
    ids: list[int | None] = [tokenizer_eos]
    if directory:
        _, named = named_eos_ids(Path(directory))
        ids += named
    unique = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not unique:
        raise UserError(
            f"neither the tokenizer nor {Path(directory, GENERATION)} nor {CONFIG} has an end of "
            "sequence: add eos_token_id there"
        )
    return unique


def named_eos_ids(directory: Path) -> tuple[str, list[int]]:
    """Returns the end-of-sequence ids of a model directory, and the name of their file.

    As in `transformers`, config.json counts if generation_config.json does not name any; the entry
    of the model itself precedes the entry of its text_config.
    """
    for name in (GENERATION, CONFIG):
        path = file_in(directory, name)
        if path is not None and (ids := eos_ids_in(read_json(path), path)):
            return name, ids
    return CONFIG, []


def eos_ids_in(entries: Mapping[str, JsonValue], source: Path | str) -> list[int]:
    """Returns the ids of `eos_token_id` in the entries of a file, [] without them.

    Raises UserError if they are not token ids; the message names the `source`.
    """
    named = entries.get("eos_token_id")
    text_config = entries.get("text_config")
    if named is None and isinstance(text_config, dict):
        named = text_config.get("eos_token_id")
    if named is None:
        return []
    given = named if isinstance(named, list) else [named]
    ids = [token for token in given if type(token) is int and token >= 0]
    if len(ids) < len(given):
        raise UserError(
            f"{source}: eos_token_id={shown(named)} is neither a token id nor a list of token ids: "
            "fix it"
        )
    return ids
