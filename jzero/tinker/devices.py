"""Everything that touches the devices, the same on all hosts. Only the worker's thread uses it.

With several hosts every program is one of all hosts: each of them has to dispatch the same programs
in the same order. Process 0 serves HTTP and decides. Before it does something here, it publishes
the call with its arguments, and the other processes, which only `follow`, do the same:

    devices.optim_step(model_id, settings)     # process 0: published, then computed
    devices.follow()                           # the others: until process 0 ends

Between two decode calls process 0 publishes a tick with its clock (`decoder.lockstep`). By then all
hosts have taken the same requests and have run the same jobs, so the scheduler decides alike on all
of them. What only process 0 can know is published, too, such as files of checkpoints. Results are
on all hosts, and process 0 answers. An error of a client is raised on all hosts; any other error
ends them all, because their states may differ. Every call carries numbers of the state before it,
which have to be the same.
"""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import NoReturn, cast

import jax

from jzero import terminal
from jzero.decoder.lockstep import News
from jzero.errors import UserError
from jzero.hosts import interrupt, peers
from jzero.hosts.broadcast import Message, Receiver, Sender, StreamEndedError
from jzero.tinker.datums import Datum, FwdBwd
from jzero.tinker.prompt_targets import PromptTargets
from jzero.tinker.sampling import Request, Sampling
from jzero.tinker.tenants import Checkpoint, FwdBwdResult, Shape, Tenants
from jzero.training.optimizer import AdamW

ADVICE = "Start the same command on all hosts: clients resume from their checkpoints"
TUPLES = ("prompt", "stop_ids", "stop_strings", "noise")  # of a Request


class Ended(BaseException):
    """Process 0 ends the server."""


class Devices:
    """The states of all clients on the devices, and the calls that change them."""

    def __init__(
        self, tenants: Tenants, sampling: Sampling, stream: Sender | Receiver | None = None
    ) -> None:
        """stream: between the hosts; None for one host."""
        self.tenants = tenants
        self.sampling = sampling
        self.stream = stream
        sampling.snapshots.share = self.share
        if stream is not None:
            sampling.gather = self.gather

    # -- calls, of the worker of process 0 ---------------------------------------------------------

    def create(self, model_id: str, shape: Shape, seed: int) -> None:
        """See `Tenants.create`."""
        self.publish("create", model_id=model_id, shape=shape._asdict(), seed=seed)
        with self.in_lockstep():
            self.tenants.create(model_id, shape, seed)

    def forward_backward(self, call: FwdBwd) -> FwdBwdResult:
        """See `Tenants.forward_backward`."""
        if self.stream is not None:
            self.publish("forward_backward", **asdict(call))
        with self.in_lockstep():
            return self.tenants.forward_backward(call)

    def optim_step(self, model_id: str, settings: AdamW) -> dict[str, float]:
        """See `Tenants.optim_step`."""
        self.publish("optim_step", model_id=model_id, settings=list(settings))
        with self.in_lockstep():
            return self.tenants.optim_step(model_id, settings)

    def fetch(self, model_id: str, has_optimizer: bool) -> Checkpoint:
        """See `Tenants.fetch`."""
        self.publish("fetch", model_id=model_id, has_optimizer=has_optimizer)
        with self.in_lockstep():
            return self.tenants.fetch(model_id, has_optimizer)

    def load(self, model_id: str, checkpoint: Checkpoint) -> None:
        """See `Tenants.load`."""
        self.publish("load", model_id=model_id, checkpoint=checkpoint_message(checkpoint))
        with self.in_lockstep():
            self.tenants.load(model_id, checkpoint)

    def take_snapshot(self, key: str, model_id: str) -> None:
        """Makes a snapshot of a tenant's adapter."""
        self.publish("take_snapshot", key=key, model_id=model_id)
        with self.in_lockstep():
            tenant = self.tenants.tenant(model_id)
            self.sampling.snapshots.take(key, tenant.shape, tenant.state.params)

    def evict_snapshot(self, key: str) -> None:
        """See `Snapshots.evict`."""
        self.publish("evict_snapshot", key=key)
        with self.in_lockstep():
            self.sampling.snapshots.evict(key)

    def end_session(self, session_id: str, models: list[str], samplers: list[str]) -> None:
        """Frees what a session holds on the devices."""
        self.publish("end_session", session_id=session_id, models=models, samplers=samplers)
        with self.in_lockstep():
            self.sampling.cancel(session_id)
            for model_id in models:
                self.tenants.remove(model_id)
            for sampler in samplers:
                self.sampling.snapshots.drop(sampler)

    def queue(self, request: Request) -> None:
        """Adds a request to those that wait."""
        if self.stream is not None:
            self.publish("queue", **request_message(request))
        self.sampling.queue(request)

    def sample(self, between_calls: Callable[[], None]) -> None:
        """See `Sampling.sample`."""
        self.publish("sample")
        with self.in_lockstep():
            self.sampling.sample(between_calls)

    def end(self) -> None:
        """Ends the other processes in order. The last call."""
        self.publish("end")

    # -- the other processes -----------------------------------------------------------------------

    def follow(self) -> None:
        """Does what process 0 does, until it ends."""
        with self.in_lockstep(), contextlib.suppress(Ended):
            while True:
                self.apply(self.receive())

    def apply(self, message: dict) -> None:
        """Does what a message says."""
        do, given = message.pop("do"), message
        # Process 0 reports the mistakes of clients.
        with contextlib.suppress(UserError):
            match do:
                case "create":
                    self.create(given["model_id"], Shape.of(given["shape"]), given["seed"])
                case "forward_backward":
                    data = [Datum(**datum) for datum in given.pop("data")]
                    self.forward_backward(FwdBwd(**given, data=data))
                case "optim_step":
                    self.optim_step(given["model_id"], AdamW(*given["settings"]))
                case "fetch":
                    self.fetch(**given)
                case "load":
                    self.load(given["model_id"], checkpoint_of(given["checkpoint"]))
                case "take_snapshot":
                    self.take_snapshot(**given)
                case "evict_snapshot":
                    self.evict_snapshot(**given)
                case "end_session":
                    self.end_session(**given)
                case "queue":
                    self.queue(request_of(given))
                case "sample":
                    self.sampling.sample(interrupt.never_stop)
                case "end":
                    raise Ended
                case _:
                    raise AssertionError(f"process 0 has sent {do=} here")

    def follow_to_tick(self) -> News:
        """Does what process 0 does between two decode calls, and returns its news."""
        while (message := self.receive())["do"] != "tick":
            self.apply(message)
        return News(*message["news"])

    # -- both --------------------------------------------------------------------------------------

    def gather(self, news: News) -> list[News]:
        """See `lockstep.Gather`. Only process 0 has news."""
        if isinstance(self.stream, Receiver):
            return [self.follow_to_tick()]
        self.publish("tick", news=[*news])
        return [news]

    def publish(self, do: str, **arguments: object) -> None:
        """Sends a call to the other processes, if this is process 0 of several."""
        if isinstance(self.stream, Sender):
            message = {"do": do, "state": self.fingerprint(), **arguments}
            with ending_all_hosts():
                self.stream.publish(cast(Message, message))

    def receive(self) -> dict:
        """Returns the next call of process 0."""
        assert isinstance(self.stream, Receiver), "process 0 has nothing to receive"
        message = self.stream.receive()
        state, expected = self.fingerprint(), message.pop("state")
        assert state == expected, f"the hosts are out of step: {state} here, {expected} on host 0"
        return message

    def fingerprint(self) -> list[int]:
        """Returns numbers that are equal on all hosts before every call."""
        sampling, snapshots = self.sampling, self.sampling.snapshots
        tenants = self.tenants.by_id.values()
        return [
            len(sampling.waiting),
            len(sampling.live),
            len(sampling.scoring),
            sampling.num_prompts,
            len(tenants),
            sum(tenant.is_resident for tenant in tenants),
            len(snapshots.by_key),
            snapshots.bank.clock if snapshots.bank is not None else 0,
        ]

    def share(self, compute: Callable[[], dict]) -> dict:
        """Returns the result that `compute` has on process 0.

        Raises UserError on all hosts if `compute` fails.
        """
        if self.stream is None:
            return compute()
        if isinstance(self.stream, Receiver):
            message = self.receive()
            assert message["do"] == "share", f"{message['do']=}: the hosts are out of step"
            if message["error"]:
                raise UserError(message["error"])
            return message["result"]
        try:
            result = compute()
        except Exception as error:
            reason = str(error) or type(error).__name__
            self.publish("share", error=reason)
            raise UserError(reason) from error
        self.publish("share", error="", result=result)
        return result

    @contextlib.contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Ends all hosts at an error in the block that may have left them in different states."""
        if self.stream is None:
            yield
            return
        with ending_all_hosts():
            yield
            self.settle()

    def settle(self) -> None:
        """Waits for the programs of this call."""
        # XLA:CPU runs independent programs at the same time: two hosts could begin the collectives
        # of this call and of the next one in different orders. Devices with queues keep the order.
        if jax.default_backend() != "cpu":
            return
        jax.block_until_ready([tenant.state for tenant in self.tenants.by_id.values()])
        if self.sampling.snapshots.bank is not None:
            jax.block_until_ready([group.factors for group in self.sampling.snapshots.bank.groups])


@contextlib.contextmanager
def ending_all_hosts() -> Iterator[None]:
    """Ends all hosts if the block raises an error that is no client's mistake."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        end_all_hosts(error)


def end_all_hosts(error: Exception) -> NoReturn:
    """Ends this process and the others with one line."""
    # A host that was killed explains more than the error of the collective that it left.
    peers.wait_for_verdict()
    is_symptom = isinstance(error, StreamEndedError | jax.errors.JaxRuntimeError)
    if not is_symptom:
        terminal.write("".join(traceback.format_exception(error)), sys.stderr)
    reason = " ".join(str(error).split())[:300] if is_symptom else type(error).__name__
    peers.end_process(f"{peers.this_host()} cannot continue: {reason}. {peers.advice()}", 1)


# -- arguments as messages -------------------------------------------------------------------------


def checkpoint_message(checkpoint: Checkpoint) -> Message:
    named = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
    return named | {"shape": checkpoint.shape._asdict()}


def checkpoint_of(message: dict) -> Checkpoint:
    message["shape"] = Shape.of(message["shape"])
    return Checkpoint(**message)


def request_message(request: Request) -> dict:
    """Returns a request without its callback, which only process 0 has."""
    named = {field.name: getattr(request, field.name) for field in fields(request)}
    del named["done"]
    targets = request.targets
    return named | {"targets": None if targets is None else asdict(targets)}


def request_of(message: dict) -> Request:
    for name in TUPLES:
        message[name] = tuple(message[name])
    if message["targets"] is not None:
        message["targets"] = targets_of(message["targets"])
    return Request(**message, done=answer_nobody)


def targets_of(message: dict) -> PromptTargets:
    message["shape"] = tuple(message["shape"])
    if message["sparse"] is not None:
        message["sparse"] = tuple(message["sparse"])
    return PromptTargets(**message)


def answer_nobody(result: bytes | BaseException) -> None:
    """The `done` of a process that does not serve."""
