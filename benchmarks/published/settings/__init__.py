"""The settings of published runs, next to the settings of the presets that reproduce them.

A row is a setting of the published command, its value, and jzero's setting with the value that the
preset has. A name in parentheses is no flag: it is a default, or what the code of the run does.
Flags of hardware, of memory and of logging are left out, since they do not change what is learned.
A row that `differs` says why in its note, and the recipe's docstring names its flag.

To add a run, append a `PublishedRun` to the list of its module. tests/config/test_published.py
compares every row with its recipe. `python docs/reference.py` writes the tables into
docs/reference/published-runs.md, and a test compares that page with them.
"""

from benchmarks.published.settings.areal import AREAL_RUNS
from benchmarks.published.settings.oat import OAT_RUNS
from benchmarks.published.settings.open_r1 import OPEN_R1_RUNS
from benchmarks.published.settings.row import TOPICS, PublishedRun, Row

RUNS = (*OAT_RUNS, *OPEN_R1_RUNS, *AREAL_RUNS)

__all__ = ["RUNS", "TOPICS", "PublishedRun", "Row"]
