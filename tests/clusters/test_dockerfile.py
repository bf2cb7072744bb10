"""The Dockerfile, as far as it can be checked without a daemon that builds it."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from runs import ROOT

DOCKERFILE = ROOT / "Dockerfile"
TARGETS = {"cpu": set(), "cuda": {"cuda12"}, "tpu": {"tpu"}}  # target -> its extra for JAX
INSTRUCTIONS = {
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "FROM",
    "RUN",
    "USER",
    "VOLUME",
    "WORKDIR",
}


class Instruction(NamedTuple):
    """One instruction of the Dockerfile, with its lines joined."""

    name: str
    value: str


def read_instructions() -> list[Instruction]:
    """Returns the instructions in their order, without comments."""
    lines = DOCKERFILE.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = text.replace("\\\n", " ")
    found = []
    for line in filter(None, joined.splitlines()):
        name, _, value = line.partition(" ")
        found.append(Instruction(name, " ".join(value.split())))
    return found


def defaults() -> dict[str, str]:
    """Returns the build arguments with their defaults."""
    values = {}
    for name, value in read_instructions():
        if name == "ARG" and "=" in value:
            argument, _, default = value.partition("=")
            values[argument] = default
    return values


def filled(value: str) -> str:
    for name, default in defaults().items():
        value = value.replace(f"${{{name}}}", default)
    assert "$" not in value, value
    return value


def stages() -> dict[str, tuple[str, list[Instruction]]]:
    """Returns for each stage what it is made from, and its instructions."""
    found: dict[str, tuple[str, list[Instruction]]] = {}
    current: list[Instruction] = []
    for instruction in read_instructions():
        if instruction.name == "FROM":
            source, _, stage = filled(instruction.value).partition(" AS ")
            assert stage, f"{source}: a stage without a name"
            assert source in found or source.startswith("python:")
            current = []
            found[stage] = (source, current)
        else:
            current.append(instruction)
    return found


def instructions_of(target: str) -> list[Instruction]:
    """Returns the instructions of a target and of all stages below it, in their order."""
    source, own = stages()[target]
    return [*instructions_of(source), *own] if source in stages() else own


def test_every_instruction_is_known() -> None:
    assert {instruction.name for instruction in read_instructions()} <= INSTRUCTIONS
    assert TARGETS.keys() <= stages().keys()


def test_the_parser_of_others_reads_the_same() -> None:
    parser = pytest.importorskip("dockerfile_parse").DockerfileParser(str(DOCKERFILE))
    parsed = [
        Instruction(entry["instruction"], " ".join(entry["value"].split()))
        for entry in parser.structure
        if entry["instruction"] != "COMMENT"
    ]
    assert parsed == read_instructions()


def is_ignored(path: str) -> bool:
    """Returns whether .dockerignore keeps a path from the builder: its last pattern decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch(path, pattern):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize("constraints", ["constraints.txt", "constraints-3.12.txt"])
def test_every_source_of_a_copy_exists_and_reaches_the_builder(constraints: str) -> None:
    sources = []
    for name, value in read_instructions():
        if name == "COPY":
            *paths, _ = value.replace("${CONSTRAINTS}", constraints).split()
            sources += paths
    assert {"pyproject.toml", constraints, "jzero", "configs"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not is_ignored(source), source
    assert is_ignored("runs") and is_ignored(".git")


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_the_dependencies_of_its_devices_and_the_tested_versions(target: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = extras["optional-dependencies"].keys()
    instructions = instructions_of(target)

    commands = [shlex.split(value) for name, value in instructions if name == "RUN"]
    [install] = [command for command in commands if command[0] == "pip"]
    assert install[:4] == ["pip", "install", "-c", "constraints-image.txt"]
    assert Instruction("COPY", "${CONSTRAINTS} constraints-image.txt") in instructions
    requirement = re.fullmatch(r"\.(?:\[([a-z0-9,]+)\])?", install[-1])
    assert requirement is not None, install
    chosen = set(requirement[1].split(",")) if requirement[1] else set()
    assert chosen == TARGETS[target]
    assert chosen <= known


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_without_root_and_passes_signals_on(target: str) -> None:
    instructions = instructions_of(target)
    names = [instruction.name for instruction in instructions]
    values = dict(instructions)  # of an instruction that comes twice, the last one holds

    assert values["USER"] == "1000"
    assert "RUN" not in names[names.index("USER") :]
    assert any("useradd --uid 1000" in value for name, value in instructions if name == "RUN")
    assert json.loads(values["ENTRYPOINT"]) == ["tini", "--"]
    module = json.loads(values["CMD"])[2]
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_the_manifests_use_images_that_there_are() -> None:
    manifests = sorted((ROOT / "clusters").glob("jobset-*.yaml"))
    used = {
        image
        for path in manifests
        for image in re.findall(r"image: REGISTRY/jzero:(\w+)", path.read_text(encoding="utf-8"))
    }
    assert used == TARGETS.keys() - {"cpu"}


@pytest.mark.network
@pytest.mark.parametrize("target", TARGETS)
def test_pip_finds_what_an_image_installs(target: str) -> None:
    """Resolves the requirements and downloads no package's code but where pip has to."""
    [install] = [value for name, value in instructions_of(target) if value.startswith("pip ")]
    arguments = shlex.split(filled(install.replace("constraints-image.txt", "${CONSTRAINTS}")))
    arguments[arguments.index("-e") :] = [arguments[-1]]
    command = [sys.executable, "-m", *arguments, "--dry-run", "--quiet", "--ignore-installed"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500)


def test_the_versions_of_python_have_their_constraints() -> None:
    assert defaults() == {"PYTHON": "3.11", "CONSTRAINTS": "constraints.txt"}
    assert "--build-arg PYTHON=3.12 --build-arg CONSTRAINTS=constraints-3.12.txt" in (
        Path(DOCKERFILE).read_text(encoding="utf-8")
    )
