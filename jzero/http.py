"""HTTP client for all remote servers: judge, teacher, remote sandbox, OpenEnv, generate, metadata.

    client = Client("teacher.url", "http://localhost:8000/v1", seconds=120.0, retries=4, key=key)
    text = client.ask("completions", body, read=read_text)      # POST; body=None sends a GET
    client.close()                                              # cancels the requests in flight

`jzero.websocket` is the counterpart for WebSocket sessions.

Every server is treated as hostile:

- One deadline covers the whole exchange: DNS lookup, connecting, writing, headers, body.
- Replies are bounded while they are read: bytes, headers, JSON nesting, containers, digits.
- `read` checks the shape of the reply. A wrong shape raises a one-line error with the URL.
- Redirects are refused, so that an API key is sent only to the configured server.
- Transient failures are retried after growing, random pauses. `Retry-After` is obeyed up to
  LONGEST_PAUSE. All tries together take (retries + 1) * (seconds + LONGEST_PAUSE) at most.
- API keys are removed from everything that a server sends, so no message and no file contains one.

TLS certificates are verified. HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY configure proxies.
`Client` may be used from any thread, and from an event loop with `asyncio.to_thread`. All network
I/O of a process runs in one dedicated thread. httpx is imported on first use, because most grader
processes do not need it.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import os
import random
import re
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar
from urllib.parse import urlsplit

from jzero import json_values
from jzero.errors import UserError, causes, reason_of, shown
from jzero.json_types import JsonValue

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

FIRST_PAUSE = 1.0  # maximum seconds between the first two tries
LONGEST_PAUSE = 60.0  # maximum seconds between any two tries
GRACE_SECONDS = 5.0  # after the deadline, for the network thread
MAX_REPLY_BYTES = 4 << 20
MAX_ERROR_BYTES = 64 << 10  # of an error reply; the key is removed before the text is shortened
SHOWN_BYTES = 300  # of an error reply in an error message
PARTS_AT_ONCE = 64  # chunks of a reply that are read before other exchanges get their turn
HIDDEN_KEY = "[API key]"

# Time-out, conflict, too early, too many requests: the same request may succeed later.
_TRANSIENT_STATUSES = (408, 409, 425, 429)  # besides all statuses >= 500
_KEY = re.compile(r"[\x21-\x7e]+")


class RemoteError(Exception):
    """A request to a server failed. The message is one line."""


class NoAnswer(RemoteError):
    """All tries failed with transient errors."""


class Refused(RemoteError):
    """The server refused the request, or redirected it."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # HTTP status; 0 if there was no reply


class WrongReply(RemoteError):
    """The reply is too long, is not JSON, or does not have the expected shape."""


class Closed(RemoteError):
    """`Client.close` was called while the request was in flight."""


class TryAgain(Exception):
    """A transient failure. `read` may raise it to request the reply again."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause  # minimum seconds before the next try


# -- JSON ------------------------------------------------------------------------------------------


def parse_json(content: bytes, key: str = "") -> JsonValue:
    """Parses untrusted JSON. Lone surrogates become U+FFFD, and `key` becomes HIDDEN_KEY.

    Raises:
        ValueError: the content is not UTF-8, or `json_values.parse` refuses it.
    """
    text = content.decode("utf-8")
    value = json_values.parse(text)
    # Without an escape sequence there are no lone surrogates, and the key can only occur verbatim.
    return _clean(value, key) if "\\" in text or (key and key in text) else value


def _clean(value: JsonValue, key: str) -> JsonValue:
    if isinstance(value, str):
        return _clean_text(value, key)
    if isinstance(value, list):
        return [_clean(item, key) for item in value]
    if isinstance(value, dict):
        return {_clean_text(name, key): _clean(item, key) for name, item in value.items()}
    return value


def _clean_text(value: str, key: str) -> str:
    # UTF-16 joins surrogate pairs to characters. Only lone surrogates are replaced.
    text = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace(key, HIDDEN_KEY) if key else text


# -- The network I/O of a process ------------------------------------------------------------------


class _Limits(NamedTuple):
    """Limits of one exchange."""

    max_bytes: int
    seconds: float


class _Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes
    is_complete: bool  # False: the body was cut at the limit


class _Network:
    """The thread for all network I/O of this process. It starts with the first request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Runs a coroutine in the network thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                run = self._loop.run_forever
                threading.Thread(target=run, name="jzero-http", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


_NETWORK = _Network()
os.register_at_fork(after_in_child=_NETWORK.__init__)  # a fork does not copy the thread


@functools.cache
def _tls() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()


async def _exchange(request: httpx.Request, limits: _Limits, use_proxies: bool) -> _Reply:
    """Sends one request over a new connection and returns the bytes of the reply.

    Raises:
        TimeoutError: the exchange took longer than `limits.seconds`.
        httpx.HTTPError, OSError: the connection or the HTTP protocol failed.
    """
    import httpx

    # A new client for each exchange, so that no cookie or connection is reused.
    async with (
        asyncio.timeout(limits.seconds),
        httpx.AsyncClient(
            verify=_tls(), timeout=None, follow_redirects=False, trust_env=use_proxies
        ) as client,
    ):
        reply = await client.send(request, stream=True)
        try:
            limit = limits.max_bytes if reply.status_code == httpx.codes.OK else MAX_ERROR_BYTES
            content = bytearray()
            num_parts = 0
            # Raw bytes: nothing is decompressed, so the limit holds.
            async for part in reply.aiter_raw():
                content += part
                if len(content) > limit:
                    break
                num_parts += 1
                # Many tiny chunks must not block other exchanges.
                if num_parts % PARTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            await reply.aclose()
    is_complete = len(content) <= limit
    return _Reply(reply.status_code, reply.headers, bytes(content[:limit]), is_complete)


# -- The client ------------------------------------------------------------------------------------


def bears_key(authorization: str, key: bytes) -> bool:
    """Returns whether an Authorization header carries a key, as `Client` sends it.

    Servers of this package call it. The comparison takes the same time for every wrong key.
    """
    scheme, _, sent = authorization.partition(" ")
    is_right = hmac.compare_digest(sent.strip().encode(), key)
    return scheme.lower() == "bearer" and is_right


def check_url(setting: str, url: str, schemes: tuple[str, ...] = ("http", "https")) -> None:
    """Raises UserError unless `url` is the address of a server without user name and password.

    Credentials are refused because addresses appear in messages and files.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
        is_valid &= bool(_KEY.fullmatch(url)) and not parts.query and not parts.fragment
        has_credentials = parts.username is not None or parts.password is not None
    except ValueError:  # an invalid port, or brackets without an IPv6 address
        is_valid, has_credentials = False, "@" in url
    if has_credentials:
        raise UserError(
            f"{setting} holds a user name or a password: remove them from the address, and give "
            "the key in an environment variable"
        )
    if not is_valid:
        address = shown(url) if url else ""
        raise UserError(
            f"{setting}={address} is not a server address: use {schemes[0]}://HOST:PORT"
        )


class Client:
    """Sends requests to one server. Thread-safe."""

    def __init__(
        self,
        setting: str,
        url: str,
        *,
        seconds: float,
        retries: int = 0,
        label: str = "",
        key: str = "",
        key_variable: str = "",
        use_proxies: bool = True,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Checks the address and the key. Does not connect yet.

        Args:
            setting: The setting that holds `url`, for error messages.
            url: Address of the server.
            seconds: Time limit of one whole exchange.
            retries: Maximum retries of a request after transient failures.
            label: Prefix of error messages; "" for setting=url.
            key: The API key; "" sends none.
            key_variable: The environment variable of the key, for error messages.
            use_proxies: Whether the environment's proxies apply.
            max_bytes: Default limit of one reply.

        Raises:
            UserError: `url` is not an address, or `key` cannot be sent in a header.
        """
        check_url(setting, url)
        if key and not _KEY.fullmatch(key):
            raise UserError(
                f"the API key in {key_variable or 'the environment'} has a space, a line break or "
                "a letter outside of ASCII: set the variable to the key only"
            )
        self.label = label or f"{setting}={url}"
        self._url = url.rstrip("/")
        self._seconds = seconds
        self._tries = retries + 1
        self._key = key
        self._use_proxies = use_proxies
        self._max_bytes = max_bytes
        self._is_closed = threading.Event()
        self._in_flight: set[Future[_Reply]] = set()

    def ask(
        self,
        path: str,
        body: JsonValue | None,
        read: Callable[[JsonValue], T],
        *,
        max_bytes: int = 0,
        seconds: float = 0.0,
    ) -> T:
        """Sends a JSON request, with retries, and returns the result of `read` for the reply.

        Args:
            path: Path below the address of the server.
            body: The JSON to POST; None sends a GET.
            read: Extracts the result from the reply. It raises ValueError for a wrong shape, and
                TryAgain to retry the request.
            max_bytes: Limit of the reply; 0 for the client's default.
            seconds: Limit of one exchange; 0 for the client's default.

        Raises:
            NoAnswer, Refused, WrongReply, Closed: see these classes.
        """

        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}

        def parse(reply: _Reply) -> T:
            # A missing header is accepted.
            kind = reply.headers.get("Content-Type", "json")
            if "json" not in kind.lower():
                raise ValueError(f"Content-Type {self._shown(kind)} and not application/json")
            return read(parse_json(reply.content, self._key))

        return self._ask(path, content, parse, headers, max_bytes, seconds)

    def get_text(self, path: str, headers: Mapping[str, str]) -> str:
        """Sends a GET and returns the reply as UTF-8 text. Raises the same errors as `ask`."""

        def parse(reply: _Reply) -> str:
            return reply.content.decode()

        return self._ask(path, None, parse, headers)

    def send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        *,
        max_bytes: int = 0,
        seconds: float = 0.0,
    ) -> bytes:
        """Sends bytes, with retries, and returns the bytes of the reply.

        Raises the same errors as `ask`.
        """

        def parse(reply: _Reply) -> bytes:
            return reply.content

        return self._ask(path, content, parse, {}, max_bytes, seconds, method)

    def close(self) -> None:
        """Cancels the requests in flight. All further calls of `ask` raise Closed."""
        self._is_closed.set()
        # A copy, because the threads that wait for these futures change the set.
        for future in list(self._in_flight):
            future.cancel()

    def _ask(
        self,
        path: str,
        content: bytes | None,
        parse: Callable[[_Reply], T],
        headers: Mapping[str, str],
        max_bytes: int = 0,
        seconds: float = 0.0,
        method: str = "",
    ) -> T:
        method = method or ("GET" if content is None else "POST")
        limits = _Limits(max_bytes or self._max_bytes, seconds or self._seconds)
        reason = ""
        for number in range(self._tries):
            try:
                reply = self._send(method, path, content, headers, limits)
                return parse(reply)
            # A wrong reply is not retried, unless `read` raises TryAgain.
            except ValueError as error:
                what = self._shown(str(error))
                raise WrongReply(f"{self.label} answers with a wrong reply ({what})") from None
            except TryAgain as error:
                reason = self._shown(str(error))
                pause = max(error.pause, pause_after(number, FIRST_PAUSE))
            # `close` interrupts the pause.
            is_last = number + 1 == self._tries
            if not is_last and self._is_closed.wait(min(pause, LONGEST_PAUSE)):
                raise Closed(f"{self.label}: the run has ended")
        tries = "1 try" if self._tries == 1 else f"{self._tries} tries"
        raise NoAnswer(f"{self.label} has not answered in {tries} ({reason})")

    def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        limits: _Limits,
    ) -> _Reply:
        """Sends a request once and returns a reply with status 200; raises for others."""
        import httpx

        address = f"{self._url}/{path}"
        # Not compressed, so that the limit of bytes bounds the memory; closed, because no exchange
        # reuses a connection.
        sent = {"Accept": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
        if self._key:
            sent["Authorization"] = f"Bearer {self._key}"
        try:
            request = httpx.Request(method, address, headers=sent | dict(headers), content=content)
        except (httpx.InvalidURL, ValueError) as error:
            raise Refused(f"{self.label} is not a valid address ({reason_of(error)})") from None
        try:
            exchange = _exchange(request, limits, self._use_proxies)
            reply = self._wait(_NETWORK.start(exchange), limits.seconds)
        except TimeoutError:
            raise TryAgain(f"timed out after {limits.seconds:g} s") from None
        except (httpx.HTTPError, OSError, EOFError) as error:
            # A wrong certificate is not a transient failure.
            if _is_wrong_certificate(error):
                raise Refused(f"{self.label}: {self._shown(reason_of(error))}") from None
            raise TryAgain(_failure(error)) from None
        except (httpx.InvalidURL, UnicodeError) as error:  # a host name that no resolver accepts
            raise Refused(f"{self.label} is not a valid address ({reason_of(error)})") from None
        if reply.status != httpx.codes.OK:
            self._raise_for(reply)
        if not reply.is_complete:
            raise ValueError(f"longer than {limits.max_bytes} bytes")
        # A compressed reply would have to be decompressed without a limit.
        encoding = reply.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise ValueError(f"Content-Encoding {encoding}, which was not asked for")
        return reply

    def _wait(self, future: Future[_Reply], seconds: float) -> _Reply:
        """Waits for an exchange in the network thread."""
        self._in_flight.add(future)
        try:
            # Checked after the future is in the set: either `close` cancels it, or this line sees
            # the close.
            if self._is_closed.is_set():
                raise CancelledError
            return future.result(seconds + GRACE_SECONDS)
        except CancelledError:
            raise Closed(f"{self.label}: the run has ended") from None
        finally:
            future.cancel()  # has no effect on a finished exchange
            self._in_flight.discard(future)

    def _raise_for(self, reply: _Reply) -> NoReturn:
        """Raises TryAgain for a transient error status, and Refused for any other status."""
        text = self._shown(reply.content.decode(errors="replace"))
        reason = f"status {reply.status}: {text}" if text else f"status {reply.status}"
        if reply.status in _TRANSIENT_STATUSES or reply.status >= 500:
            raise TryAgain(reason, seconds_to_wait(reply.headers.get("Retry-After", "")))
        if 300 <= reply.status < 400:
            target = self._shown(reply.headers.get("Location", ""))
            raise Refused(
                f"{self.label} redirects to {target or 'nowhere'} (status {reply.status}), and "
                "redirects are not followed: give the address of the server itself",
                reply.status,
            )
        raise Refused(f"{self.label} refuses a request ({reason})", reply.status)

    def _shown(self, text: str) -> str:
        """Prepares text of a server for an error message: one printable line without the key."""
        # Hide the key before the text is cut, so that no part of the key remains.
        if self._key:
            text = text.replace(self._key, HIDDEN_KEY)
        line = " ".join(text.split())[:SHOWN_BYTES]
        return "".join(letter if letter.isprintable() else "?" for letter in line)


def pause_after(number: int, first_pause: float) -> float:
    """Returns the seconds to wait after the try `number`, which counts from 0.

    The pauses double from `first_pause` up to LONGEST_PAUSE, minus a jitter of up to half.
    """
    longest = min(first_pause * 2.0 ** min(number, 30), LONGEST_PAUSE)
    # The jitter spreads the retries of clients that failed together. It comes from the operating
    # system, so that the state of seeded generators does not change.
    return random.SystemRandom().uniform(0.5 * longest, longest)


def seconds_to_wait(retry_after: str) -> float:
    """Returns the seconds of a Retry-After header, LONGEST_PAUSE at most; 0 for other text."""
    # The header may also hold a date, which is ignored.
    is_number = retry_after.isascii() and retry_after.isdecimal() and len(retry_after) < 10
    return min(float(retry_after), LONGEST_PAUSE) if is_number else 0.0


def _is_wrong_certificate(error: BaseException) -> bool:
    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes(error))


def _failure(error: BaseException) -> str:
    """Returns the operating system's reason for a failed exchange, or the library's."""
    for cause in causes(error):
        if isinstance(cause, ssl.SSLError):
            return reason_of(cause)
        if isinstance(cause, OSError) and cause.errno:
            is_system = cause.errno > 0  # the resolver's errors are negative
            return os.strerror(cause.errno) if is_system else reason_of(cause)
    return reason_of(error)
