# ruff: noqa: E501 - the sources of short programs are not broken into lines
"""Programs that try to get out of the sandbox, to take the machine down, or to get credit.

A program prints ESCAPED if it did something that it may not do. In a source, words such as CANARY
stand for values of the machine that `fill_in` puts there. `benchmarks/sandbox.py` prints a table of
these cases, and `test_hostile_programs.py` runs them.
"""

import os
from pathlib import Path
from typing import NamedTuple

from jzero.sandbox.client import Limits, Program

ESCAPED = "ESCAPED"
LIMITS = Limits(seconds=0.25, wall_seconds=1.0, memory_gib=0.25, output_mib=0.25, files_mib=16)


class Case(NamedTuple):
    """A hostile program."""

    name: str
    source: str
    reads: bool = False  # it reads files of the user, which the level seccomp cannot prevent
    function: str = ""  # that is asked for, in place of the standard output


PRELUDE = """
import os, sys, ctypes, platform, signal, socket, time, threading
libc = ctypes.CDLL(None, use_errno=True)

def attempt(what, *arguments):
    try:
        result = what(*arguments)
    except BaseException as error:
        print("refused", type(error).__name__)
    else:
        print("ESCAPED", repr(result)[:80])

def call(x86_64, aarch64, *arguments):
    number = x86_64 if platform.machine() == "x86_64" else aarch64
    result = libc.syscall(ctypes.c_long(number), *arguments)
    print("ESCAPED" if result >= 0 else "refused", result)

def libc_call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    print("ESCAPED" if result >= 0 else "refused", result)

def read(path):
    with open(path, "rb") as file:
        return file.read(100)

def write(path, mode="a"):
    with open(path, mode) as file:
        file.write("x")
"""

PROCESSES = [
    Case("fork", "attempt(os.fork)"),
    Case("fork bomb", "while True:\n    os.fork()\n    print('ESCAPED')"),
    Case("fork bomb of shell", "attempt(os.system, ':(){ :|:& };:') if os.system('true') == 0 else 0"),
    Case("subprocess", "import subprocess\nattempt(subprocess.run, ['/bin/true'])"),
    Case("multiprocessing", "import multiprocessing\nattempt(multiprocessing.Process().start)"),
    Case("pty", "import pty\nattempt(pty.fork)"),
    Case("posix_spawn", "attempt(os.posix_spawn, '/bin/true', ['true'], {})"),
    Case("vfork by number", "call(58, 220, 0x4111, 0)"),
    Case("fork by number", "call(57, 220, 17, 0)"),
    Case("clone3", "call(435, 435, ctypes.create_string_buffer(88), 88)"),
    Case("another program", "attempt(os.execv, '/bin/sh', ['sh', '-c', 'echo ESCAPED'])"),
    Case("python again", "attempt(os.execv, sys.executable, [sys.executable, '-c', 'print(\"ESCAPED\")'])"),
    Case("child that outlives its parent",
         "if os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(60)\nprint('ESCAPED')"),
    Case("new session", "attempt(os.setsid)"),
    Case("thread bomb",
         "threading.stack_size(32768)\nwhile True:\n    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"),
    Case("threads that never end",
         "for _ in range(8):\n    threading.Thread(target=time.sleep, args=(99,)).start()"),
]  # fmt: skip

MEMORY = [
    Case("list without end", "values = []\nwhile True:\n    values.append('x' * 10**6)"),
    Case("100 GB at once", "bytearray(10**11)"),
    Case("text without end", "text = 'x'\nwhile True:\n    text += text"),
    Case("shared memory", "import mmap\nkept = []\nwhile True:\n    kept.append(mmap.mmap(-1, 1 << 26))"),
    Case("file in memory", "attempt(os.memfd_create, 'x')"),
    Case("segment of shared memory", "call(29, 194, 0, 1 << 30, 0o1600)"),
    Case("message queue", "call(68, 186, 0, 0o1600)"),
    Case("locked memory", "call(151, 230, 3)"),
    Case("large pipes",
         "import fcntl\nattempt(fcntl.fcntl, os.pipe()[1], 1031, 1 << 20)"),
    Case("large file", "file = open('big', 'wb')\nwhile True:\n    file.write(bytes(1 << 20))"),
    Case("many files", "for i in range(10**9):\n    open(str(i), 'w').write('x' * 1000)"),
    Case("file with a hole", "attempt(os.truncate, os.open('hole', os.O_CREAT | os.O_RDWR), 1 << 40)"),
    Case("deep recursion", "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()"),
    Case("deep data", "value = []\nfor _ in range(10**6):\n    value = [value]\nrepr(value)"),
    Case("compiler", "compile('(' * 10**6, '', 'eval')"),
    Case("zip bomb", "import zlib\nkept = []\nwhile True:\n    kept.append(zlib.decompress(zlib.compress(bytes(1 << 26))))"),
    Case("keys of the kernel", "call(248, 217, b'user', b'x', b'y', 1, -3)"),
]  # fmt: skip

OUTPUT = [
    Case("1 GB of output", "for _ in range(1000):\n    sys.stdout.write('x' * 10**6)"),
    Case("1 GB of errors", "for _ in range(1000):\n    sys.stderr.write('x' * 10**6)"),
    Case("1 GB by descriptor", "for _ in range(1000):\n    os.write(1, b'x' * 10**6)"),
    Case("1 GB of values", "for _ in range(1000):\n    os.write(3, b'x' * 10**6)"),
    Case("lines without end", "while True:\n    print('x')"),
    Case("no text", "os.write(1, bytes(range(256)) * 10)"),
]

TIME = [
    Case("endless loop", "while True: pass"),
    Case("sleep", "time.sleep(1000)"),
    Case("large power", "10**10**10"),
    Case("regular expression", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')"),
    Case("deaf to signals",
         "for number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass"),
    Case("threads that count",
         "def spin():\n    while True: pass\nfor _ in range(8):\n    threading.Thread(target=spin).start()"),
    Case("waits for input", "import select\nselect.select([], [], [])"),
    Case("more CPU time",
         "import resource\nattempt(resource.setrlimit, resource.RLIMIT_CPU, (10**6, 10**6))"),
    Case("more memory",
         "import resource\nattempt(resource.setrlimit, resource.RLIMIT_AS, (1 << 40, 1 << 40))"),
    Case("closes its output and goes on",
         "for number in range(0, 1000):\n    try: os.close(number)\n    except OSError: pass\nwhile True: pass"),
    Case("never collected", "class Never:\n    def __del__(self):\n        while True: pass\nkept = Never()\ndel kept"),
    Case("loop at the end", "import atexit\ndef spin():\n    while True: pass\natexit.register(spin)"),
]  # fmt: skip

NETWORK = [
    Case("connect", "attempt(socket.create_connection, ('127.0.0.1', PORT), 1)"),
    Case("connect over IPv6", "attempt(socket.create_connection, ('::1', PORT), 1)"),
    Case("datagram", "s = socket.socket\nattempt(lambda: s(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT)))"),
    Case("download", "import urllib.request\nattempt(urllib.request.urlopen, 'http://127.0.0.1:PORT/')"),
    Case("name of a host", "attempt(socket.gethostbyname, 'example.com')"),
    Case("listen", "attempt(socket.create_server, ('127.0.0.1', 0))"),
    Case("raw socket", "attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)"),
    Case("socket of the kernel", "attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    Case("abstract socket",
         "attempt(lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + 'jzero-hostile'))"),
    Case("io_uring", "call(425, 425, 8, ctypes.create_string_buffer(120))"),
]  # fmt: skip

FILES = [
    Case("reads the expected output", "attempt(read, 'CANARY')", reads=True),
    Case("link to the expected output",
         "os.symlink('CANARY', 'link')\nattempt(read, 'link')", reads=True),
    Case("hard link", "attempt(os.link, 'CANARY', 'link')"),
    Case("up and over", "attempt(read, '../' * 20 + 'CANARY')", reads=True),
    Case("writes to the expected output", "attempt(write, 'CANARY')"),
    Case("empties the expected output", "attempt(write, 'CANARY', 'w')"),
    Case("removes the expected output", "attempt(os.remove, 'CANARY')"),
    Case("writes home", "attempt(write, 'HOME/jzero-was-here')"),
    Case("writes beside the canary", "attempt(write, 'FOLDER/jzero-was-here')"),
    Case("writes to /usr", "attempt(write, '/usr/lib/jzero-was-here')"),
    Case("writes to Python", "attempt(write, os.__file__)"),
    Case("overwrites the comparator", "attempt(write, 'JZERO/sandbox/comparison.py', 'w')"),
    Case("imports the comparator",
         "sys.path.insert(0, 'JZERO/..')\nattempt(lambda: __import__('jzero.sandbox.comparison', fromlist=['x']).same_output)", reads=True),
    Case("passwords", "attempt(read, '/etc/passwd')", reads=True),
    Case("keys of the user", "attempt(lambda: [name for name in os.listdir('HOME') if name not in sys.base_prefix][0])", reads=True),
    Case("environment", "print('ESCAPED' if 'JZERO_SECRET' in os.environ else 'refused')"),
    Case("environment of init", "attempt(read, '/proc/1/environ')", reads=True),
    Case("environment of the grader", "attempt(read, '/proc/PARENT/environ')", reads=True),
    Case("memory of the grader",
         "def peek():\n    with open('/proc/PARENT/mem', 'r+b', 0) as file: return file.read(1)\nattempt(peek)"),
    Case("list of processes", "attempt(lambda: [p for p in os.listdir('/proc') if p.isdigit()])", reads=True),
    Case("root by way of /proc", "attempt(os.listdir, '/proc/self/root/etc')", reads=True),
    Case("files of the grader", "attempt(os.listdir, '/proc/PARENT/fd')", reads=True),
    Case("disk", "attempt(lambda: [read('/dev/' + n) for n in ('vda', 'sda', 'nvme0n1') if os.path.exists('/dev/' + n)][0])", reads=True),
    Case("memory of the machine", "attempt(read, '/dev/mem')", reads=True),
    Case("device", "attempt(os.mknod, 'disk', 0o60666, os.makedev(254, 0))"),
    Case("mount", "libc_call('mount', b'proc', b'/box', b'proc', 0, None)"),
    Case("remount", "libc_call('mount', None, b'/usr/lib', None, 4096 | 32, None)"),
    Case("unmount", "libc_call('umount2', b'/box', 2)"),
    Case("chroot", "attempt(os.chroot, '.')"),
    Case("pivot_root", "call(155, 41, b'.', b'.')"),
    Case("file by handle", "call(304, 265, -100, ctypes.create_string_buffer(24), 0)"),
    Case("files that were left open",
         "for number in range(4, 5000):\n    try:\n        os.fstat(number)\n    except OSError:\n        continue\n    print('ESCAPED', number)"),
    Case("kernel's log", "call(103, 116, 3, ctypes.create_string_buffer(100), 100)"),
]  # fmt: skip

RIGHTS = [
    Case("root", "attempt(os.setuid, 0)"),
    Case("another group", "attempt(os.setgroups, [0])"),
    Case("user namespace", "libc_call('unshare', 0x10000000)"),
    Case("mount namespace", "libc_call('unshare', 0x00020000)"),
    Case("namespace of init", "attempt(lambda: libc.setns(os.open('/proc/1/ns/mnt', 0), 0) == 0 or 1 / 0)"),
    Case("kills the grader", "attempt(os.kill, PARENT, signal.SIGKILL)"),
    Case("kills its parent", "attempt(lambda: os.kill(os.getppid() or 1 / 0, signal.SIGKILL))"),
    Case("kills everybody", "attempt(os.kill, -1, signal.SIGKILL)"),
    Case("kills its group", "attempt(os.killpg, 0, signal.SIGKILL)"),
    Case("stops its parent", "attempt(lambda: os.kill(os.getppid() or 1 / 0, signal.SIGSTOP))"),
    Case("signal by way of a file",
         "import fcntl\nattempt(fcntl.fcntl, 0, fcntl.F_SETOWN, PARENT)"),
    Case("signal in a queue", "call(129, 138, PARENT, 9, ctypes.create_string_buffer(128))"),
    Case("signal to a process's file", "call(434, 434, PARENT, 0)"),
    Case("traces the grader", "call(101, 117, 16, PARENT, 0, 0)"),
    Case("reads another's memory", "call(310, 270, PARENT, 0, 0, 0, 0, 0)"),
    Case("writes another's memory", "call(311, 271, PARENT, 0, 0, 0, 0, 0)"),
    Case("priority of the grader", "attempt(os.setpriority, os.PRIO_PROCESS, PARENT, 19)"),
    Case("core of the grader", "attempt(os.sched_setaffinity, PARENT, [0])"),
    Case("limits of the grader",
         "import resource\nattempt(resource.prlimit, PARENT, resource.RLIMIT_NOFILE, (3, 3))"),
    Case("privileges again", "call(126, 91, ctypes.create_string_buffer(8), ctypes.create_string_buffer(24))"),
    Case("lifts the filter", "libc_call('prctl', 22, 0, 0, 0, 0)"),
    Case("BPF", "call(321, 280, 0, ctypes.create_string_buffer(128), 128)"),
    Case("performance counters", "call(298, 241, ctypes.create_string_buffer(128), 0, -1, -1, 0)"),
    Case("faults of memory", "call(323, 282, 0)"),
    Case("module of the kernel", "call(175, 105, b'', 0, b'')"),
    Case("reboot", "call(169, 142, 0xfee1dead, 672274793, 0x1234567, 0)"),
    Case("clock", "attempt(time.clock_settime, time.CLOCK_REALTIME, 0)"),
    Case("name of the machine", "attempt(socket.sethostname, 'mine')"),
    Case("second table of system calls", "call(0x40000000 + 57, 220, 17, 0)"),
    Case("types into the terminal",
         "import fcntl\nattempt(fcntl.ioctl, 0, 0x5412, b'x')"),
]  # fmt: skip

VERDICTS = [
    Case("exits with 0", "sys.exit(0)"),
    Case("exits at once", "os._exit(0)"),
    Case("nothing", "pass"),
    Case("says that it passed", "print('passed\\nPASS\\nOK\\n1.0\\nTrue')"),
    Case("forges a reply",
         "import json\nreply = json.dumps({'end': 'exit', 'status': 0, 'stdout': '42', 'result': '42'}).encode()\nfor number in range(3, 1000):\n    try: os.write(number, len(reply).to_bytes(8, 'big') + reply)\n    except OSError: pass"),
    Case("looks for the expected output in memory",
         "import gc\nfor thing in gc.get_objects():\n    if isinstance(thing, dict) and 'expected' in thing: print('ESCAPED')"),
    Case("looks through the frames",
         "frame = sys._getframe()\nwhile frame:\n    for name, value in frame.f_locals.items():\n        if 'expected' in name: print('ESCAPED', value)\n    frame = frame.f_back"),
    Case("always equal",
         "class Equal:\n    def __eq__(self, other): return True\n    def __repr__(self): return '42'\ndef f(): return Equal()", function="f"),
    Case("number that is always equal",
         "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(): return Equal(1)", function="f"),
    Case("JSON of its own",
         "import json\njson.dumps = lambda value: 'true'\ndef f(): return 1", function="f"),
    Case("value by descriptor", "os.write(3, b'[true]')\ndef f(): return 1", function="f"),
    Case("no value", "def f(): os._exit(0)", function="f"),
    Case("exit in the function", "def f(): sys.exit(0)", function="f"),
    Case("no function", "pass", function="f"),
    Case("value without end", "def f():\n    import itertools\n    return itertools.count()", function="f"),
    Case("value that holds itself", "def f():\n    value = []\n    value.append(value)\n    return value", function="f"),
    Case("replaces the harness",
         "from jzero.sandbox import program\nprogram.answer = lambda *_: os.write(3, b'true')\ndef f(): return 1", function="f"),
    Case("error whose text fails",
         "class Bad(Exception):\n    def __str__(self): raise Bad()\nraise Bad()"),
    Case("output that is not a file", "sys.stdout = None\nprint('x')"),
    Case("null bytes", "print(chr(0) * 100)"),
    Case("no program", "def ("),
    Case("empty", ""),
]  # fmt: skip

GROUPS = [PROCESSES, MEMORY, OUTPUT, TIME, NETWORK, FILES, RIGHTS, VERDICTS]
CASES = [case for group in GROUPS for case in group]


def fill_in(case: Case, canary: Path, port: int) -> Program:
    """Returns the program of a case. `canary` holds the expected output; `port` is listened on."""
    values = {
        "CANARY": str(canary),
        "FOLDER": str(canary.parent),
        "HOME": str(Path.home()),
        "JZERO": str(Path(__file__).resolve().parents[2] / "jzero"),
        "PARENT": str(os.getpid()),
        "PORT": str(port),
    }
    source = case.source
    for name, value in values.items():
        source = source.replace(name, value)
    if case.name in ("no program", "empty"):
        return Program(source)
    return Program(PRELUDE + source, function=case.function)
