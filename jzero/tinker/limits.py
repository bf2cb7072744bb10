"""The limits of the Tinker server on sizes, counts and waiting times, each a flag."""

import argparse
import math
from dataclasses import dataclass, field, fields

from jzero.errors import UserError


@dataclass(frozen=True)
class TinkerLimits:
    """The limits of the server. A field's metadata is as in `serving.limits.Limits`."""

    max_body_bytes: int = field(
        default=16 << 20, metadata={"least": 1, "help": "bytes of a body, before and after gzip"}
    )
    max_datums: int = field(
        default=1024, metadata={"least": 1, "help": "datums of one forward_backward call"}
    )
    max_targets: int = field(
        default=32, metadata={"least": 1, "help": "targets of one position (K of [N, K])"}
    )
    max_waiting_sequences: int = field(
        default=4096, metadata={"least": 1, "help": "samples that wait for a slot"}
    )
    max_samples: int = field(default=256, metadata={"least": 1, "help": "num_samples of a request"})
    max_sessions: int = field(default=64, metadata={"least": 1, "help": "open sessions"})
    max_snapshots: int = field(
        default=256,
        metadata={"least": 1, "help": "snapshots of weights for sampling, on device or host"},
    )
    resident_snapshots: int = field(
        default=8, metadata={"least": 1, "help": "snapshots on the device; others are on the host"}
    )
    max_futures: int = field(
        default=20_000, metadata={"least": 1, "help": "promises whose results are kept"}
    )
    max_result_bytes: int = field(
        default=1 << 30, metadata={"least": 1, "help": "bytes of all kept results"}
    )
    max_pending_commands: int = field(
        default=1024, metadata={"least": 1, "help": "commands of one model that are not done"}
    )
    poll_seconds: float = field(
        default=30.0, metadata={"least": 0.001, "help": "seconds for which a poll is held"}
    )
    hole_seconds: float = field(
        default=60.0,
        metadata={"least": 0.001, "help": "seconds to wait for a command that never arrives"},
    )
    result_seconds: float = field(
        default=3600.0, metadata={"least": 0.001, "help": "seconds for which results are kept"}
    )
    session_seconds: float = field(
        default=300.0,
        metadata={"least": 0.001, "help": "seconds without a heartbeat that end a session"},
    )

    def check(self) -> None:
        """Raises UserError if a limit is too small or not a number."""
        for item in fields(self):
            value, least = getattr(self, item.name), item.metadata["least"]
            # argparse accepts nan and inf as floats.
            if not (math.isfinite(value) and value >= least):
                raise UserError(f"{flag_name(item.name)}={value}: give a number from {least} on")


def flag_name(limit: str) -> str:
    """Returns the flag of a limit, such as --max-body-bytes."""
    return "--" + limit.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every limit. `--help` prints its meaning and its default."""
    group = parser.add_argument_group("limits of the server")
    for item in fields(TinkerLimits):
        group.add_argument(
            flag_name(item.name),
            type=type(item.default),
            default=item.default,
            metavar="N",
            help=f"{item.metadata['help']} (default {item.default})",
        )


def read_flags(options: argparse.Namespace) -> TinkerLimits:
    """Returns the limits from the flags of `add_flags`. Raises UserError as `check` does."""
    limits = TinkerLimits(
        **{item.name: getattr(options, item.name) for item in fields(TinkerLimits)}
    )
    limits.check()
    return limits
