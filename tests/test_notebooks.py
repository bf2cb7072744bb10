"""The notebooks: what they say about this package is true, and their cells run at tiny settings."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from runs import ROOT, RUN

from jzero.cli import parse_settings
from jzero.planning.disk import GB, check_disk, disk_need
from jzero.planning.models import architecture

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


def parameters_cell(path: Path) -> dict:
    [cell] = [cell for cell in code_cells(path) if "parameters" in tags(cell)]
    return cell


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
    parameters = parameters_cell(path)

    tree = ast.parse(script(path, source(parameters)))

    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {"DATA", "MODEL", "REWARD", "RECIPE", "WORKDIR", "MINUTES", "FLAGS"} <= assigned
    assert "--config.train.minutes={MINUTES}" in script(path, source(parameters))


def parameters_of(path: Path) -> dict[str, object]:
    """Returns the values of a notebook's parameters."""
    cell = parameters_cell(path)
    assignments = [node for node in ast.parse(source(cell)).body if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): ast.literal_eval(node.value) for node in assignments}


def recipes_of(path: Path) -> list[str]:
    """Returns the recipes that a notebook names: the default, and others in its comments."""
    return re.findall(r'"(\w+:[\w.-]+)"', source(parameters_cell(path)))


@pytest.mark.parametrize(("name", "disk_gb"), [("colab", 15), ("kaggle", 20)])
def test_the_recipes_that_it_names_fit_the_disk_by_plan(
    name: str, disk_gb: int, tmp_path: Path
) -> None:
    """A free Google Drive has 15 GB, and /kaggle/working has 20."""
    path = ROOT / "notebooks" / f"{name}.ipynb"
    values = parameters_of(path)
    flags = values["FLAGS"]
    assert isinstance(flags, list) and flags == [f"--config.memory.disk_gb={disk_gb}"]
    recipes = recipes_of(path)
    assert recipes[0] == values["RECIPE"]
    assert any("gemma-3-1b" in recipe for recipe in recipes)
    for recipe in recipes:
        file, _, preset = recipe.partition(":")
        module = importlib.import_module(f"configs.{file}")
        settings = parse_settings(module.get_config(preset), flags)

        need = disk_need(settings, architecture(settings.model.path), tmp_path)

        assert need.available == pytest.approx(disk_gb * GB)
        assert need.fits, recipe
        check_disk(settings, tmp_path)  # raises no UserError


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_an_accelerator(path: Path) -> None:
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    accelerator = metadata.get("accelerator") or metadata["kaggle"]["accelerator"]
    assert accelerator.lower().startswith("tpu")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_installs_what_there_is(path: Path) -> None:
    [install] = [cell for cell in code_cells(path) if "install" in tags(cell)]
    [chosen] = [cell for cell in code_cells(path) if "source" in tags(cell)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    extra = re.search(r'EXTRA = "(\w+)"', source(chosen))
    assert extra is not None
    assert extra[1] in project["optional-dependencies"]
    assert source(install) == '!pip install -q "jzero[{EXTRA}] @ {ADDRESS}" matplotlib'
    # It opens without an edit, and names no owner of a repository.
    assert 'SOURCE = ""' in source(chosen)
    assert "github.com" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run_at_tiny_settings(
    path: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """All of a notebook but its installation runs in one process, as its kernel would run it."""
    _, *flags = RUN
    flags += ["--config.train.steps=3", "--config.eval.every=0", "--config.warm_start.steps=2"]
    parameters = (
        "RECIPE = 'countdown:tiny'\n"
        f"DATA, WORKDIR = '', {str(tmp_path / 'run')!r}\n"
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
    assert (tmp_path / "run" / "export-3" / "model.safetensors").is_file()
    assert "export-3" in done.stdout
    assert {"curve.png", "report.html"} <= {path.name for path in (tmp_path / "run").iterdir()}
