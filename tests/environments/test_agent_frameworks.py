"""Frameworks for agents, unmodified but for base_url: openai-agents and smolagents use their tools
through the endpoint, whose policy is a script. The packages are optional."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from jzero.environments.chat_endpoint import (
    MODEL,
    Answer,
    ChatEndpoint,
    Choice,
    Request,
    assistant_message,
)
from jzero.rollout.agents import digest, digests
from jzero.types import JsonValue

KEY = "key"


class Script:
    """A policy that calls each tool once and then answers; it knows what continues what."""

    def __init__(self, write: Callable[[Request], str]) -> None:
        self.write = write
        self.requests: list[Request] = []
        self.nodes: set[bytes] = set()  # histories that end with an answer
        self.num_continued = 0

    def respond(self, request: Request) -> Future[Answer]:
        before = digests(request)
        self.num_continued += any(one in self.nodes for one in before[1:-1])
        self.requests.append(request)
        prefix = f"call_{len(self.requests)}"
        message = assistant_message(self.write(request), request.tools, prefix)
        self.nodes.add(digest(before[-1], message))
        answer: Future[Answer] = Future()
        answer.set_result(Answer([Choice(message)], prompt_tokens=3, completion_tokens=2))
        return answer

    def take_reward(self, reward: JsonValue) -> None:
        raise NotImplementedError


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    endpoint = ChatEndpoint()
    yield endpoint
    endpoint.close()


def call(name: str, **arguments: JsonValue) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_openai_agents_calls_a_tool_and_continues(endpoint: ChatEndpoint) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")

    def write(request: Request) -> str:
        said = request.messages[-1]
        if said["role"] == "tool":
            return f"It is {said['content']}."
        return "I add. " + call("add", a=2, b=3)

    script = Script(write)
    endpoint.responders[KEY] = script

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    async def run() -> str:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=KEY) as client:
            model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
            agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[add])
            result = await agents.Runner.run(agent, "What is 2 + 3?", max_turns=4)
            return result.final_output

    assert asyncio.run(run()) == "It is 5."
    # The second request continues the first one: its answer came back as it was given.
    assert len(script.requests) == 2 and script.num_continued == 1
    assert [tool["function"]["name"] for tool in script.requests[0].tools] == ["add"]


def test_smolagents_calls_a_tool_and_ends(endpoint: ChatEndpoint) -> None:
    smolagents = pytest.importorskip("smolagents")

    def write(request: Request) -> str:
        text = json.dumps(request.messages[-1])
        if "5" in text and len(script.requests) > 1:
            return call("final_answer", answer="5")
        return call("add", a=2, b=3)

    script = Script(write)
    endpoint.responders[KEY] = script

    class Add(smolagents.Tool):
        name = "add"
        description = "Adds two numbers."
        inputs = {  # noqa: RUF012 (an attribute of the framework's classes)
            "a": {"type": "integer", "description": "the first number"},
            "b": {"type": "integer", "description": "the second number"},
        }
        output_type = "integer"

        def forward(self, a: int, b: int) -> int:
            return a + b

    model = smolagents.OpenAIServerModel(MODEL, api_base=endpoint.url, api_key=KEY)
    agent = smolagents.ToolCallingAgent([Add()], model, max_steps=4, verbosity_level=0)
    assert str(agent.run("What is 2 + 3?")) == "5"
    # smolagents writes the calls of its history as text: each step is a branch of the tree.
    assert len(script.requests) == 2
