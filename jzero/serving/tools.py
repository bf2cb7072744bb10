"""Tools of a chat: the schemas of a request, and the calls in an answer.

The chat template shows the tools to the model, and the calls are read in the form of Qwen's and
Hermes' templates, which stands in a <tool_call> block (`environments.tools.parsing`). A call of an
unknown tool, or with arguments that do not match the schema, stays in the text of the answer.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from jzero.environments.tools.parsing import BEGIN, BadCall, parse_calls, syntax_of
from jzero.environments.tools.schemas import Schema
from jzero.errors import UserError, shown
from jzero.json_values import as_object

MAX_TOOLS = 128  # of a request, as in OpenAI's API
MAX_CALLS = 256  # of a message

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class ToolFunction(BaseModel, strict=True, extra="forbid"):
    """The function of a tool."""

    name: Name
    description: str = ""
    parameters: dict[str, object] = {}
    # Calls whose arguments do not match the schema are never returned as calls.
    strict: bool | None = None


class ToolSpec(BaseModel, strict=True, extra="forbid"):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction

    def to_schema(self) -> Schema:
        """Returns the schema that a chat template shows."""
        function = self.function
        fields = {
            "name": function.name,
            "description": function.description,
            "parameters": self.parameters(),
        }
        return {"type": "function", "function": fields}

    def parameters(self) -> Schema:
        """Returns the schema of the arguments. Raises UserError if it is no schema."""
        given = as_object(self.function.parameters)
        parameters: Schema = {"type": "object", "properties": {}, **given}
        properties = parameters["properties"]
        if not isinstance(properties, dict):
            raise UserError(f"tools: the properties of {self.function.name} are not an object")
        for name, schema in properties.items():
            if not isinstance(schema, dict):
                raise UserError(
                    f"tools: the schema of {self.function.name}'s {name[:60]} is not an object: "
                    f"{shown(schema)}"
                )
        return parameters


class CalledFunction(BaseModel, strict=True):
    """The function of a call in an earlier message."""

    name: str
    arguments: str

    def to_template(self) -> dict[str, object]:
        """Returns the call as chat templates take it, which write the arguments themselves."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise UserError(
                f"tool_calls: the arguments of {self.name[:60]} are not a JSON object: "
                f"{shown(self.arguments)}"
            )
        return {"name": self.name, "arguments": arguments}


class EarlierCall(BaseModel, strict=True):
    """A call in an earlier message of the assistant."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


Tools = Annotated[list[ToolSpec], Field(fail_fast=True, max_length=MAX_TOOLS)]
EarlierCalls = Annotated[list[EarlierCall], Field(fail_fast=True, max_length=MAX_CALLS)]


@dataclass(frozen=True)
class CallReader:
    """Reads the calls in the answers to a request."""

    syntax: str
    parameters: dict[str, Schema]  # by the name of the tool

    @classmethod
    def of(cls, tools: Sequence[ToolSpec], template: str) -> "CallReader":
        """Returns the reader for the tools of a request, in the form that the template shows."""
        parameters = {tool.function.name: tool.parameters() for tool in tools}
        return cls(syntax_of(template), parameters)

    def split(self, text: str) -> tuple[str, list[dict[str, object]]]:
        """Returns the text before the calls, and the calls in OpenAI's form.

        Without valid calls, or if one of several is not valid, all of it is text.
        """
        try:
            calls = parse_calls(text, self.syntax, self.parameters)
        except (KeyError, TypeError, AttributeError, RecursionError):
            return text, []  # a schema of the client's is none
        written: list[dict[str, object]] = []
        for call in calls:
            if isinstance(call, BadCall):
                return text, []
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            written.append({"id": call_id, "type": "function", "function": function})
        return (text[: self.content_end(text)] if written else text), written

    def content_end(self, text: str) -> int:
        """Returns where the text that is certainly no call ends: what a stream may send."""
        # Calls in thoughts are not read.
        thoughts = text.rfind("</think>") + 1
        if begin := text.find(BEGIN, thoughts) + 1:
            return len(text[: begin - 1].rstrip())
        # The text may end with a part of the tag.
        lengths = range(min(len(BEGIN) - 1, len(text)), 0, -1)
        part = next((length for length in lengths if text.endswith(BEGIN[:length])), 0)
        return len(text[: len(text) - part].rstrip())


def check_template(template: str, *, shows_tools: bool) -> None:
    """Raises UserError if a chat template shows no tools, or asks for calls in another form.

    shows_tools: whether the messages look different with tools. A template that ignores tools
        renders without an error.
    """
    if not shows_tools:
        raise UserError(
            "tools: the chat template of this model shows no tools, so it was not trained to call "
            "any: describe them in a message, and read the calls in the answer's text"
        )
    if BEGIN not in template:
        raise UserError(
            f"tools: the chat template of this model asks for calls without {BEGIN}, which is the "
            "form that this server reads (Qwen's and Hermes'): describe the tools in a message, "
            "and read the calls in the answer's text"
        )
