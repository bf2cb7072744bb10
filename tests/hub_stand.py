"""A stand-in for the Hugging Face hub, for commands that push to it."""

import base64
import json
from http.server import BaseHTTPRequestHandler
from typing import Any

from runs import Stand

Answer = tuple[int, object]  # status, and JSON


class Hub(Stand):
    """Answers the requests of a push as the hub does, for the model or the data set me/tiny.

    Attributes:
        kind: "models" or "datasets".
        branches: the files of every branch, by the file's path. No branch: no model yet.
    """

    def __init__(self, kind: str = "models") -> None:
        super().__init__(Handler)
        self.kind = kind
        self.branches: dict[str, dict[str, bytes]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        parts = path.partition("?")[0].strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            return self.create()
        if parts == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}
        if parts[:4] != ["api", self.kind, "me", "tiny"]:
            return 404, {"error": f"no {path}"}
        match method, *parts[4:]:
            case "GET", "refs":
                return self.list_branches()
            case "POST", "branch", branch:
                self.branches[branch] = dict(self.branches["main"])
                return 200, {}
            case "GET", "tree", branch:
                return self.list_files(branch)
            case "POST", "preupload", _:
                return self.upload_modes(json.loads(body)["files"])
            case "POST", "commit", branch:
                return self.commit(branch, [json.loads(line) for line in body.splitlines()])
        names = [{"rfilename": path} for path in self.branches.get("main", {})]
        return 200, {"id": "me/tiny", "sha": "0" * 40, "siblings": names}

    def create(self) -> Answer:
        """Makes the branch main; the status is 409 if there is one."""
        status = 409 if self.branches else 200
        self.branches.setdefault("main", {})
        return status, {"url": f"{self.address}/me/tiny"}

    def list_branches(self) -> Answer:
        branches = []
        for name in self.branches:
            branches.append({"name": name, "ref": f"refs/heads/{name}", "targetCommit": "0" * 40})
        return 200, {"branches": branches, "converts": [], "tags": []}

    def list_files(self, branch: str) -> Answer:
        files = []
        for path, data in self.branches[branch].items():
            files.append({"type": "file", "path": path, "size": len(data), "oid": "0" * 40})
        return 200, files

    def upload_modes(self, files: list[dict[str, Any]]) -> Answer:
        """Says that every file comes in the commit itself."""
        modes = []
        for file in files:
            mode = {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
            modes.append(mode)
        return 200, {"files": modes}

    def commit(self, branch: str, operations: list[dict[str, Any]]) -> Answer:
        files = self.branches[branch]
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        commit = "1" * 40
        return 200, {
            "commitUrl": f"{self.address}/me/tiny/commit/{commit}",
            "commitOid": commit,
        }


class Handler(BaseHTTPRequestHandler):
    """Passes requests with the right token to the hub."""

    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("authorization") == "Bearer hf_secret":
            status, value = self.server.answer(self.command, self.path, body)
        else:
            status, value = 401, {"error": "who are you?"}
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET
