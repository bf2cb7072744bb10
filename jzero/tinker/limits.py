"""The limits of the Tinker server on sizes, counts and waiting times, each a flag.

With a file of keys, every key has an equal share of the limits on counts and bytes (`shares.py`).
"""

from dataclasses import dataclass, field

from jzero.servers.limits import ServerLimits


@dataclass(frozen=True)
class TinkerLimits(ServerLimits):
    """The limits of the Tinker server."""

    max_body_bytes: int = field(
        default=16 << 20, metadata={"least": 1, "help": "bytes of a body, before and after gzip"}
    )
    max_datums: int = field(
        default=1024, metadata={"least": 1, "help": "datums of one forward_backward call"}
    )
    max_targets: int = field(
        default=32,
        metadata={
            "least": 1,
            "help": "targets of one position (K of [N, K]), and prompt_alt_tokens_k",
        },
    )
    max_waiting_sequences: int = field(
        default=4096, metadata={"least": 1, "help": "samples that wait for a slot"}
    )
    max_samples: int = field(default=256, metadata={"least": 1, "help": "num_samples of a request"})
    max_sessions: int = field(default=64, metadata={"least": 1, "help": "open sessions"})
    max_samplers: int = field(
        default=4096,
        metadata={"least": 1, "help": "sampling sessions; beyond it a key's oldest one is dropped"},
    )
    max_requests: int = field(
        default=2048, metadata={"least": 1, "help": "requests that are answered at a time"}
    )
    max_held_bytes: int = field(
        default=1 << 30,
        metadata={"least": 1, "help": "bytes of bodies that are read, and of queued commands"},
    )
    max_snapshots: int = field(
        default=256,
        metadata={"least": 1, "help": "snapshots of weights for sampling, on device or host"},
    )
    resident_snapshots: int = field(
        default=8,
        metadata={
            "least": 1,
            "help": "snapshots of one rank that are sampled at a time; others are on the host",
        },
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
