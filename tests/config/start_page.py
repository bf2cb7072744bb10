"""docs/start.md: the sections that translate commands of other systems to jzero's."""

import re

from settings_by_name import ROOT

PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
SYSTEMS = tuple(re.findall(r"^### From (.*)$", PAGE, re.MULTILINE))
# User-defined rewards with the names of the page: in TRL's form, and in jzero's.
REWARDS = """
def accuracy_reward(completions, solution, **kwargs):
    return [float(answer in str(text)) for text, answer in zip(completions, solution)]


def len_reward(completions, solution, **kwargs):
    return [1 / (1 + len(str(text))) for text in completions]


def accuracy(response, gold, task):
    return float(gold["answer"] in response)
"""


def section(system: str) -> str:
    """Returns the text of the section "From SYSTEM"."""
    _, _, rest = PAGE.partition(f"\n### From {system}\n")
    return re.split(r"\n##+ ", rest)[0]
