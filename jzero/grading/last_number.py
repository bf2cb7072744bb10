"""The lenient verifier of GSM8K, `task.verifier=last_number`: the last number of the response.

It is the reward of oat's PPO on GSM8K (sail-sg/oat, January 2025). The answer may stand anywhere
and needs no mark, and it is compared with the gold as text: "72.0" is not "72".
"""

import re

from jzero.types import Grade

# 1.5, 2., .5, 3e8 and 42, each with or without a sign.
_NUMBER = re.compile(r"[+-]?\d+\.\d*|[+-]?\.\d+|[+-]?\d+e[-+]?\d+|[+-]?\d+")
LONGEST_RESPONSE = 200_000  # characters that are searched, at the end of the response


def grade(response: str, gold: object) -> Grade:
    """Grades a response by its last number: the score is 1.0 or 0.0.

    `gold` is an answer, or a list of answers any of which will do. Commas do not count, neither in
    the response nor in the gold.
    """
    numbers: list[str] = _NUMBER.findall(response[-LONGEST_RESPONSE:].replace(",", ""))
    if not numbers:
        return Grade(0.0, False, "no answer")
    candidates = gold if isinstance(gold, list) else [gold]
    golds = [str(item).strip().lower().replace(",", "") for item in candidates if item is not None]
    if not golds:
        return Grade(0.0, False, "no gold")
    if numbers[-1].rstrip(".") in golds:
        return Grade(1.0, True, "correct")
    return Grade(0.0, False, "wrong value")
