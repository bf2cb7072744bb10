"""The notice that Google Cloud gives a spot machine about 30 seconds before it takes it away.

The machine's metadata server answers the question "is this machine preempted?" with TRUE from then
on. A thread asks every POLL_SECONDS. Everywhere else a notice is a SIGTERM, which
`interrupt.StopSignal` handles: Kubernetes, SLURM and `systemd` send one.

https://cloud.google.com/compute/docs/instances/create-use-spot describes the server's answer. As in
Google's own clients, the environment variable GCE_METADATA_HOST names another server.
"""

import os
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

from jzero.errors import UserError

POLL_SECONDS = 2.0  # between two questions
ANSWER_SECONDS = 5.0  # for which an answer is waited for
DEFAULT_HOST = "metadata.google.internal"
PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")  # of this machine, as its firmware says it
THREAD_NAME = "preemption-notice"

# A proxy of the environment reaches other hosts, and not the server of this machine.
WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_on_gce() -> bool:
    """Returns whether this machine, or the one of this container, is of Google Compute Engine."""
    try:
        return "Google" in PRODUCT_NAME.read_text(encoding="utf-8")
    except OSError:  # not Linux, or a machine without this file
        return False


def address() -> str:
    """Returns where the metadata server is asked."""
    host = os.environ.get("GCE_METADATA_HOST", DEFAULT_HOST)
    return f"http://{host}/computeMetadata/v1/instance/preempted"


def is_preempted() -> bool:
    """Asks the metadata server once. Raises OSError if it does not answer."""
    request = urllib.request.Request(address(), headers={"Metadata-Flavor": "Google"})
    with WITHOUT_PROXY.open(request, timeout=ANSWER_SECONDS) as reply:
        return reply.read().strip() == b"TRUE"


def watch(setting: str, on_notice: Callable[[str], None], is_over: threading.Event) -> None:
    """Starts a thread that calls `on_notice` with a reason once, unless `is_over` is set before.

    Args:
        setting: `train.preemption_notice`. "none" starts nothing, "auto" starts the thread on
            Google Compute Engine alone, and "gce" everywhere.
        on_notice: Called from the thread.
        is_over: Ends the thread.

    Raises:
        UserError: `setting` is "gce", and the metadata server does not answer.
    """
    if setting == "none" or (setting == "auto" and not is_on_gce()):
        return
    try:
        is_preempted()
    except OSError as error:
        problem = f"{address()} does not answer: {error}"
        if setting == "gce":
            raise UserError(
                f"train.preemption_notice=gce: {problem}. Set it to none, or GCE_METADATA_HOST "
                "to the server's address"
            ) from None
        print(f"no preemption notices: {problem}", file=sys.stderr, flush=True)
        return

    def ask() -> None:
        while not is_over.wait(POLL_SECONDS):
            try:
                has_notice = is_preempted()
            except OSError:  # the server is restarted now and then
                continue
            if has_notice:
                on_notice("preemption notice")
                return

    threading.Thread(target=ask, name=THREAD_NAME, daemon=True).start()
