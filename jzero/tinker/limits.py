"""The limits of the Tinker server on sizes, counts and waiting times, each a flag.

With a file of keys, every key has an equal share of the limits on counts and bytes (`shares.py`).
"""

from dataclasses import dataclass

from jzero.servers.limits import ServerLimits
from jzero.setting import setting


@dataclass(frozen=True)
class TinkerLimits(ServerLimits):
    """The limits of the Tinker server."""

    max_body_bytes: int = setting(16 << 20, "bytes of a body, before and after gzip", at_least=1)
    max_datums: int = setting(1024, "datums of one forward_backward call", at_least=1)
    max_targets: int = setting(
        32, "targets of one position (K of [N, K]), and prompt_alt_tokens_k", at_least=1
    )
    max_waiting_sequences: int = setting(4096, "samples that wait for a slot", at_least=1)
    max_samples: int = setting(256, "num_samples of a request", at_least=1)
    max_sessions: int = setting(64, "open sessions", at_least=1)
    max_samplers: int = setting(
        4096, "sampling sessions; beyond it a key's oldest one is dropped", at_least=1
    )
    max_requests: int = setting(2048, "requests that are answered at a time", at_least=1)
    max_held_bytes: int = setting(
        1 << 30, "bytes of bodies that are read, and of queued commands", at_least=1
    )
    max_snapshots: int = setting(
        256, "snapshots of weights for sampling, on device or host", at_least=1
    )
    resident_snapshots: int = setting(
        8, "snapshots of one rank that are sampled at a time; others are on the host", at_least=1
    )
    max_futures: int = setting(20_000, "promises whose results are kept", at_least=1)
    max_result_bytes: int = setting(1 << 30, "bytes of all kept results", at_least=1)
    max_pending_commands: int = setting(1024, "commands of one model that are not done", at_least=1)
    poll_seconds: float = setting(30.0, "seconds for which a poll is held", at_least=0.001)
    hole_seconds: float = setting(
        60.0, "seconds to wait for a command that never arrives", at_least=0.001
    )
    result_seconds: float = setting(3600.0, "seconds for which results are kept", at_least=0.001)
    session_seconds: float = setting(
        300.0, "seconds without a heartbeat that end a session", at_least=0.001
    )
