"""The API key of the HTTP server: its sources, and the check of a request's key."""

import os

from starlette.authentication import (
    AuthCredentials,
    AuthenticationBackend,
    AuthenticationError,
    BaseUser,
)
from starlette.requests import HTTPConnection

from jzero import http
from jzero.errors import UserError
from jzero.servers.connections import admit

KEY_VARIABLE = "JZERO_API_KEY"
OPEN_PATHS = ("/health",)  # answered without a key, for probes


def read_key(flag: str | None) -> str | None:
    """Returns the key of `--api-key` or of the environment; None if neither is given.

    Raises UserError if the key is empty or has a character that a header cannot carry.
    """
    source, key = "--api-key", flag
    if key is None:
        source, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
    if key is None:
        return None
    # An empty key would let everyone use the server.
    is_printable = all("!" <= character <= "~" for character in key)
    if not key or not is_printable:
        raise UserError(
            f"{source}: the key has to be printable ASCII characters without spaces, at least one. "
            "To serve without a key, remove it"
        )
    return key


class KeyCheck(AuthenticationBackend):
    """Checks the key of every request, before its body, under AuthenticationMiddleware."""

    def __init__(self, key: str) -> None:
        self.key = key.encode()

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        """Raises AuthenticationError for a request without the key, except on an open path."""
        # Not conn.url.path: in older versions of Starlette a hostile Host header could change it.
        if conn.scope["path"] in OPEN_PATHS:
            return None
        if not http.bears_key(conn.headers.get("authorization", ""), self.key):
            raise AuthenticationError(
                "this server requires its API key: send it as `Authorization: Bearer KEY`, "
                "which OpenAI's client does with api_key=KEY"
            )
        admit(conn.scope)
        return None
