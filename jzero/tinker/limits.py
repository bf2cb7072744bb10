"""The limits of the Tinker server on sizes, counts and waiting times, each a flag.

With a file of keys, every key has an equal share of the limits on counts and bytes (`shares.py`).
"""

from jzero.fields import (
    Field,
    record,
)
from jzero.servers.limits import ServerLimits


@record
class TinkerLimits(ServerLimits):
    """The limits of the Tinker server."""

    max_body_bytes: int = Field(default=16 << 20, ge=1)
    """bytes of a body, before and after gzip"""
    max_datums: int = Field(default=1024, ge=1)
    """datums of one forward_backward call"""
    max_targets: int = Field(default=32, ge=1)
    """targets of one position (K of [N, K]), and prompt_alt_tokens_k"""
    max_waiting_sequences: int = Field(default=4096, ge=1)
    """samples that wait for a slot"""
    max_samples: int = Field(default=256, ge=1)
    """num_samples of a request"""
    max_sessions: int = Field(default=64, ge=1)
    """open sessions"""
    max_samplers: int = Field(default=4096, ge=1)
    """sampling sessions; beyond it a key's oldest one is dropped"""
    max_requests: int = Field(default=2048, ge=1)
    """requests that are answered at a time"""
    max_held_bytes: int = Field(default=1 << 30, ge=1)
    """bytes of bodies that are read, and of queued commands"""
    max_snapshots: int = Field(default=256, ge=1)
    """snapshots of weights for sampling, on device or host"""
    resident_snapshots: int = Field(default=8, ge=1)
    """snapshots of one rank that are sampled at a time; others are on the host"""
    max_futures: int = Field(default=20_000, ge=1)
    """promises whose results are kept"""
    max_result_bytes: int = Field(default=1 << 30, ge=1)
    """bytes of all kept results"""
    max_pending_commands: int = Field(default=1024, ge=1)
    """commands of one model that are not done"""
    poll_seconds: float = Field(default=30.0, ge=0.001)
    """seconds for which a poll is held"""
    hole_seconds: float = Field(default=60.0, ge=0.001)
    """seconds to wait for a command that never arrives"""
    result_seconds: float = Field(default=3600.0, ge=0.001)
    """seconds for which results are kept"""
    session_seconds: float = Field(default=300.0, ge=0.001)
    """seconds without a heartbeat that end a session"""
