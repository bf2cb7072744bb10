"""The limits of servers on sizes, counts and waiting times, each a flag of its command."""

import argparse
import math
from dataclasses import dataclass, fields
from typing import TypeVar

from jzero.errors import UserError
from jzero.setting import rules_of, setting

MAX_HEADER_SECONDS = 10.0  # for the headers of a request, which no client sends slowly
MAX_HEADER_BYTES = 1 << 16  # of a request line with its headers
MAX_HEADERS = 100
# The description of grace_seconds, whose default differs between servers.
GRACE = "seconds that requests may run on after Ctrl-C or TERM; a second Ctrl-C ends them at once"


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a server, whose fields are written with `setting`."""

    def check(self) -> None:
        """Raises UserError if a limit is too small or not a number."""
        for item in fields(self):
            value = getattr(self, item.name)
            least = rules_of(item).at_least
            # argparse accepts nan and inf as floats.
            if not (math.isfinite(value) and value >= least):
                raise UserError(f"{flag_name(item.name)}={value}: give a number from {least} on")


LimitsType = TypeVar("LimitsType", bound=ServerLimits)


@dataclass(frozen=True)
class ConnectionLimits(ServerLimits):
    """The limits on the connections of a server."""

    max_connections: int = setting(
        2048, "open connections; one more closes the oldest without a complete request", at_least=1
    )
    max_address_connections: int = setting(
        1024,
        "open connections of one client address; one more closes the oldest of the "
        "address without a complete request",
        at_least=1,
    )
    request_seconds: float = setting(
        20.0, "seconds in which a request has to arrive, headers and body", at_least=0.001
    )
    idle_seconds: float = setting(
        30.0,
        "seconds after which a client that sends no further request, or does not read "
        "its answer, is disconnected",
        at_least=0.001,
    )
    grace_seconds: float = setting(2.0, GRACE)

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
    for item in fields(kind):
        group.add_argument(
            flag_name(item.name),
            type=type(item.default),
            default=item.default,
            metavar="N",
            help=f"{rules_of(item).description} (default {item.default})",
        )


def read_flags(options: argparse.Namespace, kind: type[LimitsType]) -> LimitsType:
    """Returns the limits from the flags of `add_flags`. Raises UserError as `check` does."""
    limits = kind(**{item.name: getattr(options, item.name) for item in fields(kind)})
    limits.check()
    return limits
