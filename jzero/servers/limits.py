"""The limits of servers on sizes, counts and waiting times, each a flag of its command."""

import argparse
from typing import TypeVar

from jzero.errors import UserError
from jzero.fields import Field, fields_of, help_of, record

MAX_HEADER_SECONDS = 10.0  # for the headers of a request, which no client sends slowly
MAX_HEADER_BYTES = 1 << 16  # of a request line with its headers
MAX_HEADERS = 100
# The description of grace_seconds, whose default differs between servers.
GRACE = "seconds that requests may run on after Ctrl-C or TERM; a second Ctrl-C ends them at once"


@record
class ServerLimits:
    """The limits of a server."""

    def check(self) -> None:
        """Raises UserError if a limit excludes another one."""


LimitsType = TypeVar("LimitsType", bound=ServerLimits)


@record
class ConnectionLimits(ServerLimits):
    """The limits on the connections of a server."""

    max_connections: int = Field(default=2048, ge=1)
    """open connections; one more closes the oldest without a complete request"""
    max_address_connections: int = Field(default=1024, ge=1)
    """open connections of one client address; one more closes the oldest of the address without a
    complete request"""
    request_seconds: float = Field(default=20.0, ge=0.001)
    """seconds in which a request has to arrive, headers and body"""
    idle_seconds: float = Field(default=30.0, ge=0.001)
    """seconds after which a client that sends no further request, or does not read its answer, is
    disconnected"""
    grace_seconds: float = 2.0
    """seconds that requests may run on after Ctrl-C or TERM; a second Ctrl-C ends them at once"""

    @property
    def header_seconds(self) -> float:
        """The seconds in which the headers of a request have to arrive."""
        return min(self.request_seconds, MAX_HEADER_SECONDS)


def flag_name(limit: str) -> str:
    """Returns the flag of a limit, such as --max-body-bytes."""
    return "--" + limit.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, kind: type[ServerLimits], title: str) -> None:
    """Adds a flag for every limit. `--help` prints its meaning and its default below `title`."""
    group = parser.add_argument_group(title)
    for name, item in fields_of(kind).items():
        group.add_argument(
            flag_name(name),
            type=type(item.default),
            default=item.default,
            metavar="N",
            help=f"{help_of(item)} (default {item.default})",
        )


def read_flags(options: argparse.Namespace, kind: type[LimitsType]) -> LimitsType:
    """Returns the limits from the flags of `add_flags`. Raises UserError as `check` does."""
    try:
        limits = kind(**{name: getattr(options, name) for name in fields_of(kind)})
    except UserError as error:
        name, equals, rest = str(error).partition("=")
        raise UserError(f"{flag_name(name)}{equals}{rest}") from None
    limits.check()
    return limits
