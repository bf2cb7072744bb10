"""Finds overlap between data sets: equal questions, or shared n-grams of words."""

import hashlib
import re
from collections.abc import Sequence

# Digests (see `digest`) of 16 of the 1,319 questions in GSM8K's test split. Some copies of GSM8K on
# the hub have the test questions in their train split. Their names do not tell, so jzero rejects a
# training set by its content.
GSM8K_TEST_DIGESTS = frozenset(
    (
        "1bdb6d72a6cd",
        "1f1440c9051e",
        "22db7e630cde",
        "2e4c2fe0fcff",
        "4555b15771d4",
        "528183fa2363",
        "55dc07ae9905",
        "69ef098a410c",
        "7ebd39e8e0d9",
        "8c6ed497332c",
        "92b94d2aee01",
        "a962c7b56d77",
        "bb38f7b92e46",
        "d145a21b6202",
        "dd0036968ccd",
        "e6d600311d05",
    )
)


def digest(problem: str) -> str:
    """Returns a hash of the letters and digits of a problem, ignoring case."""
    # Copies of a data set often differ in white space and punctuation.
    letters = "".join(re.findall(r"\w", problem)).lower()
    return hashlib.blake2b(letters.encode(), digest_size=6).hexdigest()


def has_gsm8k_test_questions(problems: Sequence[str]) -> bool:
    """Returns whether `problems` contain more than half of GSM8K_TEST_DIGESTS."""
    digests = {digest(problem) for problem in problems}
    return 2 * len(GSM8K_TEST_DIGESTS & digests) > len(GSM8K_TEST_DIGESTS)


def word_ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """Returns the n-grams of lower-case words in a text. A shorter text is a single n-gram."""
    words = re.findall(r"\w+", text.lower())
    if not words:
        return set()
    count = max(1, len(words) - n + 1)
    return {tuple(words[i : i + n]) for i in range(count)}
