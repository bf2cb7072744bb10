"""Serves the Tinker API: clients of the Tinker SDK train and sample adapters of one model.

    python -m jzero.tinker --model DIR_OR_ID [--name Qwen/Qwen3-8B-Base] [--exact]
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python my_loop.py

One thread trains and samples, another one serves HTTP. Clients name the model by --name, which also
tells the cookbook which renderer and tokenizer to use. With --exact the log-probs that `sample`
reports and those that `forward` computes are the same bits. Checkpoints are in --store. Without
--keys only this machine is answered, and every key is accepted.

With several hosts, the same command runs on each of them, next to the flags of the processes:

    python -m jzero.tinker --model DIR_OR_ID --config.rollout.hosts_per_decoder=2
        --config.mesh.tensor=8 --config.mesh.fsdp=1
        --coordinator HOST:PORT --num_processes 2 --process_id 0

Process 0 serves and has the store, and mesh.tensor is the number of all devices. A Cloud TPU and
SLURM need none of the last three flags.

    python -m jzero.tinker --model Qwen3-4B --plan v5e:1x1 --config.model.base=int8

prints whether the server of these flags fits other devices, and compiles its programs for them;
nothing is downloaded. The topologies are those of `python -m jzero.plan`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import jax

import jzero
from jzero import cli, config, terminal
from jzero.blueprint import attached_topology
from jzero.config import drafts
from jzero.decoder.driver import Decoder
from jzero.errors import UserError
from jzero.hosts import broadcast, collectives, peers, processes
from jzero.hosts.broadcast import Receiver, Sender
from jzero.model import huggingface, mtp, tokenizer
from jzero.model.base_model import read_base_model
from jzero.planning.compiling import cache_directory
from jzero.planning.fitting import attached_bytes, set_cpu_devices
from jzero.planning.kv_pool import describe as describe_pool
from jzero.planning.kv_pool import room_of_decoder, with_pages
from jzero.servers import limits, sockets
from jzero.servers.connections import BoundedConfig
from jzero.servers.limits import ConnectionLimits
from jzero.servers.rules import listens_at_loopback, make_hosts
from jzero.servers.running import BoundedServer
from jzero.service.resolve import check_context
from jzero.service.weights import load
from jzero.sharding.publish import publisher
from jzero.tinker.devices import ADVICE, Devices
from jzero.tinker.flags import DEFAULT_CONTEXT, make_parser
from jzero.tinker.http import Api, make_app, make_rules
from jzero.tinker.limits import TinkerLimits
from jzero.tinker.plan import (
    CPU_MICROBATCH_TOKENS,
    PLANNED,
    Residents,
    Server,
    choose_sizes,
    describe_server,
    format_plan,
    make_plan,
    parts_of,
)
from jzero.tinker.sampling import Sampling, Snapshots
from jzero.tinker.service import Served, Service
from jzero.tinker.sessions import Keys, read_keys
from jzero.tinker.store import Store
from jzero.tinker.tenants import Tenants
from jzero.tinker.worker import Worker

DEFAULT_SLOTS = 64
DECODE_STEPS = 8  # tokens of one decode call
END_SECONDS = 60  # for which process 0 waits at its end for the call that all hosts compute


@dataclass(frozen=True)
class Options:
    """What the server trains, and for how many."""

    name: str  # of the model, in requests
    store: Path
    adapters: int  # tenants
    resident: int  # of them on the device
    max_rank: int
    limits: TinkerLimits


def parse(arguments: list[str]) -> tuple[argparse.Namespace, config.Config]:
    """Returns the options of the command, and the settings."""
    options, config_flags = make_parser(__doc__).parse_known_args(arguments)
    for flag in ("adapters", "resident", "max_rank"):
        if getattr(options, flag) < 1:
            raise UserError(f"{limits.flag_name(flag)}={getattr(options, flag)}: give 1 or more")
    context = options.context
    # Not the model's full context by default: a KV cache for 128k tokens would leave room for few
    # slots.
    if not context and options.plan:
        context = DEFAULT_CONTEXT  # a plan reads no file of the model
    elif not context:
        context = min(huggingface.read_positions(options.model) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if context < 2:
        raise UserError(f"--context={context}: give 2 or more")
    defaults = config.Config(
        rollout=config.RolloutConfig(
            # Only their sum counts here.
            max_prompt_tokens=context - context // 2,
            max_new_tokens=context // 2,
            decode_steps=DECODE_STEPS,
            num_slots=DEFAULT_SLOTS,
            temperature=1.0,
        )
    )
    settings = cli.parse_settings(defaults, config_flags)
    settings.model.path = options.model
    if options.exact:
        settings.model.exact = True
    check_settings(settings, options.max_rank)
    return options, settings


def check_settings(settings: config.Config, max_rank: int) -> None:
    """Raises UserError for settings that this server does not have."""
    if settings.model.adapter.rank or settings.model.adapter.path:
        raise UserError(
            "model.adapter: clients choose the shape of their adapters: remove these settings"
        )
    if settings.model.adapter.dropout:
        raise UserError(
            f"model.adapter.dropout={settings.model.adapter.dropout}: the Tinker API has no "
            "dropout: set model.adapter.dropout=0"
        )
    if settings.rollout.decode_devices:
        raise UserError(
            "rollout.placement=apart: training and sampling share the devices: set "
            "rollout.placement=together"
        )
    if settings.rollout.max_turns > 1:
        raise UserError("rollout.max_turns: clients write the turns: remove it")
    # Without an adapter the settings of a frozen base would be refused.
    adapter = config.AdapterConfig(rank=max_rank)
    config.validate(replace(settings, model=replace(settings.model, adapter=adapter)))


def residents_of(options: Options) -> Residents:
    return Residents(options.resident, options.limits.resident_snapshots, options.max_rank)


def with_sizes(settings: config.Config, server: Server, residents: Residents) -> tuple[Server, int]:
    """Returns a server with the KV cache that fits the attached devices, and the tokens of a
    microbatch.

    Prints a line about the KV cache.
    """
    # All hosts use the sizes of the host with the least memory.
    known = collectives.gather_json(attached_bytes(settings.memory))
    available = None if None in known else min(filter(None, known))
    engine = server.decoder
    if available is None:
        # A share of the free memory, which leaves room for training.
        room = room_of_decoder(settings.memory, engine, settings.model)
        tokens = settings.train.microbatch_tokens or CPU_MICROBATCH_TOKENS
        return with_pages(server, room), tokens
    sizes = choose_sizes(settings, parts_of(server, residents), residents, available)
    processes.print_once(describe_pool(engine, sizes.num_pages // engine.num_shards, PLANNED))
    rollout = replace(server.sampling.rollout, num_pages=sizes.num_pages)
    return server.with_rollout(rollout), sizes.microbatch_tokens


def check_hosts(settings: config.Config) -> None:
    """Raises UserError unless the hosts are one decoder, whose tensor axis has all devices."""
    hosts, devices = jax.process_count(), jax.device_count()
    if hosts == 1:
        return
    rollout, mesh = settings.rollout, settings.mesh
    if rollout.hosts_per_decoder != hosts or mesh.tensor != devices:
        raise UserError(
            f"the {hosts} hosts of jzero.tinker train and decode together, every layer split over "
            f"all of their {devices} devices: set --config.rollout.hosts_per_decoder={hosts} "
            f"--config.mesh.tensor={devices}, or start one process on one host"
        )


def make_devices(
    settings: config.Config, options: Options, stream: Sender | Receiver | None = None
) -> Devices:
    """Loads the model on all hosts.

    stream: between the hosts; None for one host.
    """
    set_cpu_devices(settings.model.path)
    check_hosts(settings)
    if isinstance(settings.rollout.draft, drafts.Mtp):
        raise UserError(f"rollout.draft=mtp: jzero.tinker reads no head for drafts; {mtp.ADVICE}")
    base = read_base_model(settings.model)
    check_context(settings, base)
    assert base.directory is not None, "--model is required"
    residents = residents_of(options)
    server = describe_server(settings, base.model, attached_topology(), residents)
    mesh = server.mesh
    if mesh.shape.get("context", 1) > 1:
        raise UserError("mesh.context is not served here: set it to 1")
    server, microbatch_tokens = with_sizes(settings, server, residents)
    engine = server.decoder
    decoding_mesh = engine.mesh

    frozen = load(server, base.directory)
    publish = publisher(base.model, mesh, decoding_mesh, settings.model.dtype)
    snapshots = Snapshots(
        base.model,
        publish(frozen),
        decoding_mesh,
        settings.model.dtype,
        options.limits.resident_snapshots,
        settings.model.exact,
    )
    tenants = Tenants(
        compute=settings.model,
        microbatch_tokens=microbatch_tokens,
        base=base,
        mesh=mesh,
        frozen=frozen,
        longest=engine.max_sequence_tokens,
        most=options.adapters,
        max_rank=options.max_rank,
        resident=options.resident,
    )

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(base.tokenizer, ids)

    sampling = Sampling(Decoder(engine, decode), snapshots, (settings.train.seed, 0))
    return Devices(tenants, sampling, stream)


def make_service(
    settings: config.Config, options: Options, stream: Sender | Receiver | None = None
) -> Service:
    """Loads the model, and returns the server's state. Nothing runs yet."""
    devices = make_devices(settings, options, stream)
    base = devices.tenants.base
    served = Served(options.name, base.model.model_type, base.stop_tokens)
    return Service(served, devices, Worker(devices), Store(options.store), options.limits)


class TinkerServer(BoundedServer):
    """A bounded server that keeps the service's house."""

    def __init__(
        self, configuration: BoundedConfig, api: Api, announce: Callable[[], None]
    ) -> None:
        super().__init__(configuration, announce)
        self.api = api
        self.housekeeping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts accepting connections."""
        await super().startup(sockets)
        self.housekeeping = asyncio.create_task(self.api.keep_house())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the connections. Clients repeat their polls, so none has to be waited for."""
        if self.housekeeping is not None:
            self.housekeeping.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)


def make_server(
    service: Service,
    keys: Keys,
    announce: Callable[[], None] = lambda: None,
    host: str = "127.0.0.1",
    allowed_hosts: Sequence[str] = (),
    connection_limits: ConnectionLimits | None = None,
) -> TinkerServer:
    """Returns the HTTP server of a service, for sockets that are bound to `host`."""
    api = Api(service, keys)
    rules = make_rules(make_hosts(host, allowed_hosts))
    connection_limits = connection_limits or ConnectionLimits()
    return TinkerServer(BoundedConfig(make_app(api), connection_limits, rules), api, announce)


def check_host(host: str, keys: Keys) -> None:
    """Raises UserError for an address that others can reach, without keys."""
    if not listens_at_loopback(host) and not keys.owners:
        raise UserError(f"--host={host}: others could train here: give --keys, or serve 127.0.0.1")


def options_of(given: argparse.Namespace) -> Options:
    """Returns the options of the service."""
    return Options(
        name=given.name or given.model,
        store=Path(given.store),
        adapters=given.adapters,
        resident=given.resident,
        max_rank=given.max_rank,
        limits=limits.read_flags(given, TinkerLimits),
    )


def print_plan(given: argparse.Namespace, settings: config.Config) -> bool:
    """Prints the plan for given.plan. Returns whether the server fits."""
    residents = residents_of(options_of(given))
    plan = make_plan(settings, residents, given.plan, cache_directory())
    terminal.write(format_plan(plan))
    return plan.fits


def start_values(options: Options, settings: config.Config) -> dict[str, object]:
    """Returns what all hosts must have in common, by name, as JSON values.

    The store, the keys and the addresses belong to process 0.
    """
    return {
        "--name": options.name,
        "--adapters": options.adapters,
        "--resident": options.resident,
        "--max-rank": options.max_rank,
        "jzero": jzero.__version__,
        "jax": jax.__version__,
        **{limits.flag_name(name): value for name, value in asdict(options.limits).items()},
        **config.flatten(json.loads(config.to_json(settings))),
    }


def serve(given: argparse.Namespace, settings: config.Config, options: Options) -> None:
    """Serves until Ctrl-C or SIGTERM, and ends this process."""
    keys = read_keys(given.keys)
    check_host(given.host, keys)
    # The port is bound before the model is loaded, so that a port in use is reported at once.
    bound = sockets.bind(given.host, given.port)
    stream = broadcast.open_stream() if peers.has_peers() else None
    service = make_service(settings, options, stream)
    sockets.listen(given.host, given.port, bound)

    def announce() -> None:
        addresses = " and ".join(sockets.url(opened) for opened in bound)
        terminal.write(f"{options.name}: TINKER_BASE_URL={addresses} until Ctrl-C")

    service.worker.thread.start()
    if peers.has_peers():
        # Before, these signals ended all hosts with an error.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, raise_interrupt)
    # uvicorn raises the signal that ended it once more.
    with contextlib.suppress(KeyboardInterrupt):
        make_server(service, keys, announce, given.host, given.allowed_host).run(bound)
    if stream is not None:
        end_hosts(service.worker, stream)
    # An orderly exit would wait for the thread, which may be in the middle of a call.
    os._exit(0)


def raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def end_hosts(worker: Worker, stream: Sender | Receiver) -> None:
    """Ends the other hosts after the call that they compute."""
    worker.end()
    worker.thread.join(END_SECONDS)
    if worker.thread.is_alive():
        peers.end_process(f"host 0 was stopped in a call that took more than {END_SECONDS} s", 1)
    peers.leave()
    stream.close()


def follow(settings: config.Config, options: Options) -> None:
    """Computes what process 0 computes, until it ends, and ends this process."""
    stream = broadcast.open_stream()
    devices = make_devices(settings, options, stream)
    peers.end_on_signals(when="")  # a server has no steps
    # The main thread is free for signals.
    thread = threading.Thread(target=devices.follow, name="tinker", daemon=True)
    thread.start()
    processes.print_everywhere(f"{peers.this_host()} computes with host 0 until it ends")
    thread.join()
    peers.leave()
    stream.close()
    os._exit(0)


def main() -> None:
    """Runs the command."""
    with cli.user_errors():
        if any(argument.split("=")[0] == "--plan" for argument in sys.argv[1:]):
            # Compilation needs no device, and must not take one from a server on this machine.
            jax.config.update("jax_platforms", "cpu")
            sys.exit(0 if print_plan(*parse(sys.argv[1:])) else 1)
        peers.set_advice(ADVICE)
        given, settings = parse(cli.start_jax(sys.argv[1:]))
        options = options_of(given)
        set_cpu_devices(settings.model.path)  # before the first look at the devices
        peers.check_same_start(start_values(options, settings))
        if processes.is_first_process():
            serve(given, settings, options)
        follow(settings, options)


if __name__ == "__main__":
    terminal.run_command(main)
