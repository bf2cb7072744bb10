"""The limits of `jzero serve` on the sizes and counts of requests, each a flag of the command."""

from dataclasses import dataclass

from jzero.errors import UserError
from jzero.servers.limits import GRACE, ConnectionLimits
from jzero.setting import setting


@dataclass(frozen=True)
class Limits(ConnectionLimits):
    """The limits of the HTTP server."""

    max_body_bytes: int = setting(1 << 20, "bytes of the body of one request", at_least=1)
    max_request_sequences: int = setting(256, "prompts times n of one request", at_least=1)
    max_request_logprobs: int = setting(
        1 << 18,
        "log-probabilities of one reply that are of the prompt or of alternatives: "
        "tokens times 1 + alternatives",
        at_least=1,
    )
    max_waiting_sequences: int = setting(
        2048, "sequences of all requests that wait for a slot", at_least=1
    )
    # Longer than for other servers, because answers take longer.
    grace_seconds: float = setting(30.0, GRACE)

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
