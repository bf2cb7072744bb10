"""The server's sockets, which are bound before a model is loaded."""

import contextlib
import errno
import resource
import socket

from jzero.errors import UserError

BACKLOG = 2048  # connections that the kernel queues until the server accepts them
RESERVED_FILES = 256  # file descriptors for weights, libraries and pipes


def check_port(where: str, port: int) -> None:
    """Raises UserError if `port` is out of range. Port 0 lets the system choose."""
    if not 0 <= port <= 65535:
        raise UserError(f"{where}: ports are from 0 to 65535")


def bind(host: str, port: int, flag: str = "--port", setting: str = "") -> list[socket.socket]:
    """Returns a bound socket for every address of `host`. The sockets do not listen yet.

    An empty host means every interface. Raises UserError if the host has no address or belongs to
    another machine, or if the port is in use or not allowed; `flag` is the flag of the port, or
    `setting` names the host and the port, such as `placement.serve=0.0.0.0:80`.
    """
    check_port(setting or f"{flag}={port}", port)
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        where = setting or f"--host={host}"
        raise UserError(f"{where}: the name has no address ({error})") from None

    bound: list[socket.socket] = []
    problem: OSError | None = None
    # The resolver may return an address twice, and binding it again would fail.
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        if bound and port == 0:
            break  # the system would choose a different port for the next address
        try:
            bound.append(bind_address(family, kind, protocol, address))
        except OSError as error:
            problem = error
            # A name may have an IPv6 address on a machine without IPv6.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    # Addresses that this machine lacks are not an error, as long as one address is bound.
    if bound and (problem is None or problem.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)):
        return bound
    # After any other error, release the sockets that were bound.
    for taken in bound:
        taken.close()
    raise cannot_listen(setting or f"--host={host} {flag}={port}", problem)


def bind_address(
    family: int, kind: int, protocol: int, address: tuple[object, ...]
) -> socket.socket:
    """Returns a socket that is bound to one address."""
    with contextlib.ExitStack() as on_error:
        opened = on_error.enter_context(socket.socket(family, kind, protocol))
        # A server may restart while connections of the previous one are still closing.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # A dual-stack socket would take the IPv4 port as well, which has a separate socket
            # here.
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.set_inheritable(False)
        on_error.pop_all()
    return opened


def listen(host: str, port: int, bound: list[socket.socket], setting: str = "") -> None:
    """Makes bound sockets accept connections.

    Raises UserError if another process started listening on the port after it was bound.
    """
    for opened in bound:
        try:
            opened.listen(BACKLOG)
        except OSError as error:
            where = setting or f"--host={host} --port={port}"
            raise cannot_listen(where, error) from None


def url(bound: socket.socket) -> str:
    """Returns the address of a bound socket, such as http://127.0.0.1:8000."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cannot_listen(where: str, problem: OSError | None) -> UserError:
    """Returns an error with the reason why the address cannot be used, and a remedy."""
    reason = problem.strerror if problem is not None else "no address"
    advice = "choose another port, or 0 for any that is free"
    if problem is not None and problem.errno == errno.EADDRINUSE:
        reason = "another process listens there"
    elif problem is not None and problem.errno == errno.EADDRNOTAVAIL:
        advice = "give an address of this machine, or 0.0.0.0 for all of them"
    return UserError(f"{where}: cannot listen ({reason}): {advice}")


def allow_connections(num_connections: int) -> int:
    """Raises the soft limit of open files for `num_connections`. Returns how many fit.

    The hard limit of open files bounds the result.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = num_connections + RESERVED_FILES
    if soft == unlimited or soft >= needed:
        return num_connections
    if hard != unlimited:
        needed = min(needed, hard)
    # If the system refuses, the server takes fewer connections.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    return max(1, min(num_connections, soft - RESERVED_FILES))
