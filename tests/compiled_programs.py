"""Compiled programs that all workers and sessions of tests share on a machine.

JAX does not write the files of its compilation cache atomically, and a test may kill a process that
is writing one. Each worker therefore has a directory of its own. Finished files are linked from
there into the common directory, and from the common directory into those of other workers.

JAX names a program by its content, its version and the compiler's flags. The common directory is
that of one kind of CPU in the user's cache.
"""

import contextlib
import os
from pathlib import Path

from jax._src import compilation_cache  # JAX does not publish how it compresses a program

from jzero import cli

MOST_BYTES = 2 * 1024**3  # a larger common directory is emptied


def common_directory() -> Path:
    """Returns the directory of the compiled programs of all tests of this user."""
    programs = cli.shared_programs()
    return programs.parent.with_name("programs-of-tests") / programs.name


def open_directory(directory: Path) -> None:
    """Makes the common directory, or empties it where it has grown too large."""
    directory.mkdir(parents=True, exist_ok=True)
    files = list(directory.iterdir())
    if sum(file.stat().st_size for file in files) > MOST_BYTES:
        for file in files:
            file.unlink(missing_ok=True)


def is_whole(program: Path) -> bool:
    """Returns whether a file is a program as JAX's cache keeps it, and not the start of one."""
    content = program.read_bytes()
    try:
        compilation_cache.decompress_executable(content)
    except Exception:  # each compression that JAX may have chosen has errors of its own
        return False
    return True


def link_programs(source: Path, target: Path, checked: bool) -> None:
    """Links the programs of a directory that another one does not have.

    checked: the programs of `source` are whole. Otherwise each is looked at.
    """
    with contextlib.suppress(OSError):  # no links between file systems: nothing is shared
        # Lists of names: there are tens of thousands of programs, and each module lists them twice.
        present = set(os.listdir(target))
        for name in os.listdir(source):
            is_new = name.endswith("-cache") and name not in present
            if is_new and (checked or is_whole(source / name)):
                with contextlib.suppress(FileExistsError):
                    os.link(source / name, target / name)
