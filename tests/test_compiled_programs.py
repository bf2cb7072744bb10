"""Compiled programs that workers and sessions of tests share."""

from pathlib import Path

from compiled_programs import link_programs, open_directory
from jax._src import compilation_cache  # as in compiled_programs.py


def test_only_whole_programs_are_shared(tmp_path: Path) -> None:
    own, common = tmp_path / "own", tmp_path / "common"
    own.mkdir()
    open_directory(common)
    program = compilation_cache.compress_executable(b"instructions" * 1000)
    (own / "whole-cache").write_bytes(program)
    (own / "half-cache").write_bytes(program[: len(program) // 2])
    (own / "other").write_bytes(program)

    link_programs(own, common, checked=False)
    link_programs(own, common, checked=False)

    assert [path.name for path in common.iterdir()] == ["whole-cache"]
    assert (common / "whole-cache").read_bytes() == program


def test_a_program_that_is_there_is_kept(tmp_path: Path) -> None:
    own, common = tmp_path / "own", tmp_path / "common"
    own.mkdir()
    common.mkdir()
    (common / "a-cache").write_bytes(b"common")
    (own / "a-cache").write_bytes(b"own")

    link_programs(common, own, checked=True)

    assert (own / "a-cache").read_bytes() == b"own"
