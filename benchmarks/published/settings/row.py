"""A row of the table of a published run: its setting, and jzero's with the value of the preset."""

from dataclasses import dataclass

# What decides whether a figure can be compared. Every run of RL has a row about each of these.
TOPICS = ("prompt", "stops", "verifier", "rewards", "evaluation")


@dataclass(frozen=True)
class Row:
    """A setting of a published command and what stands for it here."""

    flag: str  # its name in the published command
    published: str
    setting: str  # the name of jzero's; "" where jzero has none
    value: object = None  # what the preset has; None where there is no setting
    note: str = ""
    differs: bool = False
    topic: str = ""  # one of TOPICS, or ""


@dataclass(frozen=True)
class PublishedRun:
    """A published run and the preset that reproduces it."""

    title: str
    source: str
    recipe: str  # configs/RECIPE.py
    preset: str
    prompt: str  # of `PUBLISHED_PROMPTS` in benchmarks/published/prompts.py; "": text of the data
    rows: tuple[Row, ...]
    topics: tuple[str, ...] = TOPICS


def differing(
    flag: str, published: str, setting: str, value: object, note: str, topic: str = ""
) -> Row:
    """Returns a row whose value is another than the published one."""
    return Row(flag, published, setting, value, note, differs=True, topic=topic)
