"""No command replaces a file or a directory that it did not make."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jzero import export, filter, grade, report
from jzero.errors import UserError

Call = Callable[..., str]  # arguments of a command -> its last line on stderr


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Returns a function that runs a command's `main`, which has to end with status 2."""

    def call(main: Callable[[], None], *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        assert exit.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return call


def make_workdir(path: Path) -> dict[str, bytes]:
    """Makes a directory that looks like a run's; returns its files."""
    (path / "checkpoints/3").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "checkpoints/3/data"):
        (path / name).write_text("{}")
    return read_files(path)


def read_files(directory: Path) -> dict[str, bytes]:
    """Returns the content of every file below a directory."""
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_export_never_replaces_a_run(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    before = make_workdir(workdir)

    with pytest.raises(UserError, match="holds checkpoints, which no export writes"):
        export.run(export.Options(workdir=workdir, out=workdir, force=True))

    assert read_files(workdir) == before


def test_export_replaces_an_earlier_export_only_with_force(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "README.md"):
        (out / name).write_text("{}")
    options = export.Options(workdir=tmp_path / "run", out=out)

    with pytest.raises(UserError, match="exists: give another, or --force"):
        export.check(options)
    export.check(export.Options(workdir=tmp_path / "run", out=out, force=True))
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes.txt, which no export writes"):
        export.check(export.Options(workdir=tmp_path / "run", out=out, force=True))


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_filter_and_grade_keep_their_input(tmp_path: Path, refused: Call, force: list[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"problem": "1 + 1?", "answer": "2"}) + "\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(data)
    before = data.read_bytes()

    for out in (data, link):
        suite = f"mine={data}"
        line = refused(filter.main, "--data", data, "--against", suite, "--out", out, *force)
        assert line == f"error: --out {out} is the file that --data reads: give another"
        line = refused(grade.main, "--in", data, "--out", out, *force)
        assert f"--out {out} is the file that --in reads: give another" in line

    assert data.read_bytes() == before


def test_an_output_that_exists_is_replaced_only_with_force(tmp_path: Path, refused: Call) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"problem": "1 + 1?", "answer": "2"}) + "\n")
    out = tmp_path / "out.jsonl"
    out.write_text("mine")

    line = refused(filter.main, "--data", data, "--against", f"mine={data}", "--out", out)
    assert line == f"error: --out {out} exists: give another, or --force to replace it"
    line = refused(grade.main, "--in", data, "--out", out)
    assert f"--out {out} exists: give another, or --force to replace it" in line

    assert out.read_text() == "mine"


def test_report_makes_no_directory_and_replaces_only_reports(tmp_path: Path, refused: Call) -> None:
    absent = tmp_path / "absent"
    line = refused(report.main, absent)
    assert line.startswith(f"error: {absent} has no metrics.jsonl")
    assert not absent.exists()

    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "metrics.jsonl").write_text('{"step": 1}\n')
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    line = refused(report.main, workdir, "--out", notes)
    assert line == f"error: --out {notes} exists and is not a report: give another"
    assert notes.read_text() == "mine"
