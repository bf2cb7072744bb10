"""The table of soak.py, and its part `serve` against a server of this clone."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import soak

    return soak


def test_a_row_sums_up_the_times_of_an_attack(soak) -> None:
    mebibyte = 1 << 20
    outcomes = [
        soak.Outcome("a", 100 * mebibyte, 200 * mebibyte, 0.5),
        soak.Outcome("b", 200 * mebibyte, 200 * mebibyte, 0.1),
        soak.Outcome("a", 200 * mebibyte, 3000 * mebibyte, 0.25, "too much"),
        soak.Outcome("c"),
    ]
    assert soak.rows(outcomes) == [
        ["a", "2", "100", "3,000", "0.50", "FAILED: too much"],
        ["b", "1", "200", "200", "0.10", "held"],
        ["c", "1", "", "", "", "held"],
    ]


@pytest.mark.parametrize("failure, status", [("", 0), ("it fell", 1)])
def test_the_status_says_whether_every_attack_of_every_part_held(
    soak, monkeypatch, capsys, failure, status
) -> None:
    """A part is one line of the table."""

    def attack(directory: Path, deadline: float):
        assert directory.is_dir()
        yield soak.Outcome("a kill")
        yield soak.Outcome("another kill", failure=failure)

    monkeypatch.setattr(soak, "PARTS", {"kills": soak.Part("kills of runs", attack)})
    monkeypatch.setattr(sys, "argv", ["soak.py", "--minutes", "0"])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert int(ended.value.code) == status
    out = capsys.readouterr().out
    assert "| a kill | 1 |  |  |  | held |" in out
    assert f"| another kill | 1 |  |  |  | {'FAILED: it fell' if failure else 'held'} |" in out


def test_the_server_withstands_the_attacks(environment: dict[str, str]) -> None:
    command = [sys.executable, "benchmarks/soak.py", "--parts", "serve", "--minutes", "0"]
    environment = environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
