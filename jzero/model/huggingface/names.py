"""Finds the tensors of a model in a checkpoint whose names differ from those of the family's table.

    stored = model_tensors(directory, config)     # by the names of the family's table

Programs save one model under several prefixes, and next to tensors that belong to no model: buffers
of old versions of transformers, and heads of the training runs that a checkpoint came from.
transformers reads such checkpoints and skips these tensors, and so does jzero; one line names what
is skipped. All other unknown tensors are refused by `reading.check_tensors`.
"""

import functools
import re
from collections.abc import Iterable, Mapping
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
    known = known_names(config)
    renamed = with_names_of(known["embed"], tensors)
    named_by_table = {pattern for pattern in known.values() if "{}" not in pattern}
    found, skipped = {}, []
    for name, entry in renamed.items():
        is_known = name in named_by_table or is_of_layer(name, known.values())
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


def known_names(config: QwenConfig) -> Mapping[str, str]:
    """Returns the names in the family's tables by parameter; "{}" stands for a number."""
    family = family_of(config.model_type)
    others = {f"other {leaf}": stored.name for leaf, stored in family.other_tensors.items()}
    return {leaf: stored.name for leaf, stored in family.tensors.items()} | others


def is_of_layer(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a pattern has this name for some layer and expert."""
    generic = re.sub(r"\.\d+(?=\.)", ".{}", name)
    return generic in patterns


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
