"""Reads tables of answers and gold answers, of which some are the same."""

from collections.abc import Mapping

Pair = tuple[str, bool, str, str, str]  # family, whether they are the same, answer, gold, question


def pairs_of(texts: Mapping[str, str]) -> list[Pair]:
    """Returns the pairs of each family's text.

    A line is `answer == gold` or `answer != gold`, and ` ?? question` may follow.
    """
    pairs = []
    for family, text in texts.items():
        for line in filter(None, map(str.strip, text.splitlines())):
            pair, _, question = line.partition(" ?? ")
            is_same = " == " in pair
            answer, gold = pair.split(" == " if is_same else " != ")
            pairs.append((family, is_same, answer.strip(), gold.strip(), question.strip()))
    return pairs
