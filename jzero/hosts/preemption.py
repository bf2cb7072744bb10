"""Polls for the notice that Google Cloud gives about 30 seconds before it preempts a spot machine.

From then on, the machine's metadata server answers the query "is this machine preempted?" with
TRUE. A thread queries it every POLL_SECONDS. On all other platforms (Kubernetes, SLURM, `systemd`)
the notice is a SIGTERM, which `interrupt.StopSignal` handles.

https://cloud.google.com/compute/docs/instances/create-use-spot describes the server's answer. As in
Google's own clients, the environment variable GCE_METADATA_HOST names another server.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from jzero import http, terminal
from jzero.errors import UserError

POLL_SECONDS = 2.0  # between two queries
ANSWER_SECONDS = 5.0  # timeout of one query
MAX_ANSWER_BYTES = 1024
PATH = "instance/preempted"
DEFAULT_HOST = "metadata.google.internal"
PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")  # of this machine, from its firmware
THREAD_NAME = "preemption-notice"


def is_on_gce() -> bool:
    """Returns whether this machine, or its container's host, runs on Google Compute Engine."""
    try:
        return "Google" in PRODUCT_NAME.read_text(encoding="utf-8")
    except OSError:  # not Linux, or a machine without this file
        return False


def address() -> str:
    """Returns the address of the metadata server."""
    host = os.environ.get("GCE_METADATA_HOST", DEFAULT_HOST)
    return f"http://{host}/computeMetadata/v1"


def is_preempted() -> bool:
    """Queries the metadata server once. Raises http.RemoteError if it does not answer."""
    client = http.Client(
        "GCE_METADATA_HOST",
        address(),
        label=f"{address()}/{PATH}",
        seconds=ANSWER_SECONDS,
        max_bytes=MAX_ANSWER_BYTES,
        use_proxies=False,  # a proxy cannot reach this machine's metadata server
    )
    # The server refuses a query without this header, so that a forwarded request reads no
    # metadata.
    return client.get_text(PATH, {"Metadata-Flavor": "Google"}).strip() == "TRUE"


def watch(setting: str, on_notice: Callable[[str], None], is_over: threading.Event) -> None:
    """Starts a thread that calls `on_notice` with a reason once, unless `is_over` is set before.

    Args:
        setting: `train.preemption_notice`. "none" starts nothing, "auto" starts the thread only on
            Google Compute Engine, and "gce" everywhere.
        on_notice: Called from the thread.
        is_over: Ends the thread.

    Raises:
        UserError: `setting` is "gce", and the metadata server does not answer.
    """
    if setting == "none" or (setting == "auto" and not is_on_gce()):
        return
    try:
        # A first query checks that the server answers.
        is_preempted()
    except http.RemoteError as error:
        # With "auto" the run works without notices. With "gce" the user relies on them.
        problem = str(error)
        if setting == "gce":
            raise UserError(
                f"train.preemption_notice=gce: {problem}. Set it to none, or GCE_METADATA_HOST "
                "to the server's address"
            ) from None
        terminal.write(f"no preemption notices: {problem}", sys.stderr)
        return

    def ask() -> None:
        while not is_over.wait(POLL_SECONDS):
            try:
                has_notice = is_preempted()
            except http.RemoteError:  # the server restarts occasionally
                continue
            if has_notice:
                on_notice("preemption notice")
                return

    threading.Thread(target=ask, name=THREAD_NAME, daemon=True).start()
