"""Moves a process into new namespaces, in which it sees only a few read-only directories.

`enter` creates user, mount, process, network, IPC and host-name namespaces, and an in-memory root
directory with the directories that Python needs. `isolate` adds another layer for one program: a
process namespace that contains only the program, and an empty directory that it may write to.

No privileges are needed if the kernel allows user namespaces to all users. Runs inside of the
sandbox, and imports only the standard library.
"""

import os
import signal
import socket
from collections.abc import Callable, Sequence

from jzero.sandbox import system_calls
from jzero.sandbox.system_calls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_REC,
    MS_SLAVE,
)

NOBODY = 65534  # the user that a program becomes if root started the sandbox
BOX = "/box"  # the program's own directory
_OLD = "old"  # the former root, until it is unmounted
_DEVICES = ("null", "zero", "random", "urandom")
_BOX_INODES = 4096


def enter(paths: Sequence[str]) -> bool:
    """Moves this process into namespaces in which only `paths` exist and can be read.

    The process that returns is a fork of the caller, and the first process of its process
    namespace. The caller waits for the fork and exits with it. Returns whether the user NOBODY
    exists.

    Raises:
        OSError: the kernel refuses a call.
    """
    has_nobody = _become_root_of_namespace()
    system_calls.unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID)
    # Only processes that are forked from now on are in the new process namespace.
    child = os.fork()
    if child:
        # Only the child may keep the client's socket open.
        os.closerange(3, 1 << 16)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    # A client that gives up kills the outer process; this process and all its descendants end with
    # it.
    system_calls.prctl(system_calls.PR_SET_PDEATHSIG, signal.SIGKILL)
    _build_root(paths)
    socket.sethostname("sandbox")
    return has_nobody


def isolate(bytes_of_box: int) -> None:
    """Gives this process an empty directory BOX, and its next child a process namespace."""
    system_calls.unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID)
    options = f"size={bytes_of_box},nr_inodes={_BOX_INODES},mode=777"
    system_calls.mount("tmpfs", BOX, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(BOX)


def _become_root_of_namespace() -> bool:
    """Enters a user namespace as its root. Returns whether an unprivileged user also exists there.

    Only a process outside of the namespace may map more than one user, and only if it is root.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        os.setgroups([])
        finish = _start_helper()
        system_calls.unshare(CLONE_NEWUSER)
        if finish():
            return True
    else:
        system_calls.unshare(CLONE_NEWUSER)
    # The kernel requires this before an unprivileged process may map a group.
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")
    return False


def _start_helper() -> Callable[[], bool]:
    """Forks a helper that stays outside of the namespace.

    The returned function makes the helper map root and the unprivileged user, and returns whether
    that succeeded.
    """
    pid = os.getpid()
    read_end, write_end = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(write_end)
        os.read(read_end, 1)
        try:
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{pid}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        except OSError:
            os._exit(1)
        os._exit(0)

    def finish() -> bool:
        os.close(read_end)
        os.close(write_end)  # the end of the pipe tells the helper to write the maps
        _, status = os.waitpid(helper, 0)
        return status == 0

    return finish


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _build_root(paths: Sequence[str]) -> None:
    """Builds a read-only root directory in memory that contains `paths`."""
    # Mounts in this namespace must not propagate to the machine.
    system_calls.mount("none", "/", None, MS_REC | MS_SLAVE)
    # Any directory can carry the new root; /tmp exists everywhere.
    system_calls.mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID, "size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir(_OLD)
    # The former root stays mounted at _OLD until `paths` are bound from it.
    system_calls.pivot_root(".", _OLD)
    os.chdir("/")

    for path in paths:
        _show(path)
    for name in _DEVICES:
        _show(f"/dev/{name}")
    os.mkdir(BOX)
    if not os.path.lexists("/tmp"):
        os.symlink(BOX, "/tmp")

    system_calls.unmount(f"/{_OLD}")
    os.rmdir(f"/{_OLD}")
    system_calls.make_read_only("/", recursive=True)


def _show(path: str) -> None:
    """Makes a file or directory of the former root visible at its path."""
    source = f"/{_OLD}{path}"
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):  # /lib is a link to /usr/lib
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    system_calls.mount(source, path, None, MS_BIND | MS_REC)
