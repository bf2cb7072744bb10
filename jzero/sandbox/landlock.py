"""Landlock: a process gives up all files except some that it may read.

Needs Linux 5.13 and no privileges. See landlock(7). Runs inside of the sandbox, and imports only
the standard library.
"""

import ctypes
import os
from collections.abc import Sequence

from jzero.sandbox import system_calls

_CREATE_RULESET = 444  # the same numbers on every machine
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
# The number of kinds of file access that each version of Landlock knows.
_KINDS_OF_ACCESS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_VERSION_WITH_NETWORK = 4
_VERSION_WITH_SCOPES = 6
_NETWORK = 0b11  # binding and connecting
_SCOPES = 0b11  # abstract sockets and signals outside of the process


class _Rules(ctypes.Structure):
    _fields_ = [
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    ]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32)]


def version() -> int:
    """Returns the version of Landlock that the kernel has, 0 without Landlock."""
    result = system_calls.system_call(
        _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)
    )
    return max(result, 0)


def restrict_to_reading(paths: Sequence[str]) -> None:
    """Permanently restricts this process to reading `paths` and the files below them.

    Requires `no_new_privs`. Raises OSError if the kernel has no Landlock.
    """
    landlock_version = system_calls.check(version() or -1, "landlock")
    # The kernel refuses a set with kinds of access that it does not know. Versions after the
    # table know at least these 16.
    rules = _Rules(files=(1 << _KINDS_OF_ACCESS.get(landlock_version, 16)) - 1)
    size = 8
    if landlock_version >= _VERSION_WITH_NETWORK:
        # The size of the structure grows with the version: an older kernel knows only its first
        # fields.
        rules.network, size = _NETWORK, 16
    if landlock_version >= _VERSION_WITH_SCOPES:
        rules.scopes, size = _SCOPES, 24
    ruleset = system_calls.system_call(
        _CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    system_calls.check(ruleset, "landlock_create_ruleset")
    for path in paths:
        if os.path.exists(path):
            _allow_reading(ruleset, path)
    result = system_calls.system_call(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    system_calls.check(result, "landlock_restrict_self")
    os.close(ruleset)


def _allow_reading(ruleset: int, path: str) -> None:
    allowed = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathRule(allowed, descriptor)
    result = system_calls.system_call(
        _ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0)
    )
    os.close(descriptor)
    system_calls.check(result, f"landlock_add_rule {path}")
