"""Writes the tables of docs/recipes.md: `python tests/config/published_page.py`."""

from settings_by_name import ROOT, get, load_recipe

from jzero.config.published import RUNS, PublishedRun, Row

PAGE = ROOT / "docs/recipes.md"
BEGIN = "<!-- made by tests/config/published_page.py -->\n"
COLUMNS = ("published setting", "published value", "jzero", "value of the preset", "note")


def tables() -> str:
    """Returns a section for every published run."""
    return "\n".join(section(run) for run in RUNS)


def section(run: PublishedRun) -> str:
    """Returns a heading, the source and a table of all rows of a run."""
    settings = load_recipe(run.recipe).get_config(run.preset)
    lines = [
        f"## {run.title}",
        "",
        f"`--config configs/{run.recipe}.py:{run.preset}`. Source: {run.source}.",
        "",
        markdown_row(*COLUMNS),
        markdown_row(*["---"] * len(COLUMNS)),
    ]
    for row in run.rows:
        value = shown(get(settings, row.setting)) if row.setting else ""
        setting = f"`{row.setting}`" if row.setting else ""
        lines.append(markdown_row(flag(row), row.published, setting, value, note(row)))
    return "\n".join(lines) + "\n"


def markdown_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def flag(row: Row) -> str:
    """Returns a flag as code, and a default, which is no flag, as text."""
    return row.flag[1:-1] if row.flag.startswith("(") else f"`{row.flag}`"


def note(row: Row) -> str:
    return f"**differs**: {row.note}" if row.differs else row.note


def shown(value: object) -> str:
    """Returns a setting's value as a reader would write it."""
    if isinstance(value, tuple):
        return ", ".join(repr(item).strip("'") for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "(its default)"


if __name__ == "__main__":
    introduction = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    PAGE.write_text(introduction + BEGIN + "\n" + tables(), encoding="utf-8")
