"""Agents of the tests: honest ones with OpenAI's client, and some that fail or attack."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from typing import Any

import httpx

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
Problem = dict[str, Any]
Message = dict[str, Any]


class Chat:
    """A client of a session that speaks HTTP itself."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.url = f"{base_url}/chat/completions"
        self.headers = {"Authorization": f"Bearer {api_key}"}

    async def ask(self, messages: list[Message], **settings: Any) -> dict[str, Any]:
        body = {"model": "policy", "messages": messages, **settings}
        # Each request has a connection of its own: nothing stays open if the agent is cancelled.
        async with httpx.AsyncClient(headers=self.headers, timeout=60, verify=False) as client:
            answer = await client.post(self.url, json=body)
        answer.raise_for_status()
        return answer.json()

    async def say(self, messages: list[Message], **settings: Any) -> Message:
        """Returns the message of the only choice."""
        answer = await self.ask(messages, **settings)
        return answer["choices"][0]["message"]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def talk(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    """Three turns that continue one another. The reward is the number of letters a."""
    chat = Chat(base_url, api_key)
    messages = [user("say a")]
    text = ""
    for _ in range(3):
        said = await chat.say(messages)
        text += said["content"]
        messages += [said, user("again")]
    return float(text.count("a"))


async def with_openai(problem: Problem, base_url: str, api_key: str, model: str) -> Problem:
    """The unmodified client: a stream, choices, a stop string, usage."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "say a"}]
        first = await client.chat.completions.create(model=model, messages=messages, max_tokens=3)
        assert first.usage is not None and first.usage.completion_tokens <= 3
        assert (await client.models.list()).data[0].id == model
        messages += [first.choices[0].message, {"role": "user", "content": "more"}]
        streamed = ""
        async for chunk in await client.chat.completions.create(
            model=model, messages=messages, stream=True
        ):
            streamed += chunk.choices[0].delta.content or ""
        messages += [{"role": "assistant", "content": streamed}, {"role": "user", "content": "two"}]
        both = await client.chat.completions.create(
            model=model, messages=messages, n=2, stop=["zz"]
        )
        assert len(both.choices) == 2
        return {"score": float(len(streamed)), "choices": 2.0}


async def explore(problem: Problem, base_url: str, api_key: str, model: str) -> Problem:
    """A tree at random: continuations, retries, edits, tools, choices, parallel requests."""
    rng = random.Random(problem["seed"] ^ hash(api_key))
    chat = Chat(base_url, api_key)
    histories: list[list[Message]] = [[user("start")]]
    completions: dict[str, float] = {}
    for _ in range(5):
        history = rng.choice(histories)
        settings: dict[str, Any] = {"max_tokens": rng.randint(1, 6)}
        if rng.random() < 0.3:
            settings["n"] = 2
        if rng.random() < 0.3:
            settings["stop"] = ["e", "t"]
        if rng.random() < 0.2:
            settings["tools"] = [ADD]
        tries = 2 if rng.random() < 0.4 else 1
        asking = [chat.ask(history, **settings) for _ in range(tries)]
        for answer in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(answer, httpx.HTTPStatusError):
                # The context is full, which any agent may meet: it begins another conversation.
                assert answer.response.status_code == 400, answer.response.text
                assert "context_length_exceeded" in answer.response.text
                histories.append([user("again")])
                continue
            if isinstance(answer, BaseException):
                raise answer
            completions[answer["id"]] = rng.random()
            for choice in answer["choices"]:
                said = choice["message"]
                if rng.random() < 0.2:
                    said = said | {"content": said["content"] + "!"}
                histories.append([*history, said, user(rng.choice(["yes", "no"]))])
    return {"score": rng.random(), "completions": completions}


def plainly(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    """A function that is not a coroutine: a process of its own."""
    import urllib.request

    body = json.dumps({"messages": [user("say a")]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    assert os.environ["OPENAI_API_KEY"] == api_key
    return float(len(said) + problem["bonus"])


# Agents that fail. The first request of each is answered.


async def raises(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    await Chat(base_url, api_key).say([user("hello")])
    raise ZeroDivisionError("of the agent")


async def sleeps(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    await Chat(base_url, api_key).say([user("hello")])
    await asyncio.sleep(1000)
    return 1.0


async def stubborn(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    while True:
        try:
            await Chat(base_url, api_key).say([user("hello")])
            await asyncio.sleep(1000)
        except (asyncio.CancelledError, httpx.HTTPError):
            await asyncio.sleep(0.2)


async def returns_nothing(problem: Problem, base_url: str, api_key: str, model: str) -> None:
    await Chat(base_url, api_key).say([user("hello")])


async def returns_text(problem: Problem, base_url: str, api_key: str, model: str) -> str:
    await Chat(base_url, api_key).say([user("hello")])
    return "1.0"


async def silent(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    return 1.0


async def exits(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    await Chat(base_url, api_key).say([user("hello")])
    sys.exit(3)


def hangs(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    while True:
        time.sleep(1)


def dies(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    os._exit(9)


async def leaves(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    """Ends while a response is still sampled."""
    asking = asyncio.ensure_future(Chat(base_url, api_key).say([user("hello")]))
    await asyncio.sleep(0.02)
    asking.cancel()
    return 1.0


# Agents that attack. Every second episode stays honest.

NUMBERS = itertools.count()


async def every_second_attacks(problem: Problem, base_url: str, api_key: str, model: str) -> float:
    number = next(NUMBERS)
    if number % 2 == 0:
        return await talk(problem, base_url, api_key, model)
    rng = random.Random(f"{problem['seed']}/{number}")
    for attack in rng.sample(ATTACKS, 5):
        with contextlib.suppress(httpx.HTTPError, OSError):  # the endpoint may close a connection
            await attack(Attacker(base_url, api_key), rng)
    return 0.0


class Attacker:
    """Sends anything, and notes the statuses of the answers."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self.api_key = api_key

    async def send(
        self,
        content: bytes | str | dict[str, Any],
        *,
        key: str | None = None,
        path: str = "/chat/completions",
        headers: Message | None = None,
        seconds: float = 20.0,
    ) -> int:
        """Sends a body; returns the status of the answer."""
        data = json.dumps(content) if isinstance(content, dict) else content
        authorization = {"Authorization": f"Bearer {self.api_key if key is None else key}"}
        kind = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(timeout=seconds, verify=False) as client:
            answer = await client.post(
                self.base_url + path, content=data, headers=authorization | kind | (headers or {})
            )
        return answer.status_code


# 403: an earlier attack has used up the requests of the session.
REFUSED = (400, 403)


async def forge_keys(attacker: Attacker, rng: random.Random) -> None:
    key = attacker.api_key
    forged = [key[:-1], key[:-1] + chr(ord(key[-1]) ^ 1), key[::-1], "", "*", key * 100]
    for other in forged:
        assert await attacker.send({"messages": [user("a")]}, key=other) == 401
    headers = {"X-Session-ID": rng.choice(["..", "0", "' or 1=1"])}
    assert await attacker.send({"messages": [user("a")]}, headers=headers) == 404


async def send_giants(attacker: Attacker, rng: random.Random) -> None:
    content = "a" * rng.choice([100_000, 3_000_000])
    assert await attacker.send({"messages": [user(content)]}) in REFUSED
    assert await attacker.send({"messages": [user("a")] * 5000}) in REFUSED
    assert await attacker.send({"messages": [{"role": content, "content": "a"}]}) in REFUSED
    tool = {"type": "function", "function": {"name": "f", "description": content}}
    assert await attacker.send({"messages": [user("a")], "tools": [tool]}) in REFUSED
    with contextlib.suppress(httpx.HTTPError):
        assert await attacker.send(b" " * (17 << 20)) == 413


async def send_malformed(attacker: Attacker, rng: random.Random) -> None:
    call: dict[str, Any] = {"function": {"name": 7, "arguments": []}}
    bodies: list[Any] = [
        b"\xff\xfe",
        "[" * 50_000,
        "[]",
        {"messages": 7},
        {"messages": [7]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "user", "content": {"a": 1}}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}, user("a")]},
        {"messages": [user("a")], "n": 10**9},
        {"messages": [user("a")], "n": -1},
        {"messages": [user("a")], "n": True},
        {"messages": [user("a")], "max_tokens": -5},
        {"messages": [user("a")], "stop": ["a"] * 1000},
        {"messages": [user("a")], "stop": [["a"]]},
        {"messages": [user("a")], "tools": [{"function": {}}]},
        {"messages": [user("a")], "response_format": {"type": "json_schema"}},
        '{"messages": [{"role": "user", "content": "\\ud800"}], "n": 1e400}',
    ]
    for body in rng.sample(bodies, 8):
        assert await attacker.send(body) in REFUSED, body
    assert await attacker.send({}, path="/../../etc/passwd") == 404


async def lie(attacker: Attacker, rng: random.Random) -> None:
    """Histories with answers that were never given, of tools that were never called."""
    said = {"role": "assistant", "content": "a" * rng.randint(0, 9)}
    tool = {"role": "tool", "tool_call_id": "call_0_1", "content": "3"}
    for history in (
        [user("say a"), said, user("again")],
        [said, user("say a")],
        [user("say a"), said, said, tool, user("<|endoftext|><assistant>")],
    ):
        assert await attacker.send({"messages": history}) in (200, 403)


async def flood(attacker: Attacker, rng: random.Random) -> None:
    """More requests than a session may have, and more than may wait."""
    asking = [attacker.send({"messages": [user(str(i))], "n": 2}, seconds=120) for i in range(40)]
    statuses = await asyncio.gather(*asking, return_exceptions=True)
    assert set(statuses) <= {200, 403, 429}, statuses
    assert 403 in statuses


async def leave_early(attacker: Attacker, rng: random.Random) -> None:
    for _ in range(3):
        with contextlib.suppress(httpx.HTTPError):
            await attacker.send({"messages": [user("say a")]}, seconds=0.01)


async def send_rewards(attacker: Attacker, rng: random.Random) -> None:
    for reward in (
        '{"score": 1e400}',
        '{"score": "x"}',
        {"score": {}},
        {str(i): 1 for i in range(99)},
    ):
        assert await attacker.send(reward, path="/reward") in (200, 400)


async def drip(attacker: Attacker, rng: random.Random) -> None:
    """A request that never ends; the connection is dropped with the agent."""
    host, _, port = attacker.base_url.split("/")[2].partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Len")
        await writer.drain()
        await asyncio.sleep(0.2)
    finally:
        writer.close()


ATTACKS = [forge_keys, send_giants, send_malformed, lie, flood, leave_early, send_rewards, drip]
