"""How to install the optional packages of jzero, for messages about a missing one.

    install_command("tpu")     "pip install -e '.[tpu]'" in a clone

jzero is on no package index, where anybody may take its name. An extra is therefore installed from
the place that jzero itself was installed from: the clone, or the file or address that pip recorded.
"""

import importlib.metadata
import json
import shlex
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]  # if this is a clone


def install_command(extra: str, *, again: bool = False) -> str:
    """Returns the command that installs the packages of an extra of pyproject.toml.

    again: installs packages that exist already, because they are broken.
    """
    pip = "pip install --force-reinstall" if again else "pip install"
    if (CLONE / "pyproject.toml").is_file():
        place = "." if Path.cwd() == CLONE else str(CLONE)
        return f"{pip} -e {_quoted(f'{place}[{extra}]')}"
    if source := _recorded_source():
        return f"{pip} {_quoted(f'jzero[{extra}] @ {source}')}"
    if packages := _packages(extra):
        return f"{pip} {' '.join(_quoted(package) for package in packages)}"
    return f"{pip} -e {_quoted(f'CLONE[{extra}]')}, with the directory of a clone of jzero as CLONE"


def _quoted(text: str) -> str:
    """Returns an argument of a shell, with quotes also where only zsh needs them."""
    return f"'{text}'" if shlex.quote(text) == text else shlex.quote(text)


def _recorded_source() -> str:
    """Returns the address that pip installed jzero from; "" if it recorded none (PEP 610)."""
    try:
        text = importlib.metadata.distribution("jzero").read_text("direct_url.json")
        record = json.loads(text or "{}")
        url, version = record["url"], record.get("vcs_info")
        return f"{version['vcs']}+{url}@{version['commit_id']}" if version else url
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return ""


def _packages(extra: str) -> list[str]:
    """Returns the requirements of an extra as the installed package lists them."""
    try:
        required = importlib.metadata.requires("jzero") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    packages = []
    for line in required:
        package, _, marker = line.partition(";")
        if f'extra == "{extra}"' in marker.replace("'", '"'):
            packages.append(package.strip())
    return packages
