"""The sockets on which the server listens, taken before a model is loaded."""

import contextlib
import errno
import resource
import socket

from jzero.errors import UserError

BACKLOG = 2048  # connections that the system keeps until the server accepts them
RESERVED_FILES = 256  # that the process opens besides connections: weights, libraries, pipes


def check_port(flag: str, port: int) -> None:
    """Raises UserError if there is no such port. The system chooses one for port 0."""
    if not 0 <= port <= 65535:
        raise UserError(f"{flag}={port}: ports are from 0 to 65535")


def bind(host: str, port: int, flag: str = "--port") -> list[socket.socket]:
    """Returns a bound socket for every address of `host`. They do not listen yet.

    An empty host stands for every interface. Raises UserError if the host has no address, is
    another machine, or the port is taken or not allowed; `flag` is the flag that named the port.
    """
    check_port(flag, port)
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host={host}: the name has no address ({error})") from None

    bound: list[socket.socket] = []
    problem: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        if bound and port == 0:
            break  # the system would choose another port for the next address
        try:
            bound.append(bind_address(family, kind, protocol, address))
        except OSError as error:
            problem = error
            # A name may have an IPv6 address on a machine that has no IPv6.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    if bound and (problem is None or problem.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)):
        return bound
    for taken in bound:
        taken.close()
    raise cannot_listen(host, port, problem, flag)


def bind_address(
    family: int, kind: int, protocol: int, address: tuple[object, ...]
) -> socket.socket:
    """Returns a socket that is bound to one address."""
    with contextlib.ExitStack() as on_error:
        opened = on_error.enter_context(socket.socket(family, kind, protocol))
        # A server may start again while the connections of the one before it fade away.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.set_inheritable(False)
        on_error.pop_all()
    return opened


def listen(host: str, port: int, bound: list[socket.socket]) -> None:
    """Makes bound sockets accept connections.

    Raises UserError if another process has begun to listen on the port since it was bound.
    """
    for opened in bound:
        try:
            opened.listen(BACKLOG)
        except OSError as error:
            raise cannot_listen(host, port, error, "--port") from None


def url(bound: socket.socket) -> str:
    """Returns the address of a bound socket, such as http://127.0.0.1:8000."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cannot_listen(host: str, port: int, problem: OSError | None, flag: str) -> UserError:
    """Returns the error that says why nothing can listen there, and what to do."""
    reason = problem.strerror if problem is not None else "no address"
    advice = "choose another port, or 0 for any that is free"
    if problem is not None and problem.errno == errno.EADDRINUSE:
        reason = "another process listens there"
    elif problem is not None and problem.errno == errno.EADDRNOTAVAIL:
        advice = "give an address of this machine, or 0.0.0.0 for all of them"
    return UserError(f"--host={host} {flag}={port}: cannot listen ({reason}): {advice}")


def allow_connections(wanted: int) -> int:
    """Lets the process open the files of `wanted` connections. Returns how many it may have.

    Raises the soft limit of open files where the hard limit allows it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = wanted + RESERVED_FILES
    if soft == unlimited or soft >= needed:
        return wanted
    if hard != unlimited:
        needed = min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    return max(1, min(wanted, soft - RESERVED_FILES))
