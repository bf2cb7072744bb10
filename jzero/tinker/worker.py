"""The one thread that computes: it alternates between training calls and decode calls.

Commands of a model run in their order; the keys take turns, and the models of a key. While requests
are sampled, at most one training call runs between two decode calls, and only if sampling has had
`SAMPLING_SECONDS` since the last one. So neither kind of work starves the other.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from jzero import terminal
from jzero.errors import UserError
from jzero.tinker.devices import Devices, Ended
from jzero.tinker.sampling import Request

SAMPLING_SECONDS = 0.25  # of decoding between two training calls, while both kinds wait


@dataclass(frozen=True)
class Job:
    """A call that needs the device: a training command, or a change of snapshots."""

    queue: str  # jobs of one queue run in order: the id of a model
    run: Callable[[], None]  # reports its result itself
    fail: Callable[[BaseException], None]
    owner: str = ""


class Worker:
    """Runs jobs and samples. `submit` and `sample` may be called by any thread."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.sampling = devices.sampling
        # By owner and by queue. Owners take turns, and the queues of an owner.
        self.jobs: OrderedDict[str, OrderedDict[str, deque[Job]]] = OrderedDict()
        self.last_job = 0.0  # when the last job ended
        self.is_stopping = False
        self.is_ending = False
        self.thread = threading.Thread(target=self.run, name="tinker", daemon=True)

    # -- any thread --------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queues a job."""
        self.sampling.post(partial(self.add_job, job))

    def sample(self, request: Request) -> None:
        """Queues a request."""
        self.sampling.post(partial(self.devices.queue, request))

    def stop(self) -> None:
        """Ends the thread once it has done what is queued."""
        self.sampling.post(self.begin_to_stop)

    def end(self) -> None:
        """Ends the thread after its current call, and then the other hosts."""
        self.is_ending = True
        self.stop()

    # -- the thread --------------------------------------------------------------------------------

    def run(self) -> None:
        """Works until `stop` or `end`."""
        with contextlib.suppress(Ended):
            while not (self.is_stopping and not self.jobs and not self.sampling.waiting):
                self.take(must_wait=not (self.jobs or self.sampling.waiting))
                if self.jobs:
                    self.run_job()
                if self.sampling.waiting:
                    self.run_sampling()
        self.devices.end()

    def take(self, must_wait: bool) -> None:
        """Moves what has arrived to its queue. Blocks if there is nothing else to do.

        Raises Ended after `end`.
        """
        self.sampling.run_posted(must_wait)
        if self.is_ending:
            raise Ended

    def begin_to_stop(self) -> None:
        self.is_stopping = True

    def add_job(self, job: Job) -> None:
        """Adds a job to its queue."""
        queues = self.jobs.setdefault(job.owner, OrderedDict())
        queues.setdefault(job.queue, deque()).append(job)

    def run_job(self) -> None:
        """Runs the first job of the owner and of the model whose turn it is."""
        owner, queues = self.jobs.popitem(last=False)
        name, jobs = queues.popitem(last=False)
        job = jobs.popleft()
        # Both go to the end of the line.
        if jobs:
            queues[name] = jobs
        if queues:
            self.jobs[owner] = queues
        try:
            job.run()
        except UserError as error:
            job.fail(error)
        except Exception as error:
            # One client's failure must not end the server. Its log has the reason.
            terminal.write(traceback.format_exc(), sys.stderr)
            job.fail(error)
        self.last_job = time.monotonic()

    def run_sampling(self) -> None:
        """Samples the requests of one snapshot."""
        try:
            self.devices.sample(self.between_calls)
        except Exception:
            # The requests have failed with this error already.
            terminal.write(traceback.format_exc(), sys.stderr)

    def between_calls(self) -> None:
        """Runs one job between two decode calls, if it is training's turn."""
        self.take(must_wait=False)
        if self.jobs and time.monotonic() - self.last_job > SAMPLING_SECONDS:
            self.run_job()
