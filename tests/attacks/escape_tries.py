# ruff: noqa: E501 - the sources of short programs are not broken into lines
"""The tries of `escapes.py`: what programs do to get out of the sandbox, by family.

Each is a line of Python that runs in a program after PRELUDE. In it, names in capitals such as
CANARY stand for values of the machine (`escapes.Outside.values`). `attempt(function)` prints DID if
the function does not raise; `reached(number, ...)` prints DID if the system call reaches the
kernel, whatever the kernel makes of it: a call that the filter refuses ends in EPERM or ENOSYS.
"""

from typing import NamedTuple


class Try(NamedTuple):
    """One try. `is_control`: without protection it must be seen to succeed."""

    family: str
    name: str
    source: str
    reads: bool = False  # it reads what the user may read, as the level seccomp allows
    looks: bool = False  # it learns that something exists, as landlock and seccomp allow
    is_control: bool = False


PRELUDE = """
import ctypes, errno, fcntl, gc, mmap, os, re, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
REFUSED = (errno.EPERM, errno.ENOSYS)

def attempt(function):
    try:
        value = function()
    except BaseException as error:
        print("no", type(error).__name__, str(error)[:60])
    else:
        print("DID", repr(value)[:200])

def reached(number, *arguments):
    values = [ctypes.c_void_p(each) if isinstance(each, int) else each for each in arguments]
    values += [ctypes.c_void_p(0)] * (6 - len(values))
    result = libc.syscall(ctypes.c_long(number), *values)
    reason = ctypes.get_errno()
    if result >= 0 or reason not in REFUSED:
        print("DID", result, errno.errorcode.get(reason))

def read(path):
    with open(path, "rb", 0) as file:
        return file.read(200)

def write(path, mode="a"):
    with open(path, mode) as file:
        file.write("x")

def space(size=256):
    return ctypes.create_string_buffer(size)

def pair(kind=socket.SOCK_DGRAM):
    return socket.socketpair(socket.AF_UNIX, kind)
"""

# Numbers on x86-64. From 424 on the numbers are the same on every machine.
_CALLS = {
    "io_uring_setup": (425, "8, space()"), "io_uring_enter": (426, ""),
    "io_uring_register": (427, ""), "memfd_create": (319, "b'x'"), "memfd_secret": (447, ""),
    "userfaultfd": (323, ""), "bpf": (321, "0, space(), 128"),
    "perf_event_open": (298, "space(), 0, -1, -1"), "unshare": (272, "0x10000000"),
    "setns": (308, ""), "ptrace": (101, "16, VICTIM"), "process_vm_readv": (310, "VICTIM"),
    "process_vm_writev": (311, "VICTIM"), "pidfd_open": (434, "VICTIM"),
    "pidfd_getfd": (438, ""), "pidfd_send_signal": (424, ""), "process_madvise": (440, ""),
    "process_mrelease": (448, ""), "add_key": (248, "b'user', b'k', b'v', 1, -2"),
    "request_key": (249, "b'user', b'k'"), "keyctl": (250, "0, -3"),
    "shmget": (29, "0x6a7a, 4096, 0o1666"), "shmat": (30, ""), "semget": (64, "0, 1, 0o1600"),
    "msgget": (68, "0, 0o1600"), "mq_open": (240, "b'q', 64, 0o600"), "mq_unlink": (241, "b'q'"),
    "socket unix": (41, "1, 1"), "socket inet": (41, "2, 1"), "socket inet6": (41, "10, 1"),
    "socket vsock": (41, "40, 1"), "socket alg": (41, "38, 5"), "socket netlink": (41, "16, 3"),
    "socket packet": (41, "17, 3"), "bind": (49, "0"), "connect": (42, "0"), "listen": (50, "0"),
    "accept": (43, "0"), "accept4": (288, "0"), "setsockopt": (54, "0"), "sendmsg": (46, "0"),
    "sendmmsg": (307, "0"), "recvmmsg": (299, "0"), "personality": (135, "0x40000"),
    "seccomp": (317, "0"), "fork": (57, ""), "vfork": (58, ""), "clone": (56, "17"),
    "clone3": (435, "space(88), 88"), "execve": (59, "b'/bin/sh'"),
    "execveat": (322, "0, b'', 0, 0, 0x1000"), "sched_setaffinity": (203, "VICTIM, 8, space(8)"),
    "sched_setscheduler": (144, "VICTIM, 0, space(8)"), "sched_setattr": (314, "VICTIM, space()"),
    "setpriority": (141, "0, VICTIM, 5"), "setsid": (112, ""), "setpgid": (109, ""),
    "tkill": (200, "VICTIM, 10"), "rt_sigqueueinfo": (129, "VICTIM, 10, space()"),
    "rt_tgsigqueueinfo": (297, "VICTIM, VICTIM, 10, space()"), "kill": (62, "VICTIM, 0"),
    "tgkill": (234, "VICTIM, VICTIM, 0"), "timer_create": (222, "0, 0, space(8)"),
    "timerfd_create": (283, ""), "signalfd4": (289, "-1, 0, 8"), "chroot": (161, "b'.'"),
    "setuid": (105, ""), "setgid": (106, ""), "setreuid": (113, ""), "setregid": (114, ""),
    "setresuid": (117, ""), "setresgid": (119, ""), "setgroups": (116, ""), "setfsuid": (122, ""),
    "capset": (126, ""), "capget": (125, ""), "mount": (165, ""), "umount2": (166, ""),
    "pivot_root": (155, "b'.', b'.'"), "open_tree": (428, "-100, b'/', 1"),
    "move_mount": (429, ""), "fsopen": (430, "b'tmpfs'"), "fsconfig": (431, ""),
    "fsmount": (432, ""), "fspick": (433, "-100, b'/'"), "mount_setattr": (442, ""),
    "quotactl": (179, ""), "quotactl_fd": (443, ""), "reboot": (169, ""), "kexec_load": (246, ""),
    "init_module": (175, ""), "finit_module": (313, ""), "delete_module": (176, ""),
    "landlock_create_ruleset": (444, "0, 0, 1"), "landlock_add_rule": (445, ""),
    "landlock_restrict_self": (446, ""), "syslog": (103, "3, space(), 100"), "uselib": (134, ""),
    "acct": (163, "b'/x'"), "swapon": (167, "b'/x'"), "swapoff": (168, "b'/x'"),
    "sethostname": (170, ""), "setdomainname": (171, ""), "iopl": (172, "3"),
    "ioperm": (173, "0, 8, 1"), "modify_ldt": (154, ""), "ioprio_set": (251, ""),
    "migrate_pages": (256, "VICTIM"), "move_pages": (279, "VICTIM"), "mbind": (237, ""),
    "set_mempolicy": (238, ""), "kcmp": (312, "VICTIM, VICTIM"), "sync": (162, ""),
    "syncfs": (306, "1"), "splice": (275, ""), "tee": (276, ""), "vmsplice": (278, ""),
    "inotify_init": (253, ""), "inotify_init1": (294, ""), "fanotify_init": (300, ""),
    "name_to_handle_at": (303, "-100, b'/', space(), space(8)"),
    "open_by_handle_at": (304, "-100, space(24)"), "openat2": (437, "-100, b'/', space(24), 24"),
    "mknod": (133, "b'n', 0o20666"), "mknodat": (259, "-100, b'n', 0o20666"),
    "chown": (92, "b'.'"), "fchown": (93, "1"), "lchown": (94, "b'.'"),
    "fchownat": (260, "-100, b'.'"), "setxattr": (188, "b'.', b'user.x', b'1', 1"),
    "removexattr": (197, "b'.', b'user.x'"), "fchmodat2": (452, "-100, b'.', 0o777"),
    "vhangup": (153, ""), "nfsservctl": (180, ""), "lookup_dcookie": (212, ""),
    "clock_settime": (227, "0, space()"), "settimeofday": (164, ""), "adjtimex": (159, ""),
    "clock_adjtime": (305, ""), "mlock": (149, ""), "mlockall": (151, ""),
    "remap_file_pages": (216, ""), "pkey_alloc": (330, ""), "cachestat": (451, ""),
    "map_shadow_stack": (453, "0, 4096"), "futex_waitv": (449, ""), "statmount": (457, ""),
    "listmount": (458, ""), "lsm_get_self_attr": (459, ""), "lsm_set_self_attr": (460, ""),
    "lsm_list_modules": (461, ""), "mseal": (462, ""), "setxattrat": (463, ""),
    "open_tree_attr": (467, ""), "a number of the future": (599, ""),
}  # fmt: skip
FIRST_SHARED_NUMBER = 424
_SAFE_CALLS = ("memfd_create", "socket inet", "timerfd_create", "inotify_init1", "capget",
               "splice", "mlock", "sendmsg", "bind", "setxattr")  # fmt: skip

CALLS = [
    Try("system calls by number", name, f"reached({number}, {arguments})",
        is_control=name in _SAFE_CALLS)
    for name, (number, arguments) in _CALLS.items()
]  # fmt: skip

_READ = {
    "canary": "read('CANARY')",
    "canary by a link": "(os.symlink('CANARY', 'l'), read('l'))",
    "canary from above": "read('../' * 30 + 'CANARY')",
    "canary by O_PATH": "os.open('CANARY', os.O_PATH)",
    "canary by /proc/self/root": "read('/proc/self/root/CANARY')",
    "canary by a descriptor of /proc": "read('/proc/self/cwd/../../../../../CANARY')",
    "folder of the canary": "os.listdir('FOLDER')",
    "stat of the canary": "os.stat('CANARY')",
    "passwords": "read('/etc/passwd')",
    "shadow": "read('/etc/shadow')",
    "home": "[n for n in os.listdir('HOME') if n not in sys.base_prefix][0]",
    "jzero": "read('JZERO/sandbox/comparison.py')",
    "environment of the grader": "read('/proc/GRADER/environ')",
    "command of the grader": "read('/proc/GRADER/cmdline')",
    "files of the grader": "os.listdir('/proc/GRADER/fd')",
    "map of the grader": "read('/proc/GRADER/maps')",
    "memory of the victim": "open('/proc/VICTIM/mem', 'rb', 0)",
    "environment of init": "read('/proc/1/environ')",
    "list of processes": "[n for n in os.listdir('/proc') if n.isdigit()][0]",
    "network": "read('/proc/net/tcp')",
    "mounts": "read('/proc/self/mountinfo')",
    "cpu": "read('/proc/cpuinfo')",
    "devices": "os.listdir('/sys/class')",
    "/run": "os.listdir('/run')",
    "/var": "os.listdir('/var')",
    "/dev/shm": "os.listdir('/dev/shm')",
    "/dev/mem": "read('/dev/mem')",
    "disk": "[read('/dev/' + n) for n in ('vda', 'sda', 'nvme0n1') if os.path.exists('/dev/' + n)][0]",
    "terminal": "read('/dev/tty')",
}  # fmt: skip
_WRITTEN = {
    "canary": "write('CANARY')",
    "canary emptied": "write('CANARY', 'w')",
    "canary removed": "os.remove('CANARY')",
    "canary renamed": "os.rename('CANARY', 'FOLDER/y')",
    "canary truncated": "os.truncate('CANARY', 0)",
    "canary's mode": "os.chmod('CANARY', 0o777)",
    "canary's time": "os.utime('CANARY')",
    "hard link of the canary": "os.link('CANARY', 'FOLDER/l')",
    "new file": "write('FOLDER/new')",
    "new folder": "os.mkdir('FOLDER/d')",
    "new link": "os.symlink('/', 'FOLDER/s')",
    "new pipe": "os.mkfifo('FOLDER/p')",
    "file without a name": "os.open('FOLDER', os.O_TMPFILE | os.O_RDWR)",
    "opened for writing by a link": "(os.symlink('CANARY', 'w'), write('w'))",
    "/usr": "write('/usr/lib/jzero-was-here')",
    "Python": "write(os.__file__)",
    "/": "write('/jzero-was-here')",
    "/etc": "write('/etc/jzero-was-here')",
    "/dev/shm": "write('/dev/shm/jzero-was-here')",
    "/var/tmp": "write('/var/tmp/jzero-was-here')",
    "file of the kernel": "write('/proc/sys/kernel/core_pattern')",
    "own limits of memory": "write('/proc/self/oom_score_adj')",
    "device": "os.mknod('d', 0o60666, os.makedev(254, 0))",
}  # fmt: skip
_CONTROL_FILES = {"canary", "new file", "new pipe", "canary's mode"}  # fmt: skip

FILES = [
    Try("paths and files", f"read: {name}", f"attempt(lambda: {source})", reads=True,
        looks=name in ("canary by O_PATH", "stat of the canary"),
        is_control=name in _CONTROL_FILES)
    for name, source in _READ.items()
] + [
    Try("paths and files", f"write: {name}", f"attempt(lambda: {source})",
        is_control=name in _CONTROL_FILES)
    for name, source in _WRITTEN.items()
]  # fmt: skip

_SOCKETS = {
    "datagram to a path": "pair()[0].sendto(b'leak', 'DATAGRAMS')",
    "message to a path": "pair()[0].sendmsg([b'leak'], [], 0, 'DATAGRAMS')",
    "datagram to an abstract name": "pair()[0].sendto(b'leak', chr(0) + 'ABSTRACT')",
    "message to an abstract name": "pair()[0].sendmsg([b'leak'], [], 0, chr(0) + 'ABSTRACT')",
    "descriptor to a path": "pair()[0].sendmsg([b'x'], [(1, 1, struct.pack('i', 0))], 0, 'DATAGRAMS')",
    "connected half to a path": "pair()[0].connect('DATAGRAMS')",
    "half bound to a name": "pair()[0].bind('FOLDER/bound')",
    "half of a stream to a path": "pair(socket.SOCK_STREAM)[0].connect('STREAMS')",
    "stream to a path": "socket.socket(socket.AF_UNIX).connect('STREAMS')",
    "stream to an abstract name": "socket.socket(socket.AF_UNIX).connect(chr(0) + 'ABSTRACT')",
    "TCP": "socket.create_connection(('127.0.0.1', PORT), 1)",
    "TCP over IPv6": "socket.create_connection(('::1', PORT), 1)",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'leak', ('127.0.0.1', PORT))",
    "listener": "socket.create_server(('127.0.0.1', 0))",
    "listener at a path": "socket.socket(socket.AF_UNIX).bind('FOLDER/listener')",
    "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "crypto of the kernel": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "virtual machine's": "socket.socket(40, socket.SOCK_STREAM)",
    "Bluetooth": "socket.socket(31, socket.SOCK_RAW, 1)",
    "pair of IPv4": "socket.socketpair(socket.AF_INET)",
    "pair of TIPC": "socket.socketpair(30, socket.SOCK_STREAM)",
    "name of a host": "socket.gethostbyname('example.com')",
    "system's log": "pair()[0].sendto(b'leak', '/dev/log')",
    "pointer with an upper half": "libc.sendto(pair()[0].fileno(), b'x', 1, 0, ctypes.c_void_p(1 << 32), 16) == -1 and ctypes.get_errno() in REFUSED and 1 / 0",
}  # fmt: skip
_CONTROL_SOCKETS = {"datagram to a path", "message to a path", "datagram to an abstract name",
                    "stream to a path", "stream to an abstract name", "TCP", "UDP",
                    "message to an abstract name"}  # fmt: skip
SOCKETS = [
    Try("sockets", name, f"attempt(lambda: {source})", is_control=name in _CONTROL_SOCKETS)
    for name, source in _SOCKETS.items()
]

_SIGNALS = {
    "kills the victim": "os.kill(VICTIM, signal.SIGKILL)",
    "stops the victim": "os.kill(VICTIM, signal.SIGSTOP)",
    "asks for the victim": "os.kill(VICTIM, 0)",
    "kills the grader": "os.kill(GRADER, signal.SIGTERM)",
    "kills its parent": "os.kill(os.getppid() or 1 / 0, signal.SIGKILL)",
    "stops its parent": "os.kill(os.getppid() or 1 / 0, signal.SIGSTOP)",
    "kills its group": "os.killpg(0, signal.SIGKILL)",
    "kills everybody": "os.kill(-1, signal.SIGKILL)",
    "kills a negative number": "os.kill(-VICTIM, signal.SIGKILL)",
    "F_SETOWN": "fcntl.fcntl(pair()[0], fcntl.F_SETOWN, VICTIM)",
    "F_SETOWN_EX": "fcntl.fcntl(pair()[0], 15, struct.pack('ii', 1, VICTIM))",
    "F_SETSIG": "fcntl.fcntl(0, 10, signal.SIGKILL)",
    "F_NOTIFY": "fcntl.fcntl(os.open('.', 0), 1026, 2)",
    "F_SETLEASE": "fcntl.fcntl(os.open(os.__file__, 0), 1024, 0)",
    "F_SETPIPE_SZ": "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
    "FIOSETOWN": "fcntl.ioctl(pair()[0], 0x8901, struct.pack('i', VICTIM))",
    "SIOCSPGRP": "fcntl.ioctl(pair()[0], 0x8902, struct.pack('i', VICTIM))",
    "FIOASYNC": "None if libc.ioctl(1, 0x5452, b'1234') == 0 else 1 / 0",
    "types into the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "types, with upper bits": "None if libc.ioctl(0, ctypes.c_ulong(0x100005412), b'x') == 0 else 1 / 0",
    "priority of the victim": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "processors of the victim": "os.sched_setaffinity(VICTIM, [0])",
    "limits of the victim": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (7, 7))",
    "reads limits of the victim": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE)",
    "more memory": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "more CPU time": "resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))",
}  # fmt: skip
_CONTROL_SIGNALS = {"stops the victim", "asks for the victim", "priority of the victim",
                    "limits of the victim", "kills the victim", "F_SETOWN"}  # fmt: skip
SIGNALS = [
    Try("signals, fcntl and ioctl", name, f"attempt(lambda: {source})",
        is_control=name in _CONTROL_SIGNALS)
    for name, source in _SIGNALS.items()
]  # fmt: skip

_INT80 = """
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("53b8{number:02x}000000bb{first:02x}000000cd805bc3"))
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
sys.stdout.flush()
print("DID", call())
"""
_CLONE_FLAGS = {
    "process": 17, "VM": 0x100 | 17, "parent's child": 0x8000 | 17, "vfork": 0x4000 | 0x100 | 17,
    "mounts": 0x20000 | 17, "host name": 0x4000000 | 17, "IPC": 0x8000000 | 17,
    "users": 0x10000000 | 17, "processes": 0x20000000 | 17, "network": 0x40000000 | 17,
    "cgroups": 0x2000000 | 17, "time": 0x80, "files": 0x400 | 17,
}  # fmt: skip
_CLONE = """
result = libc.syscall(ctypes.c_long(56), ctypes.c_ulong({flags}), None, None, None, None)
if result == 0:
    os._exit(0)
if result > 0:
    print("DID", result)
"""
_PROCESSES = {
    "fork": "os.fork() or os._exit(0)",
    "shell": "os.system('true') == 0 or 1 / 0",
    "posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "exec of a shell": "os.execv('/bin/sh', ['sh', '-c', 'echo DID'])",
    "exec of Python": "os.execv(sys.executable, [sys.executable, '-c', 'print(\"DID\")'])",
    "subprocess": "__import__('subprocess').run(['/bin/true'])",
    "multiprocessing": "__import__('multiprocessing').Process().start()",
    "pseudo terminal": "__import__('pty').fork()[0] or os._exit(0)",
}
PROCESSES = (
    [
        Try("processes, clone flags, int 0x80", f"int 0x80: {name}", _INT80.format(number=number, first=first))
        for name, number, first in (("getpid", 20, 0), ("fork", 2, 0), ("close", 6, 99), ("socketcall", 102, 1))
    ]
    + [
        Try("processes, clone flags, int 0x80", f"x32: {number}", f"reached(0x40000000 + {number})")
        for number in (39, 57, 512, 520, 544)
    ]
    + [
        Try("processes, clone flags, int 0x80", f"clone: {name}", _CLONE.format(flags=flags))
        for name, flags in _CLONE_FLAGS.items()
    ]
    + [
        Try("processes, clone flags, int 0x80", name, f"attempt(lambda: {source})",
            is_control=name in ("fork", "shell", "posix_spawn"))
        for name, source in _PROCESSES.items()
    ]
)  # fmt: skip

# All that a program can find of its own memory. It walks the mapped pages around what it knows of,
# and what /proc lists where there is a /proc. It reads by writing to a pipe, because the kernel
# refuses what is not mapped where the processor would end the program. The pattern does not match
# its own text.
SCAN = """
pattern = re.compile(b"MARK[E]R-[0-9a-f]{8}")
libc.sbrk.restype = libc.write.restype = ctypes.c_ssize_t
read_end, write_end = os.pipe()
CHUNK = 1 << 16
found = set()
seen = set()

def look(address):
    # Returns whether anything in a megabyte can be read.
    has_read, place, last = False, address, b""
    while place < address + (1 << 20):
        count = libc.write(write_end, ctypes.c_void_p(place), ctypes.c_size_t(CHUNK - place % CHUNK))
        if count <= 0:
            place, last = place + 4096, b""
            continue
        content = last + os.read(read_end, count)
        found.update(hit.group() for hit in pattern.finditer(content))
        has_read, place, last = True, place + count, content[-32:]
    return has_read

def walk(address, step):
    for _ in range(64):
        if address in seen:
            return
        seen.add(address)
        if not look(address):
            return
        address += step << 20

anchors = [id(each) for each in (sys, os, [], {}, object(), gc, "x" * 10, "y" * 10**6, len)]
frame = ctypes.c_long()
anchors += [libc.sbrk(0) - 1, ctypes.addressof(space()), ctypes.addressof(frame)]
anchors += [ctypes.cast(libc.malloc, ctypes.c_void_p).value, id(sys._getframe())]
for anchor in anchors:
    block = anchor & ~((1 << 20) - 1)
    walk(block, 1)
    walk(block - (1 << 20), -1)
try:
    maps = open("/proc/self/maps").read().splitlines()
    memory = open("/proc/self/mem", "rb", 0)
except OSError:
    maps = []
for line in maps:
    start, end = [int(part, 16) for part in line.split()[0].split("-")]
    if line.split()[1].startswith("r") and end - start < 1 << 28 and "[v" not in line:
        try:
            memory.seek(start)
            content = memory.read(end - start)
        except (OSError, OverflowError, ValueError):
            continue
        found.update(hit.group() for hit in pattern.finditer(content))
for thing in gc.get_objects():
    if isinstance(thing, dict):
        for value in list(thing.values()):
            if isinstance(value, str | bytes):
                content = value.encode("utf-8", "replace") if isinstance(value, str) else value
                found.update(hit.group() for hit in pattern.finditer(content))
for mark in sorted(found):
    print("DID", mark)
"""
_OTHERS = {
    "memory of the victim": "process_vm(VICTIM)",
    "pids by getpgid": "[p for p in range(2, 40000) if p != os.getpid() and libc.getpgid(p) >= 0][0]",
    "pids by kill": "[p for p in range(2, 40000) if p != os.getpid() and libc.kill(p, 0) == 0][0]",
    "pids by scheduler": "[p for p in range(2, 40000) if p != os.getpid() and libc.sched_getscheduler(p) >= 0][0]",
    "robust list of the victim": "libc.syscall(274, VICTIM, space(8), space(8)) == 0 or 1 / 0",
    "traces the victim": "libc.ptrace(16, VICTIM, 0, 0) == 0 or 1 / 0",
    "memory file of its parent": "open(f'/proc/{os.getppid()}/mem', 'rb', 0)",
    "files of its parent": "[read(f'/proc/{os.getppid()}/fd/{n}') for n in range(9)]",
    "environment": "os.environ['JZERO_SECRET']",
    "environment in memory": "os.environ.copy().pop('HOME') or 1 / 0",
    "descriptors that were left open": "[n for n in range(4, 3000) if libc.fcntl(n, 1) >= 0 and n > 3][0]",
    "standard input for writing": "os.write(0, b'x')",
    "standard input longer": "os.ftruncate(0, 1 << 20)",
    "source in the arguments": "[a for a in sys.orig_argv if 'MARK' + 'ER' in a][0]",
    "frames of the harness": "[v for f in (sys._getframe(1),) for v in f.f_back.f_locals if 'expected' in v][0]",
}  # fmt: skip
# These see other processes where all of them are in one namespace. That is no harm of itself, and
# docs/environments.md says so.
_SEES_PIDS = {"pids by getpgid", "pids by scheduler", "robust list of the victim"}
_HELPERS = """
def process_vm(pid):
    target = ctypes.create_string_buffer(64)
    local = (ctypes.c_void_p * 2)(ctypes.addressof(target), 64)
    remote = (ctypes.c_void_p * 2)(id(sys), 64)
    assert libc.process_vm_readv(pid, local, 1, remote, 1, 0) > 0
"""
OTHERS = [
    Try("other processes", name, f"{_HELPERS}\nattempt(lambda: {source})", looks=name in _SEES_PIDS,
        is_control=name in ("pids by kill", "pids by getpgid"))
    for name, source in _OTHERS.items()
]  # fmt: skip

# What earlier and concurrent requests left: a scan after each kind of request. The control plants
# the marker in the program's own memory.
REQUESTS = ("a source", "an input", "arguments of a call", "an expression", "a cell of a session",
            "a session that lives", "a large source", "a large input", "a program that failed",
            "a program at a limit", "a failed session", "everything again")  # fmt: skip
RESIDUE = [Try("residue", f"after {name}", SCAN) for name in REQUESTS] + [
    Try("residue", "a marker that is there",
        "planted = ('MARK' + 'ER-' + 'f' * 8).encode()" + SCAN, is_control=True)
]  # fmt: skip

TRIES = [*CALLS, *FILES, *SOCKETS, *SIGNALS, *PROCESSES, *OTHERS, *RESIDUE]
