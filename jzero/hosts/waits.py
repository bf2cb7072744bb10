"""How long hosts wait for each other, in seconds. Imports no jax: `--help` names the numbers."""

JOIN_SECONDS = 300.0  # limit for all processes to join: --join_seconds
SILENCE_SECONDS = 60.0  # a host without a sign of life for this long is lost: --silence_seconds
NOTICE_SECONDS = 10.0  # all hosts report a host without a sign of life for this long
