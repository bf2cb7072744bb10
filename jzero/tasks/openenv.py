"""Environments behind an OpenEnv server, by its WebSocket protocol; the package is not needed.

    task.environment=openenv:http://localhost:8000

An episode is a session of the server: one connection to URL/ws, over which JSON goes both ways.

    we    {"type": "reset", "data": {"seed": 1, ...the row}}    {"type": "step", "data": ACTION}
    it    {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}
          {"type": "error", "data": {"message": "...", "code": "..."}}
    we    {"type": "close"}

What an action is made of, the server says at URL/schema. A response becomes the one text of an
action that has no other field to fill, or it has to be a JSON object. An observation of one text
is that text, and of more fields their JSON. A subclass says it in another way:

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
import contextlib
import json
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from jzero.errors import UserError
from jzero.tasks.websocket import WebSocket, connect
from jzero.types import JsonValue

PREFIX = "openenv:"
SCHEMA_SECONDS = 30.0
# Fields that every action and observation has (types.py of openenv-core).
_COMMON_FIELDS = ("metadata", "done", "reward")
_TRANSIENT = ("CAPACITY_REACHED", "SESSION_ERROR")  # a second try may go better


class OpenEnvError(RuntimeError):
    """The server has answered with an error."""


class OpenEnv:
    """A session of an OpenEnv server as an environment (`environment.Environment`)."""

    url = ""

    def __init__(self, url: str = "") -> None:
        self.url = (url or self.url).rstrip("/")
        self._socket: WebSocket | None = None

    # What a subclass may change.

    def action(self, response: str) -> JsonValue:
        """Returns the action that a response stands for."""
        field = text_field(action_schema(self.url))
        if field is not None:
            return {field: response}
        try:
            action = json.loads(response)
        except ValueError:
            action = None
        return action

    def text(self, observation: JsonValue) -> str:
        """Returns what the policy reads of an observation."""
        shown = {name: value for name, value in observation.items() if name not in _COMMON_FIELDS}
        if len(shown) == 1:
            [value] = shown.values()
            if isinstance(value, str):
                return value
        return json.dumps(shown, ensure_ascii=False)

    # What an environment does.

    async def reset(self, row: dict[str, JsonValue], seed: int) -> str:
        """Opens a session. The server takes of the row and the seed what its `reset` knows."""
        if self._socket is None:
            self._socket = await connect(session_url(self.url))
        result = await self._ask({"type": "reset", "data": {"seed": seed, **row}})
        return self.text(result["observation"])

    async def step(self, response: str) -> tuple[str, float, bool]:
        """Takes a step. A response that stands for no action gets the server's error to read."""
        if self.url not in _SCHEMAS:  # fetched once for all episodes, in a thread that waits
            await asyncio.to_thread(action_schema, self.url)
        action = self.action(response)
        if not isinstance(action, dict):
            return f"error: the action has to be a JSON object, {fields_of(self.url)}", 0.0, False
        try:
            result = await self._ask({"type": "step", "data": action})
        except InvalidAction as error:
            return f"error: {error}", 0.0, False
        reward = result.get("reward")
        is_done = bool(result.get("done"))
        return self.text(result["observation"]), float(reward or 0.0), is_done

    async def close(self) -> None:
        """Ends the session."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the server may have gone
                await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()
            self._socket = None

    async def _ask(self, message: JsonValue) -> JsonValue:
        """Sends a message, and returns the data of the answer."""
        assert self._socket is not None, "reset opens the session"
        await self._socket.send(json.dumps(message))
        answer = json.loads(await self._socket.receive())
        data = answer.get("data", {})
        if answer.get("type") != "error":
            return data
        code, text = data.get("code", ""), data.get("message", "")
        if code == "VALIDATION_ERROR":
            raise InvalidAction(describe_errors(data.get("errors")) or text)
        if code in _TRANSIENT:
            raise ConnectionError(f"{text} ({code})")
        raise OpenEnvError(f"{text} ({code})")


class InvalidAction(OpenEnvError):
    """The server knows no such action."""


def session_url(url: str) -> str:
    """Returns the address of the server's sessions."""
    scheme, rest = url.split("://", 1)
    return f"{'wss' if scheme in ('https', 'wss') else 'ws'}://{rest}/ws"


def describe_errors(errors: JsonValue) -> str:
    """Returns what pydantic, on the server, has against an action."""
    if not isinstance(errors, list):
        return ""
    return "; ".join(
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg', '')}" for error in errors
    )


# The schema of actions.

_SCHEMAS: dict[str, JsonValue] = {}  # by the server's address


def action_schema(url: str) -> JsonValue:
    """Returns the JSON schema of the server's actions.

    Raises:
        UserError: the server does not say.
    """
    if url not in _SCHEMAS:
        scheme, rest = url.split("://", 1)
        address = f"{'https' if scheme in ('https', 'wss') else 'http'}://{rest}/schema"
        try:
            with urllib.request.urlopen(address, timeout=SCHEMA_SECONDS) as answer:
                _SCHEMAS[url] = json.load(answer)["action"]
        except (OSError, ValueError, KeyError, TypeError, urllib.error.URLError) as error:
            raise UserError(
                f"task.environment={PREFIX}{url}: {address} gives no schema of actions "
                f"({type(error).__name__}: {error}); start the server, or mend the address"
            ) from None
    return _SCHEMAS[url]


def text_field(schema: JsonValue) -> str | None:
    """Returns the field of an action that is one text, None where an action has other fields."""
    properties = schema.get("properties", {})
    fields = [name for name in properties if name not in _COMMON_FIELDS]
    required = [name for name in schema.get("required", ()) if name in fields]
    candidates = required or fields
    if len(candidates) == 1 and properties[candidates[0]].get("type") == "string":
        return candidates[0]
    return None


def fields_of(url: str) -> str:
    """Returns the fields of an action, for people and policies."""
    properties = action_schema(url).get("properties", {})
    names = [name for name in properties if name not in _COMMON_FIELDS]
    return f"with {', '.join(names)}"


def check_url(url: str) -> None:
    """Raises UserError if `url` is no address, or no OpenEnv server answers there."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise UserError(
            f"task.environment={PREFIX}{url} has no address of a server: write "
            f"{PREFIX}http://HOST:PORT"
        )
    action_schema(url.rstrip("/"))
