"""The filter of system calls under which a program runs: it refuses every call that is not listed.

The lists hold the calls that Python programs with threads need: memory, files, time, signals to
themselves. They leave out new processes, other programs, sockets, namespaces, mounts, tracing and
everything that was added to Linux later. See seccomp(2) and the kernel's
Documentation/userspace-api/seccomp_filter.rst. Runs inside of the sandbox, and imports only the
standard library.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

from jzero.sandbox import system_calls

# Numbers of system calls on x86_64 and on aarch64, which lacks some old ones.
_Numbers = dict[str, tuple[int | None, int | None]]

# fmt: off
ALLOWED: _Numbers = {
    # Reading, and writing to open files.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66),
    "pread64": (17, 67), "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70),
    "preadv2": (327, 286), "pwritev2": (328, 287), "close": (3, 57), "close_range": (436, 436),
    "lseek": (8, 62), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "pipe": (22, None), "pipe2": (293, 59), "fsync": (74, 82), "fdatasync": (75, 83),
    "flock": (73, 32), "fadvise64": (221, 223), "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    # Listing files and their properties.
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "statfs": (137, 43), "fstatfs": (138, 44), "readlink": (89, None),
    "readlinkat": (267, 78), "umask": (95, 166),
    # Memory.
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "brk": (12, 214), "madvise": (28, 233), "mincore": (27, 232), "membarrier": (324, 283),
    # Threads of the program itself.
    "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "set_tid_address": (218, 96), "rseq": (334, 293), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "getcpu": (309, 168), "arch_prctl": (158, None),
    # Signals to the program itself, time, waiting.
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128), "pause": (34, None),
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "select": (23, None), "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73),
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "eventfd": (284, None), "eventfd2": (290, 19),
    # A pair of sockets that only the program can reach, for asyncio. Calls that send to an address
    # are missing: sendmsg and sendmmsg have the address in memory, where no filter can see it.
    "shutdown": (48, 210), "recvfrom": (45, 207), "recvmsg": (47, 212),
    "getsockopt": (55, 209), "getsockname": (51, 204), "getpeername": (52, 205),
    # The program's identity, and its resource limits.
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "getpgid": (121, 155),
    "getpgrp": (111, None), "getsid": (124, 156), "getpriority": (140, 141),
    "getrlimit": (97, 163), "getrusage": (98, 165), "times": (100, 153), "uname": (63, 160),
    "sysinfo": (99, 179), "getrandom": (318, 278),
    # The program's end. It has no children to wait for.
    "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95),
}

# Changes to files. Allowed where only the program's own files can be changed.
CHANGES_FILES: _Numbers = {
    "mkdir": (83, None), "mkdirat": (258, 34), "unlink": (87, None), "unlinkat": (263, 35),
    "rmdir": (84, None), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "ftruncate": (77, 46), "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "symlink": (88, None), "symlinkat": (266, 36), "link": (86, None),
    "linkat": (265, 37), "utimensat": (280, 88), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "fallocate": (285, 47), "creat": (85, None),
}

# These depend on an argument.
_OPEN: tuple[int | None, int | None] = (2, None)
_OPENAT = (257, 56)
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_KILL = (62, 129)
_TGKILL = (234, 131)
_FCNTL = (72, 25)
_IOCTL = (16, 29)
_PRLIMIT64 = (302, 261)
_PRCTL = (157, 167)
_SOCKETPAIR = (53, 199)
_SENDTO = (44, 206)
# fmt: on

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # <linux/audit.h>
_X32_BIT = 0x40000000  # a second table of system calls of x86_64

_CLONE_THREAD = 0x10000
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND and O_TMPFILE, the same on both machines.
_OPENS_FOR_WRITING = 0x1 | 0x2 | 0x40 | 0x200 | 0x400 | 0x400000
# Signals to others by way of a file (F_SETOWN, F_SETSIG, F_SETOWN_EX), leases, larger pipes.
_REFUSED_FCNTL = (8, 10, 15, 1024, 1026, 1031)
# Terminal checks, the number of bytes ready, blocking mode, close-on-exec.
_ALLOWED_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Names of threads and of memory, and whether other processes may read this process.
_ALLOWED_PRCTL = (3, 15, 16, 0x53564D41)

_AF_UNIX = 1
_ADDRESS_OF_SENDTO = 4  # the index of the argument

# Classic BPF, <linux/bpf_common.h> and <linux/seccomp.h>.
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_KILL_PROCESS = 0x80000000
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_ARGUMENTS_OFFSET = 16
_MODE_FILTER = 2


class _Instruction(NamedTuple):
    code: int
    if_true: int  # instructions to skip
    if_false: int
    value: int

    def to_bytes(self) -> bytes:
        return struct.pack("HBBI", *self)


def is_supported() -> bool:
    """Returns whether this module has the system call numbers of this machine."""
    return platform.machine() in _ARCHITECTURES


def _give(value: int) -> _Instruction:
    return _Instruction(_RETURN, 0, 0, value)


def _refuse(reason: int = errno.EPERM) -> _Instruction:
    return _give(_ERROR | reason)


def _load_argument(index: int, offset: int = 0) -> _Instruction:
    """Loads the lower or, with offset=4, the upper 32 bits of an argument.

    The lower bits hold all of an integer argument.
    """
    return _Instruction(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * index + offset)


def _one_of(index: int, values: Sequence[int], otherwise: _Instruction) -> list[_Instruction]:
    """Allows a call if the argument is one of `values`."""
    rules = [_load_argument(index)]
    for value in values:
        rules += [_Instruction(_JUMP_EQUAL, 0, 1, value), _give(_ALLOW)]
    return [*rules, otherwise]


def _none_of(index: int, values: Sequence[int]) -> list[_Instruction]:
    """Allows a call if the argument is none of `values`."""
    rules = [_load_argument(index)]
    for value in values:
        rules += [_Instruction(_JUMP_EQUAL, 0, 1, value), _refuse()]
    return [*rules, _give(_ALLOW)]


def _null_pointer(index: int) -> list[_Instruction]:
    """Allows a call if the argument, a 64-bit pointer, is null."""
    return [
        _load_argument(index),
        _Instruction(_JUMP_EQUAL, 1, 0, 0),
        _refuse(),
        _load_argument(index, offset=4),
        _Instruction(_JUMP_EQUAL, 1, 0, 0),
        _refuse(),
        _give(_ALLOW),
    ]


def _any_bit(
    index: int,
    bits: int,
    if_any: _Instruction,
    if_none: _Instruction,
) -> list[_Instruction]:
    """Returns `if_any` if an argument has any of `bits`, otherwise `if_none`."""
    return [_load_argument(index), _Instruction(_JUMP_ANY_BIT, 0, 1, bits), if_any, if_none]


def _conditions(
    pid: int,
    may_write_files: bool,
) -> list[tuple[tuple[int | None, int | None], list[_Instruction]]]:
    """Returns the rules of the system calls that depend on an argument."""
    allow, refuse = _give(_ALLOW), _refuse()
    opens: list[tuple[tuple[int | None, int | None], list[_Instruction]]]
    if may_write_files:
        opens = [(_OPEN, [allow]), (_OPENAT, [allow])]
    else:
        read_only = _refuse(errno.EACCES)
        opens = [
            (_OPEN, _any_bit(1, _OPENS_FOR_WRITING, read_only, allow)),
            (_OPENAT, _any_bit(2, _OPENS_FOR_WRITING, read_only, allow)),
        ]
    return [
        *opens,
        (_CLONE, _any_bit(0, _CLONE_THREAD, allow, refuse)),
        # The flags of clone3 are in memory, where no filter can see them. After ENOSYS the C
        # library uses clone instead.
        (_CLONE3, [_refuse(errno.ENOSYS)]),
        (_KILL, _one_of(0, [pid], refuse)),
        (_TGKILL, _one_of(0, [pid], refuse)),
        (_FCNTL, _none_of(1, _REFUSED_FCNTL)),
        (_IOCTL, _one_of(1, _ALLOWED_IOCTL, _refuse(errno.ENOTTY))),
        (_PRLIMIT64, _one_of(0, [0, pid], refuse)),
        (_PRCTL, _one_of(0, _ALLOWED_PRCTL, refuse)),
        (_SOCKETPAIR, _one_of(0, [_AF_UNIX], refuse)),
        # One end of a pair of datagram sockets could send to any socket that has a name.
        (_SENDTO, _null_pointer(_ADDRESS_OF_SENDTO)),
    ]


def make_filter(machine: str, pid: int, may_write_files: bool) -> bytes:
    """Returns the filter of a process as a program of classic BPF."""
    column = list(_ARCHITECTURES).index(machine)
    program = [
        _Instruction(_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        _Instruction(_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        # Numbers differ between architectures: kills a process that uses another architecture's
        # calls.
        _give(_KILL_PROCESS),
        _Instruction(_LOAD, 0, 0, _NUMBER_OFFSET),
        _Instruction(_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        _refuse(errno.ENOSYS),
    ]
    allowed = ALLOWED | (CHANGES_FILES if may_write_files else {})
    for numbers in allowed.values():
        number = numbers[column]
        if number is not None:
            program += [_Instruction(_JUMP_EQUAL, 0, 1, number), _give(_ALLOW)]
    for numbers, rules in _conditions(pid, may_write_files):
        number = numbers[column]
        if number is not None:
            program += [_Instruction(_JUMP_EQUAL, 0, len(rules), number), *rules]
    program.append(_refuse())
    return b"".join(instruction.to_bytes() for instruction in program)


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def install(pid: int, may_write_files: bool) -> None:
    """Permanently applies the filter to this process and to every thread that it starts later.

    Requires `no_new_privs`. Raises OSError if the kernel has no filters.
    """
    code = make_filter(platform.machine(), pid, may_write_files)
    buffer = ctypes.create_string_buffer(code, len(code))
    length = len(code) // struct.calcsize("HBBI")
    address = ctypes.cast(buffer, ctypes.c_void_p)
    program = _FilterProgram(length, address)
    pointer = ctypes.cast(ctypes.byref(program), ctypes.c_void_p)
    system_calls.prctl(system_calls.PR_SET_SECCOMP, _MODE_FILTER, pointer)
