"""The endpoint of environments that are programs: what goes over the wire, and who waits for whom.

The requests are those that the chat harness of verifiers 0.4.0 sends (its own client, recorded).
"""

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import httpx
import pytest

from jzero.environments import chat_endpoint
from jzero.environments.chat_endpoint import (
    Answer,
    ChatEndpoint,
    Choice,
    Conversation,
    Request,
    RequestError,
    assistant_message,
    completion,
    completion_events,
    new_messages,
    read_request,
)
from jzero.servers.connections import TOO_SLOW
from jzero.types import JsonValue

SESSION = "60e7f8513e6946ca9975aa5d7f1abaf2"
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Write abc backwards."}
RECORDED = {
    "model": "policy",
    "stream": True,
    "messages": [SYSTEM, QUESTION],
    "stream_options": {"include_usage": True},
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def post(url: str, body: JsonValue, session: str = SESSION) -> str:
    request = urllib.request.Request(
        f"{url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Session-ID": session},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


Program = Callable[[str], Awaitable[str]]


async def with_endpoint(
    program: Program, drive: Callable[[Conversation[str]], Awaitable[None]]
) -> None:
    endpoint = ChatEndpoint()
    try:
        conversation: Conversation[str] = Conversation()
        endpoint.responders[SESSION] = conversation
        conversation.start(program(endpoint.url))
        await drive(conversation)
        await conversation.stop()
    finally:
        endpoint.close()


def test_a_program_gets_the_response_as_events_and_ends() -> None:
    async def program(url: str) -> str:
        return await asyncio.to_thread(post, url, RECORDED)

    async def drive(conversation: Conversation[str]) -> None:
        request = await conversation.next()
        assert request == Request([SYSTEM, QUESTION], [])
        conversation.answer({"role": "assistant", "content": "cba"})
        events = await conversation.next()
        assert isinstance(events, str)
        *chunks, done, empty = events.split("\n\n")
        assert (done, empty) == ("data: [DONE]", "")
        first, last = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "cba"}
        assert last["choices"][0]["finish_reason"] == "stop"

    asyncio.run(with_endpoint(program, drive))


def test_a_program_asks_again_with_the_answers_of_its_tools() -> None:
    said = assistant_message(f"I add. {CALL}", [ADD])
    answer = {"role": "tool", "tool_call_id": "call_0", "content": "3"}

    async def program(url: str) -> str:
        body = RECORDED | {"stream": False, "tools": [ADD]}
        first = json.loads(await asyncio.to_thread(post, url, body))
        message = first["choices"][0]["message"]
        body = body | {"messages": [*body["messages"], message, answer]}
        await asyncio.to_thread(post, url, body)
        return "over"

    async def drive(conversation: Conversation[str]) -> None:
        before = await conversation.next()
        assert isinstance(before, Request) and before.tools == [ADD]
        conversation.answer(said)
        after = await conversation.next()
        assert isinstance(after, Request)
        assert new_messages(before, said, after) == [answer]
        conversation.answer({"role": "assistant", "content": "3"})
        assert await conversation.next() == "over"

    asyncio.run(with_endpoint(program, drive))


def test_the_error_of_a_program_reaches_the_episode() -> None:
    async def program(url: str) -> str:
        raise ZeroDivisionError("in the harness")

    async def drive(conversation: Conversation[str]) -> None:
        with pytest.raises(ZeroDivisionError, match="in the harness"):
            await conversation.next()

    asyncio.run(with_endpoint(program, drive))


@pytest.mark.parametrize(
    ("session", "change", "status", "reason"),
    [
        ("other", {}, 404, "names no conversation"),
        (SESSION, {"n": 2}, 400, "rollout.group_size"),
        (SESSION, {"response_format": {"type": "json_object"}}, 400, "response_format"),
        (SESSION, {"messages": [{"content": [{"type": "image_url"}]}]}, 400, "not text"),
    ],
)
def test_what_the_policy_cannot_answer_is_refused(
    session: str, change: dict[str, JsonValue], status: int, reason: str
) -> None:
    async def program(url: str) -> str:
        try:
            await asyncio.to_thread(post, url, RECORDED | change, session)
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"
        return "answered"

    async def drive(conversation: Conversation[str]) -> None:
        outcome = await conversation.next()
        assert isinstance(outcome, str)
        assert outcome.startswith(str(status)) and reason in outcome

    asyncio.run(with_endpoint(program, drive))


def test_two_requests_at_once_are_refused_and_a_stopped_one_is_cancelled() -> None:
    async def run() -> None:
        conversation: Conversation[str] = Conversation()
        first = asyncio.ensure_future(conversation.ask(Request([QUESTION], [])))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="one response at a time"):
            await conversation.ask(Request([QUESTION], []))
        await conversation.stop()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(RequestError, match="no longer waits"):
            conversation.answer({"role": "assistant", "content": ""})

    asyncio.run(run())


def test_text_in_parts_is_text_and_nothing_is_not_sent() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": None}
    assert read_request({"messages": [message]}).messages == [{"role": "user", "content": "a\nb"}]


def test_calls_are_read_and_what_is_no_call_is_text() -> None:
    message = assistant_message(f"Well. {CALL}\n{CALL}", [ADD])
    assert message["content"] == "Well."
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
    answer = Answer([Choice(message)])
    assert completion(answer)["choices"][0]["finish_reason"] == "tool_calls"
    assert '"index": 1, "id": "call_1"' in completion_events(answer)

    xml = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
    xml += "</parameter>\n</function>\n</tool_call>"
    assert assistant_message(xml, [ADD])["tool_calls"][0]["function"]["name"] == "add"

    for response in (CALL.replace("add", "subtract"), CALL.replace("1", '"one"')):
        assert assistant_message(response, [ADD]) == {"role": "assistant", "content": response}
    assert assistant_message(CALL, []) == {"role": "assistant", "content": CALL}


def test_a_conversation_may_only_grow() -> None:
    before = Request([SYSTEM, QUESTION], [])
    said = {"role": "assistant", "content": "cba"}
    more = {"role": "user", "content": "Again."}
    assert new_messages(before, said, Request([SYSTEM, QUESTION, said, more], [])) == [more]
    for messages, reason in (
        ([QUESTION, said, more], "changed its earlier messages"),
        ([SYSTEM, QUESTION, {"role": "assistant", "content": "c"}, more], "changed the content"),
        ([SYSTEM, QUESTION], "changed the role"),
        ([SYSTEM, QUESTION, said], "without a message"),
    ):
        with pytest.raises(RequestError, match=reason):
            new_messages(before, said, Request(messages, []))
    with pytest.raises(RequestError, match="or its tools"):
        new_messages(before, said, Request([SYSTEM, QUESTION, said, more], [ADD]))


HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Session-ID: {SESSION}\r\n"
WRONG_REQUESTS = {
    "Content-Length: -5\r\n\r\n{}": "400",
    "Content-Length: 1e9\r\n\r\n{}": "400",
    "Content-Length: 99999999999999999999\r\n\r\n{}": "413",
    "Content-Length: 17000000\r\n\r\n{}": "413",
    "Content-Length: 2\r\n\r\n{}": "400",  # it has no messages
}


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    limits = replace(chat_endpoint.LIMITS, request_seconds=0.5)
    endpoint = ChatEndpoint(limits)

    async def make_conversation() -> Conversation[str]:
        return Conversation()

    endpoint.responders[SESSION] = asyncio.run(make_conversation())
    yield endpoint
    endpoint.close()


def send(endpoint: ChatEndpoint, request: bytes, drips: bytes = b"") -> bytes:
    """Sends a request, then a byte each tenth of a second; returns what comes back."""
    host, port = "127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0])
    with socket.create_connection((host, port), timeout=20) as connection:
        connection.sendall(request)
        received = b""
        try:
            for byte in drips:
                time.sleep(0.1)
                connection.sendall(bytes([byte]))
            while part := connection.recv(4096):
                received += part
                if b"}}" in received:
                    break
        except ConnectionError:
            pass
        return received


@pytest.mark.parametrize("request_end", WRONG_REQUESTS)
def test_the_body_of_a_request_is_bounded(endpoint: ChatEndpoint, request_end: str) -> None:
    received = send(endpoint, (HEAD + request_end).encode())
    assert received.startswith(f"HTTP/1.1 {WRONG_REQUESTS[request_end]}".encode())


def test_other_sessions_and_other_sites_are_refused(endpoint: ChatEndpoint) -> None:
    with httpx.Client(base_url=endpoint.url) as client:
        for headers, status in (
            ({"X-Session-ID": "other"}, 404),
            ({}, 401),
            ({"Authorization": "Bearer forged"}, 401),
            ({"X-Session-ID": SESSION, "Origin": "http://evil.example"}, 403),
            ({"X-Session-ID": SESSION, "Host": "evil.example"}, 403),
        ):
            answer = client.post("/chat/completions", json={}, headers=headers)
            assert answer.status_code == status


@pytest.mark.parametrize("begin", ["", "Content-Length: 900\r\n\r\n"], ids=["head", "body"])
def test_a_request_that_drips_is_given_up(endpoint: ChatEndpoint, begin: str) -> None:
    start = time.monotonic()
    answer = send(endpoint, (HEAD + begin).encode(), drips=b"x" * 200)
    assert answer in (b"", TOO_SLOW)  # the last bytes may meet a closed connection
    assert time.monotonic() - start < 10  # it drips for 20 s


@pytest.mark.parametrize(
    "change",
    [
        {"messages": "hello"},
        {"messages": [7]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"function": {"name": 7}}]},
        {"tools": {"a": 1}},
    ],
)
def test_a_request_of_another_shape_is_refused(change: dict[str, JsonValue]) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        read_request(RECORDED | change)
