"""System calls of Linux that Python's standard library does not provide.

Runs inside of the sandbox, and imports only the standard library.
"""

import ctypes
import os
import platform

_LIBC = ctypes.CDLL(None, use_errno=True)

# <linux/sched.h>
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

# <linux/mount.h>
MS_NOSUID = 2
MS_NODEV = 4
MS_BIND = 4096
MS_REC = 16384
MS_SLAVE = 1 << 19
MNT_DETACH = 2
MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
AT_RECURSIVE = 0x8000
_AT_FDCWD = -100

# Numbers of system calls that older C libraries do not wrap. The first two are the same on every
# machine, pivot_root is not.
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_CAPABILITY_VERSION_3 = 0x20080522


def check(result: int, what: str) -> int:
    """Returns the result of a call; raises OSError with the kernel's reason if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(number: int, *arguments: object) -> int:
    """Calls the kernel by number. Returns the result, or -1 and the reason in errno."""
    return _LIBC.syscall(ctypes.c_long(number), *arguments)


def prctl(option: int, *values: int | ctypes.c_void_p) -> None:
    """Changes a property of this process."""
    # prctl takes four values, and some options require the unused ones to be 0.
    padded = [*values, 0, 0, 0, 0][:4]
    arguments = [
        value if isinstance(value, ctypes.c_void_p) else ctypes.c_ulong(value) for value in padded
    ]
    check(_LIBC.prctl(option, *arguments), f"prctl({option})")


def unshare(flags: int) -> None:
    """Moves this process into new namespaces: see unshare(2)."""
    check(_LIBC.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mounts a file system: see mount(2)."""
    kind_bytes = kind.encode() if kind else None
    result = _LIBC.mount(
        source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), data.encode()
    )
    check(result, f"mount {source} on {target}")


def unmount(target: str) -> None:
    """Detaches a mounted tree, including everything mounted below it."""
    check(_LIBC.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Makes `new_root` the root directory; the former root moves to `put_old`."""
    number = _PIVOT_ROOT[platform.machine()]
    result = system_call(number, new_root.encode(), put_old.encode())
    check(result, f"pivot_root {new_root}")


class _MountAttributes(ctypes.Structure):
    _fields_ = [
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    ]


def make_read_only(target: str, *, recursive: bool) -> None:
    """Makes a mounted tree read-only: see mount_setattr(2), since Linux 5.12."""
    attributes = _MountAttributes(set=MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    flags = AT_RECURSIVE if recursive else 0
    result = system_call(
        _MOUNT_SETATTR,
        _AT_FDCWD,
        target.encode(),
        flags,
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    check(result, f"mount_setattr {target}")


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapabilitySets(ctypes.Structure):
    _fields_ = [(f"word{index}", ctypes.c_uint32) for index in range(6)]


def drop_capabilities() -> None:
    """Gives up all capabilities of this process, which are the privileges of root."""
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    none = _CapabilitySets()
    check(_LIBC.capset(ctypes.byref(header), ctypes.byref(none)), "capset")
