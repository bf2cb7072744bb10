"""The limits of `jzero serve` on the sizes and counts of requests, each a flag of the command."""

from jzero.errors import UserError
from jzero.fields import (
    Field,
    record,
)
from jzero.servers.limits import ConnectionLimits


@record
class Limits(ConnectionLimits):
    """The limits of the HTTP server."""

    max_body_bytes: int = Field(default=1 << 20, ge=1)
    """bytes of the body of one request"""
    max_request_sequences: int = Field(default=256, ge=1)
    """prompts times n of one request"""
    max_request_logprobs: int = Field(default=1 << 18, ge=1)
    """log-probabilities of one reply that are of the prompt or of alternatives: tokens times 1 +
    alternatives"""
    max_waiting_sequences: int = Field(default=2048, ge=1)
    """sequences of all requests that wait for a slot"""
    # Longer than for other servers, because answers take longer.
    grace_seconds: float = 30.0
    """seconds that requests may run on after Ctrl-C or TERM; a second Ctrl-C ends them at once"""

    def check(self) -> None:
        """Raises UserError if a limit is too small, not a number, or excludes another one."""
        super().check()
        # A request with the maximum number of sequences must be able to wait.
        if self.max_waiting_sequences < self.max_request_sequences:
            raise UserError(
                f"--max-waiting-sequences={self.max_waiting_sequences}: a request may have "
                f"{self.max_request_sequences} sequences and could never wait: raise this limit, "
                "or lower --max-request-sequences"
            )
