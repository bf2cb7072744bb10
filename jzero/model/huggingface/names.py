"""Finds the tensors of a model in a checkpoint whose names differ from those of the family's table.

    stored = model_tensors(directory, config)     # by the names of the family's table

Programs save one model under several prefixes, and next to tensors that belong to no model: buffers
of old versions of transformers, and heads of the training runs that a checkpoint came from.
transformers reads such checkpoints and skips these tensors, and so does jzero; one line names what
is skipped. All other unknown tensors are refused by `reading.check_tensors`.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from jzero.hosts import processes
from jzero.model.architecture import QwenConfig
from jzero.model.families import family_of
from jzero.model.huggingface.headers import HeaderEntry, name_some, stored_tensors

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
# Before "embed_tokens", "layers" and "norm": of a model with a head; of one that was saved without
# its head; and of language models that are parts of a model with a vision tower.
PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
PARTS = ("embed_tokens", "layers", "norm")
LEFTOVERS = re.compile(
    # Rotary frequencies and attention masks, which are computed from config.json today.
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
    r"|(.*\.)?attn\.(masked_bias|bias)"
    # Heads of critics, and of reward models and classifiers.
    r"|(v_head|value_head|reward_head|score|classifier)\..*"
)


def model_tensors(directory: Path, config: QwenConfig) -> dict[str, HeaderEntry]:
    """Returns the tensors of a checkpoint by their names in the family's table.

    Raises UserError as `stored_tensors` does. Prints which tensors are skipped.
    """
    tensors, unlisted = stored_tensors(directory)
    family = family_of(config.model_type)
    tables = [*family.tensors.values(), *family.other_tensors.values()]
    patterns = {stored.name for stored in tables}  # "{}" stands for a number
    renamed = with_names_of(family.tensors["embed"].name, tensors)
    found, skipped = {}, []
    for name, entry in renamed.items():
        is_known = name in patterns or without_numbers(name) in patterns
        is_leftover = LEFTOVERS.fullmatch(name) or entry.name in unlisted
        if is_leftover and not is_known:
            skipped.append(entry.name)
        else:
            found[name] = entry
    if skipped:
        notice(
            f"{directory}: skipped {name_some(set(skipped))}, which the model does not need; an "
            "export does not have them"
        )
    return found


def without_numbers(name: str) -> str:
    """Returns the name of a tensor with "{}" for the numbers of its layer and expert."""
    return re.sub(r"\.\d+(?=\.)", ".{}", name)


def with_names_of(embedding: str, tensors: Mapping[str, HeaderEntry]) -> dict[str, HeaderEntry]:
    """Returns the tensors with the prefix that the name of the embedding has in a table."""
    # A family from outside may have other names.
    if not embedding.endswith(EMBEDDING):
        return dict(tensors)
    wanted = embedding.removesuffix(EMBEDDING)
    prefixes = (wanted, *PREFIXES)
    stored = next((prefix for prefix in prefixes if prefix + EMBEDDING in tensors), wanted)
    renamed = {}
    for name, entry in tensors.items():
        part = name.removeprefix(stored)
        if name.startswith(stored) and part.partition(".")[0] in PARTS:
            name = wanted + part
        elif name == f"language_model.{HEAD}" and HEAD not in tensors:
            name = HEAD
        renamed[name] = entry
    return renamed


@functools.cache
def notice(text: str) -> None:
    """Prints a line the first time that it is given: a run reads one model several times."""
    processes.print_once(text)
