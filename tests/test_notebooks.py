"""The notebooks: what they say about this package is true, and their cells run at tiny settings."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from runs import ROOT, RUN

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Tags of cells that need the network, the platform itself or an answer of the user.
FOREIGN = {"install", "platform", "source"}


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def tags(cell: dict) -> set[str]:
    return set(cell["metadata"].get("tags", ()))


def source(cell: dict) -> str:
    return "".join(cell["source"])


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in cells(path) if cell["cell_type"] == "code"]


def script(path: Path, parameters: str) -> str:
    """Returns the code of a notebook with other parameters, without its FOREIGN cells."""
    parts = []
    for cell in code_cells(path):
        if not tags(cell) & FOREIGN:
            parts.append(parameters if "parameters" in tags(cell) else source(cell))
    return "\n".join(parts)


def test_there_is_one_for_colab_and_one_for_kaggle() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["colab", "kaggle"]
    bodies = [[cell for cell in code_cells(path)][-5:] for path in NOTEBOOKS]
    assert bodies[0] == bodies[1]  # what follows the installation


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_clean_python_with_a_limit_of_time(path: Path) -> None:
    names = [cell["id"] for cell in cells(path)]
    assert len(names) == len(set(names))
    for cell in code_cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    [parameters] = [cell for cell in code_cells(path) if "parameters" in tags(cell)]

    tree = ast.parse(script(path, source(parameters)))

    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {"RECIPE", "WORKDIR", "EXPORT", "MINUTES", "FLAGS"} <= assigned
    assert "--config.train.minutes={MINUTES}" in script(path, source(parameters))
    recipe = re.search(r'RECIPE = "jzero/([^":]*)', source(parameters))
    assert recipe is not None
    assert (ROOT / recipe[1]).is_file()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_installs_what_there_is(path: Path) -> None:
    [install] = [cell for cell in code_cells(path) if "install" in tags(cell)]
    [chosen] = [cell for cell in code_cells(path) if "source" in tags(cell)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    lines = source(install).splitlines()
    assert all(line.startswith(("!git clone ", "!pip install ")) for line in lines)
    constraints = re.search(r"-c jzero/(\S+)", source(install))
    assert constraints is not None
    assert (ROOT / constraints[1]).is_file()
    extra = re.search(r'EXTRA = "(\w+)"', source(chosen))
    assert extra is not None
    assert extra[1] in project["optional-dependencies"]
    assert "jzero[{EXTRA}]" in source(install)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_asks_where_jzero_is_before_it_clones(path: Path) -> None:
    """There is no address that a notebook could know."""
    [chosen] = [cell for cell in code_cells(path) if "source" in tags(cell)]

    with pytest.raises(AssertionError, match="set SOURCE to the git URL of your copy"):
        exec(source(chosen), {})


@pytest.mark.thorough_cases("kaggle")  # what follows the installation is the same
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run_at_tiny_settings(
    path: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """All of a notebook but its installation runs in one process, as its kernel would run it."""
    recipe, *flags = RUN
    flags += ["--config.train.steps=3", "--config.eval.every=0", "--config.warm_start.steps=2"]
    parameters = (
        f"RECIPE = {recipe.removeprefix('--config=')!r}\n"
        f"WORKDIR, EXPORT = {str(tmp_path / 'run')!r}, {str(tmp_path / 'model')!r}\n"
        f"MINUTES, FLAGS = 60, {flags!r}\n"
    )
    program = tmp_path / "notebook.py"
    program.write_text(script(path, parameters), encoding="utf-8")

    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=environment | {"MPLBACKEND": "Agg", "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "step 3/3" in done.stdout
    assert "score: " in done.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()
