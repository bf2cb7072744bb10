"""The limits of `jzero serve` on the sizes and counts of requests, each a flag of the command."""

from dataclasses import dataclass, field

from jzero.errors import UserError
from jzero.servers.limits import ConnectionLimits


@dataclass(frozen=True)
class Limits(ConnectionLimits):
    """The limits of the HTTP server."""

    max_body_bytes: int = field(
        default=1 << 20,
        metadata={"least": 1, "help": "bytes of the body of one request"},
    )
    max_request_sequences: int = field(
        default=256,
        metadata={"least": 1, "help": "prompts times n of one request"},
    )
    max_request_logprobs: int = field(
        default=1 << 18,
        metadata={
            "least": 1,
            "help": "log-probabilities of one reply that are of the prompt or of alternatives: "
            "tokens times 1 + alternatives",
        },
    )
    max_waiting_sequences: int = field(
        default=2048,
        metadata={"least": 1, "help": "sequences of all requests that wait for a slot"},
    )
    # Answers take longer here than those of other servers.
    grace_seconds: float = field(
        default=30.0, metadata=dict(ConnectionLimits.__dataclass_fields__["grace_seconds"].metadata)
    )

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
