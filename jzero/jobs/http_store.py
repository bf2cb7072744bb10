"""The store of a trainer that serves it over HTTP (`store_server.py`), as a sampler sees it."""

import os
import urllib.parse
from collections.abc import Callable
from typing import TypeVar

from jzero.errors import UserError
from jzero.http import Client, Refused, RemoteError, WrongReply, parse_json
from jzero.jobs.store import BadFileError, StoreError
from jzero.jobs.store_server import KEY_VARIABLE
from jzero.json_values import as_list, as_text, bounded_number
from jzero.types import JsonValue

T = TypeVar("T")

SECONDS = 60.0  # of an exchange
SECONDS_OF_FILE = 600.0  # of one with the content of a file
MOST_BYTES = 1 << 36  # of a file: a snapshot of 32B parameters
MOST_REPLY_BYTES = 1 << 24  # of any other reply
LATEST = 1e11  # seconds of a time that a clock may have

NOT_FOUND, EXISTS = 404, 412
NO_RETRY = (401, 403)  # a wrong key stays wrong


class HttpStore:
    """A store behind the address of a trainer. See `store.Store`."""

    poll_seconds = 0.5

    def __init__(self, address: str) -> None:
        """Raises UserError if the address is wrong or the key is missing."""
        self.address = address
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise UserError(
                f"{address}: set {KEY_VARIABLE} to the trainer's key, which is in store.key of "
                "its workdir"
            )
        # `RetryingStore` repeats requests.
        self.client = Client(
            "--join", address, seconds=SECONDS, label=address, key=key, key_variable=KEY_VARIABLE
        )

    def _send(
        self,
        method: str,
        kind: str,
        name: str,
        content: bytes | None = None,
        max_bytes: int = MOST_REPLY_BYTES,
    ) -> bytes:
        """Sends a request for a name, and returns the bytes of the reply."""
        has_file = content is not None or max_bytes > MOST_REPLY_BYTES
        path = f"{kind}/{urllib.parse.quote(name)}"
        seconds = SECONDS_OF_FILE if has_file else SECONDS
        try:
            return self.client.send(method, path, content, max_bytes=max_bytes, seconds=seconds)
        except Refused as error:
            if error.status == NOT_FOUND:
                raise FileNotFoundError(name) from None
            if error.status == EXISTS:
                raise FileExistsError(name) from None
            if error.status in NO_RETRY:
                raise UserError(str(error)) from None
            raise StoreError(str(error)) from None
        except WrongReply as error:
            # The reply is too large, and stays so.
            if kind == "files":
                raise BadFileError(str(error)) from None
            raise StoreError(str(error)) from None
        except RemoteError as error:
            raise StoreError(str(error)) from None

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        return self._send("GET", "files", name, max_bytes=most_bytes or MOST_BYTES)

    def write(self, name: str, data: bytes) -> None:
        self._send("PUT", "files", name, data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._send("POST", "files", name, data)
        except FileExistsError:
            return False
        return True

    def names(self, folder: str) -> list[str]:
        def read_names(value: JsonValue) -> list[str]:
            return list(map(as_text, as_list(value)))

        return self._ask("names", folder, read_names)

    def delete(self, name: str) -> None:
        self._send("DELETE", "files", name)

    def modified(self, name: str) -> float:
        return self._ask("modified", name, as_seconds)

    def now(self, who: str) -> float:
        return self._ask("now", who, as_seconds)

    def _ask(self, kind: str, name: str, read: Callable[[JsonValue], T]) -> T:
        """Returns the result of `read` for a reply in JSON."""
        reply = self._send("GET", kind, name)
        try:
            return read(parse_json(reply))
        except ValueError as error:
            raise StoreError(f"{self.address} answers with a wrong reply ({error})") from None


def as_seconds(value: JsonValue) -> float:
    """Returns a time of a reply."""
    return bounded_number(value, 0, LATEST, "the time")
