"""A stand-in for a server of the OpenAI API that refuses, stalls, cuts replies and sends thoughts.

What it does with a prompt is a function of the number in the prompt (`kind_of`), and what it
answers is a function of the prompt and the seed (`answer_to`). So a test knows every row that a
generation has to end with. The server keeps a log of all requests.
"""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

REFUSALS = {"too long": 400, "too large": 413, "unprocessable": 422, "teapot": 418}
# How many tries of a request fail before it is answered; all tries of the others that are here do.
FAILING_TRIES = {"stalls once": 1, "cut": 2, "cut JSON": 2, "closed": 1, "busy": 1, "broken": 1}
NEVER_ANSWERED = ("stalls", "crashes")
THOUGHTS = ("reasoning_content", "reasoning", "unfinished thoughts")
PLAIN = "plain"
KINDS = (*REFUSALS, *FAILING_TRIES, *NEVER_ANSWERED, *THOUGHTS, *[PLAIN] * 15)  # 30 of them


class Reply(NamedTuple):
    """What a model says to a prompt."""

    content: str | None
    reasoning: str | None
    finish: str


def kind_of(number: int) -> str:
    """Returns what the server does with the prompt of a number. Kinds are spread over the set."""
    return KINDS[number * 7 % len(KINDS)]


def is_answered(number: int) -> bool:
    """Returns whether a server gives a response to the prompt of a number in the end."""
    return kind_of(number) not in (*REFUSALS, *NEVER_ANSWERED)


def answer_to(number: int, seed: int) -> Reply:
    """Returns the response to a prompt with a seed. Some of them are right."""
    content = f"It is \\boxed{{{2 * number + seed % 3}}}, says {seed}."
    match kind_of(number):
        case "reasoning_content" | "reasoning":
            return Reply(content, f"Let me see, {seed}.", "stop")
        case "unfinished thoughts":
            return Reply(None, f"Wait, {seed}", "length")
    return Reply(content, None, "stop")


class StandIn(ThreadingHTTPServer):
    """Serves on a free port in a thread while it is entered. `die` closes the port."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, stall_seconds: float, heals: bool = False) -> None:
        """Listens, and answers nothing yet.

        Args:
            stall_seconds: for which a stalling request is not answered.
            heals: whether the server answers every request at once and in full.
        """
        super().__init__(("127.0.0.1", 0), Handler)
        self.stall_seconds = stall_seconds
        self.heals = heals
        self.lock = threading.Lock()
        self.log: Counter[tuple[int, int]] = Counter()  # requests of (number, seed)
        self.bodies: list[dict] = []
        self.dies_after = 10**9  # requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> "StandIn":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Closes the port: connections are refused from now on."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints nothing: clients give up on stalled requests, and are killed."""

    def count(self, number: int, body: dict) -> int:
        """Counts a request; returns how often it came before."""
        with self.lock:
            key = (number, body["seed"])
            self.log[key] += 1
            self.bodies.append(body)
            if sum(self.log.values()) == self.dies_after:
                threading.Thread(target=self.die, daemon=True).start()
            return self.log[key] - 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def stand_in(self) -> StandIn:
        assert isinstance(self.server, StandIn), f"{self.server=}"
        return self.server

    def log_message(self, format: str, *_: object) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"object": "list", "data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_chat = "messages" in body
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        found = re.search(r"\d+", prompt)
        assert found is not None, prompt
        number = int(found[0])
        tries = self.stand_in.count(number, body)
        kind = PLAIN if self.stand_in.heals else kind_of(number)
        reply = json.dumps(reply_to(number, body)).encode()
        if kind in REFUSALS:
            message = {"error": {"message": f"This prompt is {kind}."}}
            self._send(REFUSALS[kind], json.dumps(message).encode())
        elif kind in NEVER_ANSWERED or tries < FAILING_TRIES.get(kind, 0):
            self._fail(kind, reply)
        else:
            self._send(200, reply)

    def _fail(self, kind: str, reply: bytes) -> None:
        """Lets one try of a request fail."""
        self.close_connection = True
        match kind:
            case "stalls" | "stalls once":
                time.sleep(self.stand_in.stall_seconds)
            case "cut":  # the connection ends in the middle of the reply
                self._send(200, reply[: len(reply) // 2], claimed=len(reply))
            case "cut JSON":  # the reply is complete, and its JSON is not
                self._send(200, reply[: len(reply) // 2])
            case "busy":
                self._send(429, b'{"error": "later"}', retry_after="0")
            case "crashes" | "broken":
                self._send(500, b'{"error": "out of memory"}')

    def _send(self, status: int, data: bytes, claimed: int = 0, retry_after: str = "") -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(claimed or len(data)))
        if retry_after:
            self.send_header("retry-after", retry_after)
        self.end_headers()
        self.wfile.write(data)


def reply_to(number: int, body: Mapping) -> dict:
    """Returns the JSON of a response, as servers of completions and of chats have it."""
    content, reasoning, finish = answer_to(number, body["seed"])
    choice: dict = {"index": 0, "finish_reason": finish}
    if "messages" in body:
        message = {"role": "assistant", "content": content}
        if reasoning is not None:
            name = "reasoning" if kind_of(number) == "reasoning" else "reasoning_content"
            message[name] = reasoning
        choice["message"] = message
    else:
        choice["text"] = content or ""
    return {"choices": [choice], "usage": {"completion_tokens": 7}, "model": body["model"]}
