"""A server that scores prompts with a real model, in the words of OpenAI's API and of vLLM."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import numpy as np
import reference

from jzero.model import qwen, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast

MODEL_NAME = "the/teacher"
ROW_TOKENS = 48  # no test asks for more

# (path, body) of a request -> status, and the reply as JSON or as bytes
Answer = Callable[[str, dict], tuple[int, object]]


@dataclass
class ScoringServer:
    """What the handler of a request knows: a model, and what it was asked."""

    params: qwen.Params
    model: qwen.QwenConfig
    tok: PreTrainedTokenizerFast
    bodies: list[dict] = field(default_factory=list)  # of the completions that it was asked for
    failures: int = 0  # requests that are answered with status 503 first

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        """Returns the status and the reply to a request."""
        if path.endswith("/models"):
            return 200, {"data": [{"id": MODEL_NAME}]}
        self.bodies.append(body)
        if self.failures:
            self.failures -= 1
            return 503, {"error": "busy"}
        return 200, {"choices": [self.choice(body)]}

    def choice(self, body: dict) -> dict:
        ids = body["prompt"]
        logps = self.logps(ids)
        shown = [tokenizer.decode(self.tok, [token]) for token in ids]
        if body.get("echo"):
            values = [None, *logps[1:], -0.5]  # the last one is of the token that was sampled
            logprobs = {"tokens": [*shown, "x"], "token_logprobs": values}
            return {"text": "".join(shown) + "x", "logprobs": logprobs}
        entries: list[dict | None] = [None]
        for token, value, text in list(zip(ids, logps, shown, strict=True))[1:]:
            entries.append({str(token): {"logprob": value, "rank": 1, "decoded_token": text}})
        return {"text": "x", "prompt_logprobs": entries}

    def logps(self, ids: Sequence[int]) -> list[float]:
        """Returns the log-prob of every token under the model, in float64 and without packing."""
        # Rows of one length, so that the model is compiled once.
        tokens = reference.padded([list(ids), [0] * ROW_TOKENS])
        with jax.enable_x64(True):
            params = reference.doubles(self.params)
            logps, _ = reference.rows_logps(self.model, params, tokens, 1.0)
        return [float(value) for value in np.asarray(logps)[0, : len(ids)]]


@contextlib.contextmanager
def served(answer: Answer, headers: list[dict[str, str]] | None = None) -> Iterator[str]:
    """Serves `answer` on a free port; yields the address of the API."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Prints nothing."""

        def reply(self, body: dict) -> None:
            with lock:  # one model for all threads
                if headers is not None:
                    headers.append(dict(self.headers))
                status, value = answer(self.path, body)
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(json.loads(body))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
