"""The tool `search`: passages of a local corpus by BM25."""

import json
from pathlib import Path

import pytest

from jzero.config import TaskConfig, ToolsConfig
from jzero.environments.tools import toolbox
from jzero.errors import UserError

PASSAGES = [
    "The heron stands in shallow water and waits for fish.",
    "A lathe turns the work against a tool.",
    "Fish swim in water.",
    "The mill grinds wheat.",
    "Bread is baked from wheat and water.",
]


def search(corpus: Path, query: str, results: int = 2) -> str:
    tools = ToolsConfig(names=(f"search(corpus={str(corpus)!r}, results={results})",))
    task = TaskConfig(tools=tools)
    toolbox.check_names(task)
    found = toolbox.make_toolbox(task).tools["search"].function(query=query)
    assert isinstance(found, str)
    return found


@pytest.fixture
def rank_bm25() -> None:
    pytest.importorskip("rank_bm25")


@pytest.mark.usefixtures("rank_bm25")
def test_the_passages_that_fit_best_come_first(tmp_path: Path) -> None:
    file = tmp_path / "passages.txt"
    file.write_text("\n".join(PASSAGES), encoding="utf-8")
    assert search(file, "HERON, fish?") == f"[1] {PASSAGES[0]}\n\n[2] {PASSAGES[2]}"
    assert search(file, "lathe") == f"[1] {PASSAGES[1]}"
    assert search(file, "zeppelin") == "No passage has any of these words."
    with pytest.raises(ValueError, match="no words"):
        search(file, "?!")


@pytest.mark.usefixtures("rank_bm25")
def test_a_corpus_has_three_forms(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"title": f"T{i}", "text": text}) for i, text in enumerate(PASSAGES)]
    rows.write_text("\n".join(lines), encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    for index, text in enumerate(PASSAGES):
        (folder / f"{index}.md").write_text(text, encoding="utf-8")
    assert search(rows, "lathe") == f"[1] T1\n{PASSAGES[1]}"
    assert search(folder, "lathe") == f"[1] {PASSAGES[1]}"


@pytest.mark.usefixtures("rank_bm25")
@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read: No such file"),
        ("", "has no passages"),
        ('{"text": "a"}\n{"body": "b"}', "line 2 is not a JSON object"),
        ("not json", "line 1 is not a JSON object"),
    ],
)
def test_a_damaged_corpus_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        search(file, "a")


def test_without_the_package_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", {}.get)
    with pytest.raises(UserError, match=r"needs the package rank_bm25: pip install -e '.*\[search"):
        search(tmp_path, "a")
