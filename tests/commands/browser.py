"""A real browser for tests of pages: Chromium, driven through its DevTools protocol."""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage "
    "--disable-background-networking --remote-debugging-port=0 --window-size=1300,900"
)
START_SECONDS = 60.0


def find_browser() -> str:
    """Returns the program of a browser; skips the test where there is none."""
    program = os.environ.get("CHROME") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no browser: install chromium, or set CHROME to one")
    return program


class Tab:
    """A tab of the browser. It collects the errors of the console and the requests."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._last_id = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        while True:
            reply = json.loads(self._socket.recv(timeout=60))
            if reply.get("id") == self._last_id:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]
            self._note(reply["method"], reply["params"])

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"])[:500])
        elif event == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def open(self, address: str) -> None:
        self.send("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        """Returns the value of a JavaScript expression."""
        result = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> Any:
        """Waits until a JavaScript expression is true, and returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, (script, self.errors, self.text()[:3000])
            time.sleep(0.05)
        return value

    def text(self) -> str:
        """Returns the text that the page shows."""
        return self.evaluate("document.body ? document.body.innerText : ''")

    def screenshot(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Tab]:
    """Starts a browser without a network except for this machine, and ends it."""
    hosts = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
    command = [find_browser(), *FLAGS.split(), hosts, f"--user-data-dir={profile}", "about:blank"]
    with (profile.parent / f"{profile.name}.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (found := re.search(r"127\.0\.0\.1:(\d+)/", Path(log.name).read_text())):
                assert time.monotonic() < deadline and process.poll() is None, "no browser started"
                time.sleep(0.05)
            with connect(_tab_address(int(found[1])), max_size=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _tab_address(port: int) -> str:
    """Returns the address of the first tab's DevTools."""
    import httpx

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=30).json()
        pages = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
        if pages:
            return pages[0]
        time.sleep(0.05)
    raise AssertionError("the browser has no tab")
