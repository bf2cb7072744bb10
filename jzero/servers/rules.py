"""What every request must have before the application of a server sees it.

A page in a browser of the same machine can send requests to 127.0.0.1. Two checks keep it out: the
Origin header names the site of the page, and the Host header names the address that the browser
looked up, also if a hostile name resolves to this machine (DNS rebinding). A body in JSON has to be
declared as JSON, because a browser sends a declared JSON body to another site only after asking it.
"""

import argparse
import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jzero.errors import shown
from jzero.servers.limits import MAX_HEADERS

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# A name, an IPv4 address or an IPv6 address in brackets, and a port.
HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9._-]{1,253}))(?::[0-9]{1,5})?", re.ASCII)
JSON_TYPE = "application/json"

# Media type of a refusal and its body, for a status and a reason
Refusal = Callable[[int, str], tuple[str, bytes]]


@dataclass(frozen=True)
class Hosts:
    """The hosts that the Host header of a request may name."""

    names: frozenset[str]
    allowed_names: frozenset[str]  # those that the user has listed; included in `names`
    has_any_address: bool  # any IP address too: the server listens at more than the loopback

    def includes(self, host: str) -> bool:
        """Returns whether a Host header, such as localhost:8000, names this server."""
        name = host_name(host)
        return name in self.names or (self.has_any_address and is_address(name))

    def includes_origin(self, origin: str, host: str) -> bool:
        """Returns whether an Origin header names this server, which was asked as `host`."""
        scheme, separator, origin_host = origin.lower().partition("://")
        if not separator or scheme not in ("http", "https"):
            return False
        # A proxy may have replaced Host, but not Origin.
        is_allowed = host_name(origin_host) in self.allowed_names
        return is_allowed or origin_host == host.lower()


def add_allowed_host(parser: argparse.ArgumentParser) -> None:
    """Adds the flag for further names of a server."""
    parser.add_argument(
        "--allowed-host",
        metavar="NAME",
        action="append",
        default=[],
        help="another name by which clients and pages reach this server, such as that of a proxy; "
        "it may be given again (default: --host, and localhost or the name of this machine)",
    )


def make_hosts(address: str, allowed: Sequence[str] = ()) -> Hosts:
    """Returns the hosts of a server that listens at `address`, a name or an IP address.

    allowed: further names, such as that of a proxy.
    """
    allowed_names = frozenset(name.strip().lower().strip("[]") for name in allowed)
    names = {*LOOPBACK_NAMES, address.lower().strip("[]")} | allowed_names
    names.discard("")  # every interface, and the name of a malformed header
    is_loopback = listens_at_loopback(address)
    if not is_loopback:
        names.add(socket.gethostname().lower())
    # No name can be resolved into the Host header, so that an IP address is safe from rebinding.
    return Hosts(frozenset(names), allowed_names, has_any_address=not is_loopback)


def listens_at_loopback(address: str) -> bool:
    """Returns whether only this machine reaches a server at `address`."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def host_name(host: str) -> str:
    """Returns the host of HOST:PORT in lower case without brackets; "" if it has another form."""
    found = HOST.fullmatch(host.lower())
    return (found[1] or found[2]) if found else ""


def is_address(name: str) -> bool:
    """Returns whether a name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def refuse_as_text(status: int, reason: str) -> tuple[str, bytes]:
    """Returns the media type and the body of a refusal as a line of text."""
    return "text/plain; charset=utf-8", f"{reason}\n".encode()


def refuse_as_detail(status: int, reason: str) -> tuple[str, bytes]:
    """Returns a refusal as a JSON object with the field `detail`."""
    return JSON_TYPE, json.dumps({"detail": reason}).encode()


@dataclass(frozen=True)
class Rules:
    """The rules of a server for its requests."""

    hosts: Hosts
    # Media types of bodies; empty: a body may have any type.
    body_types: tuple[str, ...] = ()
    # Pages that other sites may link to.
    linked_pages: frozenset[str] = frozenset()
    # How the user allows another name.
    advice: str = "add it with --allowed-host NAME when the server starts"
    refusal: Refusal = refuse_as_text

    def check(self, scope: Scope) -> tuple[int, str] | None:
        """Returns the status and the reason with which a request is refused, or None."""
        received: list[tuple[bytes, bytes]] = scope["headers"]
        if len(received) > MAX_HEADERS:
            return 431, f"the request has more than {MAX_HEADERS} headers"
        # Latin-1 decodes any bytes.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in received}
        # A proxy may take the length for the end of the body, and this server the encoding.
        if "content-length" in headers and "transfer-encoding" in headers:
            return 400, "Content-Length and Transfer-Encoding exclude each other: send one of them"
        return self.check_source(scope["path"], headers) or self.check_type(headers)

    def check_source(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Returns why the page that sent a request may not, or None."""
        host = headers.get("host", "")
        if not self.hosts.includes(host):
            return 403, f"Host={shown(host)} is not a name of this server: {self.advice}"
        origin = headers.get("origin")
        if origin is not None and not self.hosts.includes_origin(origin, host):
            return 403, f"Origin={shown(origin)} is a page of another site: {self.advice}"
        # Browsers report the site of a page; "none" is the address bar.
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and path not in self.linked_pages:
            return 403, f"Sec-Fetch-Site={shown(site)}: pages of other sites are refused"
        return None

    def check_type(self, headers: dict[str, str]) -> tuple[int, str] | None:
        """Returns why a body has a wrong type, or None."""
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if not has_body or not self.body_types:
            return None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in self.body_types:
            return None
        return 415, (
            f"Content-Type={shown(kind)} is not accepted: send {' or '.join(self.body_types)}"
        )


class CheckedApp:
    """An application that gets only the requests that keep the rules."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app = app
        self.rules = rules
        self.is_ending = False  # the server has dropped its connections, and cancels requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self.rules.check(scope)
        if problem is not None:
            await self.refuse(send, *problem)
            return
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:
            # uvicorn would print a traceback for every request that it cancels.
            if not self.is_ending:
                raise

    async def refuse(self, send: Send, status: int, reason: str) -> None:
        """Answers a request that is refused."""
        kind, body = self.rules.refusal(status, reason)
        headers = {"content-type": kind, "content-length": str(len(body))}
        if status == 400:
            # It is unclear where the next request of the connection would begin.
            headers["connection"] = "close"
        start: Message = {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await send(start)
        await send({"type": "http.response.body", "body": body})
