"""The store of a trainer that serves it over HTTP (`store_server.py`), as a sampler sees it."""

import json
import os
import urllib.parse

from jzero.errors import UserError
from jzero.http import Client, Refused, RemoteError
from jzero.jobs.store import StoreError
from jzero.jobs.store_server import KEY_VARIABLE

SECONDS = 60.0  # of an exchange
SECONDS_OF_FILE = 600.0  # of one with the content of a file
MOST_BYTES = 1 << 36  # of a file: a snapshot of 32B parameters
MOST_NAMES_BYTES = 1 << 24

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
        self, method: str, path: str, content: bytes | None = None, most: int = MOST_NAMES_BYTES
    ) -> bytes:
        seconds = SECONDS if most <= MOST_NAMES_BYTES and content is None else SECONDS_OF_FILE
        kind, _, name = path.partition("/")
        try:
            return self.client.send(
                method,
                f"{kind}/{urllib.parse.quote(name)}",
                content,
                max_bytes=most,
                seconds=seconds,
            )
        except Refused as error:
            if error.status == NOT_FOUND:
                raise FileNotFoundError(path) from None
            if error.status == EXISTS:
                raise FileExistsError(path) from None
            if error.status in NO_RETRY:
                raise UserError(str(error)) from None
            raise StoreError(str(error)) from None
        except RemoteError as error:
            raise StoreError(str(error)) from None

    def read(self, name: str) -> bytes:
        return self._send("GET", f"files/{name}", most=MOST_BYTES)

    def write(self, name: str, data: bytes) -> None:
        self._send("PUT", f"files/{name}", data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._send("POST", f"files/{name}", data)
        except FileExistsError:
            return False
        return True

    def names(self, folder: str) -> list[str]:
        found = json.loads(self._send("GET", f"names/{folder}"))
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise StoreError(f"{self.address}: {folder} is no list of names")
        return found

    def delete(self, name: str) -> None:
        self._send("DELETE", f"files/{name}")

    def modified(self, name: str) -> float:
        return self._seconds(f"modified/{name}")

    def now(self, who: str) -> float:
        return self._seconds(f"now/{who}")

    def _seconds(self, path: str) -> float:
        text = self._send("GET", path)
        try:
            return float(text)
        except ValueError:
            raise StoreError(f"{self.address}/{path} is no time") from None
