"""The command in messages about missing packages works from where jzero was installed."""

import ast
import importlib.metadata
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from runs import ROOT

from jzero import extras

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


class Installed:
    """An installed package with what pip recorded of its source."""

    def __init__(self, record: object) -> None:
        self._text = None if record is None else json.dumps(record)

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._text


def test_a_clone_is_installed_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    (tmp_path / "pyproject.toml").touch()

    assert extras.install_command("tpu") == f"pip install -e '{tmp_path}[tpu]'"
    monkeypatch.chdir(tmp_path)
    assert extras.install_command("tpu") == "pip install -e '.[tpu]'"
    assert extras.install_command("verify", again=True).startswith("pip install --force-reinstall")


@pytest.mark.parametrize(
    ("record", "requirement"),
    [
        (
            {"url": "file:///home/me/jzero-0.3.0-py3-none-any.whl", "archive_info": {}},
            "jzero[tpu] @ file:///home/me/jzero-0.3.0-py3-none-any.whl",
        ),
        (
            {"url": "https://host/me/jzero", "vcs_info": {"vcs": "git", "commit_id": "1f2e"}},
            "jzero[tpu] @ git+https://host/me/jzero@1f2e",
        ),
    ],
)
def test_an_installed_package_comes_from_where_pip_found_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: object, requirement: str
) -> None:
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(record))

    assert shlex.split(extras.install_command("tpu")) == ["pip", "install", requirement]


@pytest.mark.parametrize("record", [None, {}, {"url": "x", "vcs_info": {}}, []])
def test_without_a_record_the_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: object
) -> None:
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(record))
    required = ["jax", 'jax[tpu]; extra == "tpu"', "libtpu==1; extra == 'tpu'", 'x; extra == "y"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)

    if record == {"url": "x", "vcs_info": {}}:
        assert extras.install_command("tpu") == "pip install 'jzero[tpu] @ x'"
        return
    assert shlex.split(extras.install_command("tpu"))[2:] == ["jax[tpu]", "libtpu==1"]


def test_no_message_names_jzero_on_an_index() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    sources = [*(ROOT / "jzero").rglob("*.py"), *(ROOT / "configs").glob("*.py"), *pages]
    bare = re.compile(r"pip install [^\n]*['\"]jzero\[\w+\]['\"]")
    for path in sources:
        if path.name != "extras.py":
            assert not bare.search(path.read_text(encoding="utf-8")), path
    asked = {
        node.args[0].value
        for path in (ROOT / "jzero").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "install_command"
        and isinstance(node.args[0], ast.Constant)
    }
    assert asked == {"tpu", "cuda12", "search", "verify"}
    assert asked <= EXTRAS.keys()
