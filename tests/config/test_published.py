"""Recipes that claim to be a published run have its settings, and say where they do not."""

import inspect

import pytest
from published_page import BEGIN, PAGE, tables
from settings_by_name import ROOT, get, load_recipe

from jzero.config.published import RUNS, PublishedRun, Row


def row_id(run: PublishedRun, row: Row) -> str:
    return f"{run.preset}-{row.flag}-{row.setting}"


ROWS = [pytest.param(run, row, id=row_id(run, row)) for run in RUNS for row in run.rows]
WITH_A_SETTING = [param for param in ROWS if param.values[1].setting]


@pytest.mark.parametrize(("run", "row"), WITH_A_SETTING)
def test_a_preset_has_the_published_value(run: PublishedRun, row: Row) -> None:
    settings = load_recipe(run.recipe).get_config(run.preset)
    assert get(settings, row.setting) == row.value


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.preset)
def test_the_recipe_lists_every_difference(run: PublishedRun) -> None:
    docstring = inspect.getdoc(load_recipe(run.recipe))
    assert docstring is not None
    for row in run.rows:
        if row.differs:
            assert row.note, f"{row.flag}: say why"
            assert f"- {row.flag}" in docstring, f"configs/{run.recipe}.py does not list {row.flag}"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.preset)
def test_a_published_value_that_reads_as_a_number_is_ours(run: PublishedRun) -> None:
    """The table cannot call a value the same that is another number."""
    for row in run.rows:
        is_number = isinstance(row.value, int | float) and not isinstance(row.value, bool)
        if not is_number or row.differs or row.note:
            continue
        assert float(row.published.split()[0]) == row.value, row


def test_the_page_shows_the_table() -> None:
    _, mark, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    assert mark, "the page has lost its mark"
    assert rest.strip() == tables().strip(), "run python tests/config/published_page.py"


def test_figures_of_publications_stand_beside_published_runs_alone() -> None:
    """A row of the README's table with a figure names presets that the table of runs has."""
    presets = {f"{run.recipe}.py:{run.preset}" for run in RUNS}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `configs/")]
    assert rows
    for row in rows:
        _, name, _, figure, _ = (cell.strip() for cell in row.split("|"))
        # The distillation has its own paragraph in its recipe.
        if figure and not name.startswith("`configs/sft.py"):
            assert any(preset in name for preset in presets), row
