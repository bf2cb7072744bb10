"""Foreign files of every kind, read through the one door of `jzero.files`."""

import resource
from pathlib import Path

from jzero import files
from jzero.errors import UserError
from tests.attacks.conftest import Tries
from tests.hostile_values import hostile_files

MOST_BYTES = 1 << 20


def read_all_lines(path: Path) -> None:
    for number, line in files.read_lines(path, MOST_BYTES):
        files.parse_json(line, path, number)


READERS = {
    "read_bytes": lambda path: files.read_bytes(path, MOST_BYTES),
    "read_text": lambda path: files.read_text(path, MOST_BYTES),
    "read_lines": read_all_lines,
    "read_jsonl": files.read_jsonl,
}


def test_a_hostile_file_is_read_or_refused_in_one_line(tmp_path: Path, tries: Tries) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, path in hostile_files(tmp_path):
        for reader, read in READERS.items():
            with tries.attempt("files", f"{reader}: {name}"):
                try:
                    read(path)
                except UserError as error:
                    assert str(error).isprintable()
                except FileNotFoundError:
                    assert not path.exists()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 600 << 10, f"{grown=} KiB"
