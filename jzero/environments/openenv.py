"""Environments on an OpenEnv server. Only its WebSocket protocol is needed, not its package.

    task.environment=openenv:http://localhost:8000

An episode is a session of the server: one connection to URL/ws, with JSON in both directions.

    client  {"type": "reset", "data": {"seed": 1, ...the row}}    {"type": "step", "data": ACTION}
    server  {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}
            {"type": "error", "data": {"message": "...", "code": "..."}}
    client  {"type": "close"}

The schema of actions is at URL/schema. If an action has a single text field to fill, the response
becomes that text. Otherwise the response must be a JSON object. The policy reads an observation
with a single text field as that text, and any other observation as JSON. A subclass may change
both:

    class Wordle(OpenEnv):
        url = "http://localhost:8000"

        def action(self, response):
            return {"guess": response.strip()[-5:]}

        def text(self, observation):
            return f"{observation['hints']}, {observation['left']} left"

    task.environment=wordle.py:Wordle task.environment_mode=asyncio

Source: github.com/huggingface/OpenEnv, openenv-core 0.3, core/env_server/http_server.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, TypeVar, cast

from jzero import http, json_values
from jzero.errors import UserError, shown
from jzero.json_values import as_list, as_object, as_text
from jzero.types import JsonValue

if TYPE_CHECKING:
    from jzero.websocket import Session

T = TypeVar("T")

PREFIX = "openenv:"
SCHEMES = ("http", "https", "ws", "wss")
SCHEMA_SECONDS = 30.0  # for the whole exchange
SCHEMA_RETRIES = 2
MAX_SCHEMA_BYTES = 1 << 20
REWARDS = (-3e38, 3e38)  # the range of a reward, which becomes a float32
MAX_ERROR_LETTERS = 2000  # of an error that the policy reads
# Fields that every action and observation has (types.py of openenv-core).
_COMMON_FIELDS = ("metadata", "done", "reward")
_TRANSIENT = ("CAPACITY_REACHED", "SESSION_ERROR")  # errors that a retry may avoid


class OpenEnvError(http.RemoteError):
    """The server reported an error, or sent a malformed reply."""


class OpenEnv:
    """A session of an OpenEnv server, with the methods of a user-defined class."""

    url = ""
    max_message_bytes = 4 << 20  # of one reply; a longer reply fails the episode

    def __init__(self, url: str = "") -> None:
        self.url = (url or self.url).rstrip("/")
        self._session: Session | None = None

    # Methods that a subclass may override.

    def action(self, response: str) -> JsonValue:
        """Converts a response to an action; `step` rejects any action that is not a dict."""
        field = text_field(action_schema(self.url))
        if field is not None:
            return {field: response}
        try:
            action = json.loads(response)
        except ValueError:
            action = None
        return action

    def text(self, observation: dict[str, JsonValue]) -> str:
        """Converts an observation to the text that the policy reads."""
        shown = {name: value for name, value in observation.items() if name not in _COMMON_FIELDS}
        if len(shown) == 1:
            [value] = shown.values()
            if isinstance(value, str):
                return value
        return json.dumps(shown, ensure_ascii=False)

    # The interface of environments.

    async def reset(self, row: dict[str, JsonValue], seed: int) -> str:
        """Opens a session. The server reads the parameters of its `reset` from the row and seed."""
        # Grader processes import this module, but only the process of the run opens sessions.
        from jzero.websocket import Session

        if self._session is None:
            address = session_url(self.url)
            self._session = await Session.open(address, self.max_message_bytes)
        # A column named seed takes precedence over the run's seed.
        result = await self._ask({"type": "reset", "data": {"seed": seed, **row}})
        return self.text(_member(result, "observation", dict))

    async def step(self, response: str) -> tuple[str, float, bool]:
        """Takes a step. If the action is invalid, the policy reads the server's error."""
        # `action` reads the schema without await, so it must be cached first.
        await fetch_schema(self.url)
        action = self.action(response)
        if not isinstance(action, dict):
            # The episode continues: the policy can learn the form of an action from the error.
            return f"error: the action has to be a JSON object, {fields_of(self.url)}", 0.0, False
        try:
            result = await self._ask({"type": "step", "data": action})
        except InvalidAction as error:
            return f"error: {error}", 0.0, False
        text = self.text(_member(result, "observation", dict))
        return text, read_reward(result.get("reward")), _member(result, "done", bool, False)

    async def close(self) -> None:
        """Ends the session, within `websocket.CLOSE_SECONDS`."""
        if self._session is not None:
            # Cleared first, so that a close that fails leaves no dead session.
            session, self._session = self._session, None
            await session.close({"type": "close"})

    async def _ask(self, message: JsonValue) -> dict[str, JsonValue]:
        """Sends a message, and returns the data of the reply.

        Raises:
            InvalidAction: the server rejects the action.
            OpenEnvError: the server reports an error, or sends a malformed reply.
            ConnectionError: the connection ended, or the server is at its limit: a retry may help.
        """
        assert self._session is not None, "reset opens the session"
        try:
            answer = await self._session.ask(message)
        except ValueError as error:
            raise OpenEnvError(f"{self.url} sent a wrong message: {error}") from None
        data = _member(answer, "data", dict)
        kind = _member(answer, "type", str)
        if kind == "observation":
            return data
        if kind != "error":
            raise OpenEnvError(f"{self.url} sent a message of type {shown(kind)}")
        # The policy reads errors of validation and can correct its action. Transient errors are
        # worth a retry. Any other error fails the episode.
        code, text = _member(data, "code", str, ""), _member(data, "message", str, "")
        if code == "VALIDATION_ERROR":
            raise InvalidAction(describe_errors(data.get("errors")) or in_one_line(text))
        if code in _TRANSIENT:
            raise ConnectionError(f"{in_one_line(text)} ({code})")
        raise OpenEnvError(f"{in_one_line(text)} ({in_one_line(code)})")


class InvalidAction(OpenEnvError):
    """The server rejected an action."""


def session_url(url: str) -> str:
    """Returns the WebSocket address of the server."""
    scheme, rest = url.split("://", 1)
    return f"{'wss' if scheme in ('https', 'wss') else 'ws'}://{rest}/ws"


_NO_DEFAULT = object()


def _member(value: JsonValue, name: str, kind: type[T], default: object = _NO_DEFAULT) -> T:
    """Returns a field of a message. Raises OpenEnvError if it is missing or has another type."""
    try:
        if default is _NO_DEFAULT:
            return json_values.member(value, (name,), kind)
        return json_values.optional_member(value, (name,), kind, cast(T, default))
    except ValueError as error:
        raise OpenEnvError(f"a message of the server is wrong: {error}") from None


def read_reward(value: JsonValue) -> float:
    """Returns the reward of a step; null is 0. Raises OpenEnvError for other non-numbers."""
    if value is None:
        return 0.0
    try:
        # A boolean reward counts as 0 or 1.
        number = float(value) if isinstance(value, bool) else value
        return json_values.bounded_number(number, *REWARDS, "reward")
    except ValueError as error:
        raise OpenEnvError(f"a message of the server is wrong: {error}") from None


def in_one_line(text: str) -> str:
    """Returns a server's text as one printable line of limited length, for error messages."""
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_ERROR_LETTERS]


def describe_errors(errors: JsonValue) -> str:
    """Formats the validation errors that pydantic reports on the server."""
    if not isinstance(errors, list):
        return ""
    reasons = []
    for error in errors:
        place = error.get("loc", []) if isinstance(error, dict) else []
        message = error.get("msg", "") if isinstance(error, dict) else ""
        if isinstance(place, list) and isinstance(message, str):
            reasons.append(f"{'.'.join(map(str, place))}: {message}")
    return in_one_line("; ".join(reasons))


# The schema of actions.

_SCHEMAS: dict[str, dict[str, JsonValue]] = {}  # by the server's address


def action_schema(url: str, seconds: float = SCHEMA_SECONDS) -> dict[str, JsonValue]:
    """Returns the JSON schema of the server's actions. `seconds` limits one exchange.

    Raises:
        UserError: the server does not answer, or has no schema.
    """
    if url not in _SCHEMAS:
        scheme, rest = url.split("://", 1)
        address = f"{'https' if scheme in ('https', 'wss') else 'http'}://{rest}"
        client = http.Client(
            "task.environment",
            address,
            label=f"task.environment={PREFIX}{url}",
            seconds=seconds,
            retries=SCHEMA_RETRIES,
            max_bytes=MAX_SCHEMA_BYTES,
        )
        try:
            _SCHEMAS[url] = client.ask("schema", None, read_schema)
        except http.RemoteError as error:
            raise UserError(
                f"{error}: {address}/schema gives no schema of actions; start the server, or mend "
                "the address"
            ) from None
    return _SCHEMAS[url]


async def fetch_schema(url: str) -> None:
    """Caches the schema of actions for all episodes, without blocking the event loop."""
    if url not in _SCHEMAS:
        await asyncio.to_thread(action_schema, url)


def read_schema(reply: JsonValue) -> dict[str, JsonValue]:
    """Returns the schema of actions. Raises ValueError if a part that jzero reads is malformed."""
    schema = json_values.member(reply, ("action",), dict)
    properties = json_values.optional_member(schema, ("properties",), dict, {})
    for name in properties:
        json_values.optional_member(properties, (name, "type"), str, "")
    for name in json_values.optional_member(schema, ("required",), list, []):
        if not isinstance(name, str) or name not in properties:
            raise ValueError(f"action.required names {shown(name)}, which is not a property")
    return schema


def text_field(schema: dict[str, JsonValue]) -> str | None:
    """Returns the text field of an action with a single field to fill; None for other actions."""
    # Required fields decide. An action without required fields needs a single field in total.
    properties = as_object(schema.get("properties", {}))
    fields = [name for name in properties if name not in _COMMON_FIELDS]
    required = [as_text(name) for name in as_list(schema.get("required", [])) if name in fields]
    candidates = required or fields
    if len(candidates) == 1 and as_object(properties[candidates[0]]).get("type") == "string":
        return candidates[0]
    return None


def fields_of(url: str) -> str:
    """Returns the names of an action's fields, as the end of an error message."""
    properties = as_object(action_schema(url).get("properties", {}))
    names = [name for name in properties if name not in _COMMON_FIELDS]
    return f"with {', '.join(names)}"


def check_url(url: str) -> None:
    """Raises UserError if `url` is not an address, or has no OpenEnv server."""
    http.check_url(f"task.environment={PREFIX}URL, and URL", url, SCHEMES)
    action_schema(url.rstrip("/"))
