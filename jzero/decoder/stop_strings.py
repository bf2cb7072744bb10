"""Stop strings: strings that end a response, besides the tokenizer's end-of-sequence tokens.

A stop string can begin in the middle of one token and end in the middle of another, so the search
runs on text.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np


def num_tokens_to_keep(
    decode: Callable[[list[int]], str],
    tokens: np.ndarray,
    turn_start: int,
    first_new: int,
    stop_strings: Sequence[str],
) -> int | None:
    """Returns how many of `tokens` to keep because a stop string completes in the last kept one.

    `tokens[turn_start:]` is the current turn, and `tokens[first_new:]` has not been searched yet.
    Returns None if no stop string completes in these tokens.
    """
    if not stop_strings:
        return None

    # A token is at least one byte, so a stop string that completes in a new token starts at most
    # this many tokens before it.
    longest = max(len(stop.encode()) for stop in stop_strings)
    window_start = max(turn_start, first_new - longest)

    def completes_before(end: int) -> bool:
        text = decode(tokens[window_start:end].tolist())
        return any(stop in text for stop in stop_strings)

    # Most calls end here, after one search of all new tokens.
    if not completes_before(len(tokens)):
        return None
    ends = range(first_new + 1, len(tokens) + 1)
    return next(end for end in ends if completes_before(end))


def graded_text(
    decode: Callable[[list[int]], str],
    ids: list[int],
    stop_ids: Collection[int],
    stop_strings: Sequence[str],
    *,
    keep_stop: bool,
) -> str:
    """Returns the text of a turn as a grader sees it.

    The token that ended the turn and, without `keep_stop`, what begins with a stop string, are not
    part of the text. The tokens were sampled, so they are trained on.
    """
    has_stop = bool(ids) and ids[-1] in stop_ids
    text = decode(ids[:-1] if has_stop else ids)
    return text if keep_stop else text_before_stop(text, stop_strings)


def text_before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """Returns `text` up to its first stop string, or all of it if there is none."""
    positions = [text.index(stop) for stop in stop_strings if stop in text]
    return text[: min(positions, default=len(text))]
