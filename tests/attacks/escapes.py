"""Tries to get out of the sandbox, at each level, with canaries outside that would see an escape.

    python tests/attacks/escapes.py
    python tests/attacks/escapes.py --levels namespaces --every 20     # a quick sample

A try is a program (`escape_tries`). It has escaped if it says so, because a call succeeded that no
program may make; if it prints a secret of the canaries; or if the canaries changed: a file and its
folder, sockets of four kinds that somebody listens at, and a process of the same user with its
state, priority and limits. The family "residue" looks for the sources, inputs and cells of other
requests in the memory of a program, and in the memory of the server where this user may read it.

The tester is tested first: at the level `none` every try that is a control has to be seen to
succeed, and each canary has to have seen at least one.

Prints a table of tries by family and level. "documented" are tries that do what
docs/environments.md says that the level allows: reading files, or learning that files and processes
exist. The exit status is 1 if one escaped, if a control was not seen, or if a level had fewer than
190 tries (where no sample is asked for).
"""

import argparse
import contextlib
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from escape_tries import (  # pyright: ignore[reportMissingImports]
    FIRST_SHARED_NUMBER,
    PRELUDE,
    REQUESTS,
    TRIES,
    Try,
)

from jzero.sandbox import levels
from jzero.sandbox.client import Limits, Program, Sandbox, SandboxError
from jzero.sandbox.session import Session

LEVELS = ("namespaces", "landlock", "seccomp")
MIN_TRIES = 190
LIMITS = Limits(seconds=3.0, wall_seconds=8.0, memory_gib=0.5, output_mib=0.5)
_SECRET_VARIABLE = "JZERO_SECRET"
# At these levels a program may read what the user may read, or learn that something exists.
READS = {"seccomp"}
LOOKS = {"seccomp", "landlock"}
_VICTIM = "import time\nprint('ready', flush=True)\ntime.sleep(1e6)"


class Outside(contextlib.AbstractContextManager["Outside"]):
    """The canaries: what an escape would change."""

    def __init__(self) -> None:
        self.secret = f"CANARY-{secrets.token_hex(12)}"
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self.folder.chmod(0o777)  # so that the file system is not what keeps a program out
        self.canary = self.folder / "canary"
        os.environ[_SECRET_VARIABLE] = self.secret
        self._abstract = f"jzero-canary-{secrets.token_hex(6)}"
        self._listeners = dict(self._listen())
        self.seen: Counter[str] = Counter()
        self._victim = self._start_victim()
        self._restore()

    def _listen(self) -> Iterator[tuple[str, socket.socket]]:
        datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        datagrams.bind(str(self.folder / "datagrams"))
        yield "datagrams at a path", datagrams
        streams = socket.socket(socket.AF_UNIX)
        streams.bind(str(self.folder / "streams"))
        yield "streams at a path", streams
        for path in ("datagrams", "streams"):
            (self.folder / path).chmod(0o777)
        abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        abstract.bind(f"\0{self._abstract}")
        yield "datagrams at an abstract name", abstract
        abstract_streams = socket.socket(socket.AF_UNIX)
        abstract_streams.bind(f"\0{self._abstract}")
        yield "streams at an abstract name", abstract_streams
        tcp = socket.create_server(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        yield "TCP", tcp
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", self.port))
        yield "UDP", udp
        for listener in (streams, abstract_streams):
            listener.listen()
        for listener in (datagrams, streams, abstract, abstract_streams, tcp, udp):
            listener.setblocking(False)

    def _start_victim(self) -> subprocess.Popen[str]:
        victim = subprocess.Popen(
            [sys.executable, "-S", "-c", _VICTIM], stdout=subprocess.PIPE, text=True
        )
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        return victim

    def _end_victim(self) -> None:
        self._victim.kill()
        self._victim.communicate()

    def values(self) -> dict[str, str]:
        """Returns what stands for the names in capitals in a try."""
        return {
            "CANARY": str(self.canary),
            "DATAGRAMS": str(self.folder / "datagrams"),
            "STREAMS": str(self.folder / "streams"),
            "ABSTRACT": self._abstract,
            "FOLDER": str(self.folder),
            "HOME": str(Path.home()),
            "JZERO": str(Path(levels.__file__).parents[1]),
            "GRADER": str(os.getpid()),
            "VICTIM": str(self._victim.pid),
            "PORT": str(self.port),
        }

    def changes(self) -> list[str]:
        """Returns what has changed since the last call, and restores it."""
        found = []
        if self._state_of_files() != self._files:
            found.append("files")
        if self._state_of_victim() != self._process:
            found.append("process")
        for name, listener in self._listeners.items():
            if _has_received(listener):
                found.append(name)
        if found:
            self.seen.update(found)
            self._restore()
        return found

    def _restore(self) -> None:
        if self.canary.exists():
            self.canary.unlink()
        self.canary.write_text(self.secret)
        self.canary.chmod(0o666)
        known = {"canary", "datagrams", "streams"}
        for path in self.folder.iterdir():
            if path.name not in known:
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        self._end_victim()
        self._victim = self._start_victim()
        self._files, self._process = self._state_of_files(), self._state_of_victim()

    def _state_of_files(self) -> object:
        if not self.canary.exists():
            return "gone"
        status = self.canary.stat()
        names = sorted(path.name for path in self.folder.iterdir())
        kept = (status.st_mode, status.st_mtime_ns, status.st_nlink, status.st_ino)
        elsewhere = [path for path in _ELSEWHERE if Path(path).exists()]
        return self.canary.read_text(), kept, names, elsewhere

    def _state_of_victim(self) -> object:
        if self._victim.poll() is not None:
            return "ended"
        pid = self._victim.pid
        status = Path(f"/proc/{pid}/status").read_text()
        kept = re.findall(
            r"^(?:State:\s+[TtZ]|Cpus_allowed:|SigPnd:|ShdPnd:|TracerPid:).*", status, re.M
        )
        limits = Path(f"/proc/{pid}/limits").read_text()
        return kept, limits, os.getpriority(os.PRIO_PROCESS, pid)

    def __exit__(self, *_: object) -> None:
        self._end_victim()
        for listener in self._listeners.values():
            listener.close()
        self._folder.cleanup()
        del os.environ[_SECRET_VARIABLE]


_ELSEWHERE = [
    f"{folder}/jzero-was-here" for folder in ("/usr/lib", "", "/etc", "/dev/shm", "/var/tmp")
]


def _has_received(listener: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        if listener.type == socket.SOCK_STREAM:
            listener.accept()[0].close()
        else:
            listener.recv(100)
        return True
    return False


class Result(NamedTuple):
    """What came of a try."""

    each: Try
    evidence: str  # "" if it achieved nothing


def source_of(each: Try, outside: Outside) -> str:
    source = each.source
    for name, value in outside.values().items():
        source = re.sub(rf"\b{name}\b", lambda _, value=value: value, source)
    return PRELUDE + source


def _run(each: Try, sandbox: Sandbox, outside: Outside) -> Result:
    starts = sandbox.num_starts
    try:
        outcome = sandbox.run(Program(source_of(each, outside)), LIMITS)
    except SandboxError as error:
        return Result(each, f"the sandbox failed: {error}")
    said = [line for line in outcome.stdout.splitlines() if line.startswith("DID")]
    text = outcome.stdout + outcome.stderr + outcome.result
    evidence = said[:1]
    if outside.secret in text:
        evidence.append("printed the secret")
    evidence += outside.changes()
    if sandbox.num_starts != starts:
        evidence.append("the server ended")
    return Result(each, "; ".join(evidence))


# The family residue: requests with a marker, and a look for the marker.


def _marker() -> str:
    return f"MARKER-{secrets.token_hex(4)}"


def _leave(name: str, sandbox: Sandbox, kept: list[Session]) -> None:
    """Makes a request of a kind of REQUESTS that has a marker in it."""
    mark = _marker()
    long = "\n".join(f"# {_marker()}" for _ in range(20_000))
    programs = {
        "a source": Program(f"x = {mark!r}\nprint(len(x))"),
        "an input": Program("print(len(input()))", stdin=mark),
        "arguments of a call": Program("def f(x): return x", function="f", arguments=(mark,)),
        "an expression": Program("def f(x): return x", expression=f"f({mark!r})"),
        "a large source": Program(f"{long}\nprint(1)"),
        "a large input": Program("import sys\nprint(len(sys.stdin.read()))", stdin=long),
        "a program that failed": Program(f"raise ValueError({mark!r})"),
        "a program at a limit": Program(f"x = {mark!r}\nwhile True: pass"),
    }
    limits = Limits(seconds=0.3, wall_seconds=2.0)
    if name in programs:
        sandbox.run(programs[name], limits)
    elif name == "everything again":
        for other in REQUESTS:
            if other != name:
                _leave(other, sandbox, kept)
    else:
        session = Session(sandbox, limits)
        session.run(f"x = {mark!r}\nlen(x)")
        if name == "a failed session":
            session.run(f"import os  # {mark}\nos._exit(0)")
        if name == "a session that lives":
            kept.append(session)
        else:
            session.close()


def markers_in_memory(pid: int) -> int:
    """Returns how many markers the readable memory of a process holds.

    Raises:
        PermissionError: this user may not read the memory.
    """
    pattern = re.compile(b"MARKER-[0-9a-f]{8}")
    found = 0
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            bounds, rights = line.split()[:2]
            if not rights.startswith("r") or "[v" in line:
                continue
            start, end = (int(part, 16) for part in bounds.split("-"))
            with contextlib.suppress(OSError, OverflowError, ValueError):
                memory.seek(start)
                found += len(pattern.findall(memory.read(end - start)))
    return found


def server_processes(sandbox: Sandbox) -> list[int]:
    """Returns a server's processes: the one that was started, and the one inside of namespaces.

    The children of the latter, and of a server without namespaces, are watchers.
    """
    pid = sandbox.server_pid
    if sandbox.level != "namespaces":
        return [pid]
    inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    return [pid, int(inside)]


def _residue_of_server(sandbox: Sandbox) -> Result:
    each = Try("residue", "the server's own memory", "")
    try:
        counts = {pid: markers_in_memory(pid) for pid in server_processes(sandbox)}
    except PermissionError:  # not root
        return Result(each, "")
    held = {pid: count for pid, count in counts.items() if count}
    return Result(each, f"markers in {held}" if held else "")


def run_level(level: str, tries: list[Try], outside: Outside) -> list[Result]:
    """Runs tries at a level of protection."""
    results = []
    kept: list[Session] = []
    with Sandbox(level) as sandbox:
        for each in tries:
            if each.family == "residue" and not each.is_control:
                _leave(each.name.removeprefix("after "), sandbox, kept)
            result = _run(each, sandbox, outside)
            if each is PLANTED:  # the look has to work at each level
                result = Result(each, "" if result.evidence else "the marker was not found")
            results.append(result)
        # A session is a process of its own below the server, whose memory is its cells'.
        for session in kept:
            session.close()
        time.sleep(0.2)
        if level != "none" and any(each.family == "residue" for each in tries):
            results.append(_residue_of_server(sandbox))
    return results


def is_documented(result: Result, level: str) -> bool:
    """Returns whether docs/environments.md says that a level allows what a try did."""
    may_read = result.each.reads and level in READS
    return may_read or (result.each.looks and level in LOOKS)


def known_tries() -> list[Try]:
    """Returns the tries that this machine has: numbers of system calls differ between machines."""
    if platform.machine() == "x86_64":
        return list(TRIES)
    found = []
    for each in TRIES:
        number = re.match(r"reached\((\d+)", each.source)
        is_shared = number is not None and int(number.group(1)) >= FIRST_SHARED_NUMBER
        is_other = "reached(" not in each.source and "int 0x80" not in each.name
        if is_shared or (is_other and "clone:" not in each.name):
            found.append(each)
    return found


PLANTED = next(each for each in TRIES if each.family == "residue" and each.is_control)


def check_controls(outside: Outside) -> list[str]:
    """Returns what the tester would not have seen: controls and canaries."""
    controls = [each for each in known_tries() if each.is_control]
    results = run_level("none", controls, outside)
    unseen = [
        f"{each.family}: {each.name}"
        for each, evidence in results
        if bool(evidence) == (each is PLANTED)
    ]
    canaries = {"files", "process", *outside._listeners}
    unseen += [f"canary: {name}" for name in sorted(canaries - set(outside.seen))]
    print(f"controls: {len(controls) - len(unseen)} of {len(controls)} seen, ", end="")
    print(f"by canaries: {dict(outside.seen)}\n", flush=True)
    return unseen


def table(results: dict[str, list[Result]]) -> list[str]:
    """Returns a table of families and levels: tries, documented ones, escapes."""
    families = list(dict.fromkeys(each.family for each in TRIES))
    lines = ["| family | " + " | ".join(results) + " |", "|---" * (1 + len(results)) + "|"]
    for family in [*families, "all"]:
        cells = []
        for level, found in results.items():
            mine = [each for each in found if family in (each.each.family, "all")]
            done = [each for each in mine if each.evidence]
            documented = sum(is_documented(each, level) for each in done)
            cell = f"{len(mine)} tries, {len(done) - documented} escaped"
            cells.append(f"{cell}, {documented} documented" if documented else cell)
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS)
    parser.add_argument("--every", type=int, default=1, help="every so many tries, a sample")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the grader, at which programs aim
    results: dict[str, list[Result]] = {}
    is_bad = False
    with Outside() as outside:
        unseen = check_controls(outside)
        for name in unseen:
            print(f"NOT SEEN {name}")
        for level in args.levels:
            if reason := levels.failure(level):
                print(f"level {level}: not on this machine: {reason}")
                continue
            results[level] = run_level(level, known_tries()[:: args.every], outside)
    print("\n".join(table(results)) + "\n")
    for level, found in results.items():
        for result in found:
            if result.evidence and not is_documented(result, level):
                is_bad = True
                print(
                    f"ESCAPED {level}: {result.each.family}: {result.each.name}: {result.evidence}"
                )
        if args.every == 1 and len(found) < MIN_TRIES:
            is_bad = True
            print(f"level {level}: only {len(found)} tries")
    if is_bad or unseen or not results:
        sys.exit(1)


if __name__ == "__main__":
    main()
