"""Recipes that claim to be a published run have its settings, and say where they do not."""

import inspect
import re

import pytest
from settings_by_name import RECIPES, ROOT, load_recipe, shown_value

from benchmarks.published.settings import RUNS, TOPICS, PublishedRun, Row


def row_id(run: PublishedRun, row: Row) -> str:
    return f"{run.preset}-{row.flag}-{row.setting}"


ROWS = [pytest.param(run, row, id=row_id(run, row)) for run in RUNS for row in run.rows]
WITH_A_SETTING = [param for param in ROWS if param.values[1].setting]


def run_id(run: PublishedRun) -> str:
    return f"{run.recipe}-{run.preset}"


@pytest.mark.parametrize(("run", "row"), WITH_A_SETTING)
def test_a_preset_has_the_published_value(run: PublishedRun, row: Row) -> None:
    settings = load_recipe(run.recipe).get_config(run.preset)
    assert shown_value(settings, row.setting) == row.value


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_the_recipe_lists_every_difference(run: PublishedRun) -> None:
    docstring = inspect.getdoc(load_recipe(run.recipe))
    assert docstring is not None
    items = re.split(r"\n\n|\n- ", docstring)
    names = [item.partition(":")[0] for item in items]
    for row in run.rows:
        if row.differs:
            assert row.note, f"{row.flag}: say why"
            assert any(row.flag in name for name in names), (
                f"configs/{run.recipe}.py does not list {row.flag}"
            )


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_a_run_has_rows_about_all_that_decides_a_comparison(run: PublishedRun) -> None:
    topics = {row.topic for row in run.rows if row.topic}
    assert topics >= set(run.topics)
    assert topics <= set(TOPICS)
    is_supervised = load_recipe(run.recipe).get_config(run.preset).sft is not None
    assert run.topics == (("prompt", "evaluation") if is_supervised else TOPICS)


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_a_published_value_that_reads_as_a_number_is_ours(run: PublishedRun) -> None:
    """The table cannot call a value the same that is another number."""
    for row in run.rows:
        is_number = isinstance(row.value, int | float) and not isinstance(row.value, bool)
        if not is_number or row.differs or row.note:
            continue
        assert float(row.published.split()[0]) == row.value, row


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_with_a_published_figure_has_a_table(recipe: str) -> None:
    docstring = inspect.getdoc(load_recipe(recipe))
    assert docstring is not None
    if re.search(r"\bPublished\b(?!: no result)", docstring):
        assert any(run.recipe == recipe for run in RUNS)


def test_figures_of_publications_stand_next_to_runs_without_a_difference_only() -> None:
    """A row of the README's table with a figure names presets whose tables have no difference."""
    exact = set()
    for run in RUNS:
        if not any(row.differs for row in run.rows):
            exact.add(f"{run.recipe}.py:{run.preset}")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## Recipes") : text.index("## Commands")]
    rows = [line for line in table.splitlines() if line.startswith("| `configs/")]
    assert rows
    figures = re.compile(r"\d+(\.\d+)? ?%|\bAIME\w* \d|\d\.\d+")
    for row in rows:
        name, *cells = row.strip("| ").split(" | ")
        # The names of models and presets hold numbers, which are in code.
        words = re.sub(r"`[^`]*`|Qwen\S*", "", " ".join(cells))
        if figures.search(words):
            assert any(preset in name for preset in exact), row
