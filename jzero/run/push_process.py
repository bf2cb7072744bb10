"""Makes one attempt to push to the hub, as a process: `python -m jzero.run.push_process`.

`run.hub_pushes` starts this process, because a process can be killed even if its network hangs.
Messages are lines of JSON:

    stdin   {"directory", "name", "branch", "is_private", "replace"}
    stdout  {"event": "claim"}                         the branch is free, and is created next
    stdin   "go\\n"                                     the run has recorded that it owns the branch
    stdout  {"event": "pushed", "address"}, or {"event": "failed", "reason", "is_refusal"}

The process ends when its standard input closes, so a killed run leaves no push running.
"""

import contextlib
import json
import os
import sys
import threading
from pathlib import Path

from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.model import hub


def main() -> None:
    request = json.loads(sys.stdin.readline())
    may_claim = threading.Event()
    threading.Thread(target=_follow_parent, args=(may_claim,), daemon=True).start()

    def claim() -> None:
        _send({"event": "claim"})
        may_claim.wait()

    target = hub.Target(request["name"], request["branch"], request["is_private"])
    try:
        # Output of the libraries goes to stderr (the log), so that it does not mix with the
        # messages.
        with contextlib.redirect_stdout(sys.stderr):
            address = hub.push(Path(request["directory"]), target, request["replace"], claim)
    except (OSError, UserError, hub.Refused) as error:
        # The run retries network errors, but not refusals.
        is_refusal = isinstance(error, hub.Refused)
        _send({"event": "failed", "reason": str(error), "is_refusal": is_refusal})
    else:
        _send({"event": "pushed", "address": address})


def _send(message: JsonObject) -> None:
    print(json.dumps(message), file=sys.__stdout__, flush=True)


def _follow_parent(may_claim: threading.Event) -> None:
    """Waits for "go", and ends the process at the end of its standard input."""
    for line in sys.stdin:
        if line == "go\n":
            may_claim.set()
    # The parent has ended. An upload in the main thread would not return in time.
    os._exit(1)


if __name__ == "__main__":
    main()
