"""Serves a model over OpenAI's HTTP API, or over JetStream's gRPC API.

    jzero serve RUN [--host HOST] [--port PORT] [--config.section.field=value ...]
    jzero serve DIR_OR_ID --adapter DIR
    jzero serve DIR_OR_ID --adapter NAME=DIR --adapter NAME=DIR
    jzero serve DIR_OR_ID --jetstream PORT

RUN is the workdir of a run: its newest export, on its base if it is an adapter, answers with the
run's lengths, dtype and filters. DIR_OR_ID, or --model DIR_OR_ID, is a model without a run.

The HTTP API has completions and chats. One thread decodes all requests together
(continuous batching): a request joins at the next call of the device. Another thread serves HTTP.
With --adapter DIR every request is answered by the model with this adapter, in PEFT's format. With
--adapter NAME=DIR, once for every adapter, the model of a request chooses an adapter by its name,
or the base; one batch has requests for all of them. With --jetstream, JetStream's gRPC server
(extra `jetstream`) replaces HTTP, and decoding is greedy.
"""

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace

from jzero import cli, config, terminal
from jzero.chat import dialogue_settings
from jzero.cores import num_cores
from jzero.decoder.adapter_bank import MOST_SHAPES, AdapterBank, HeldAdapter
from jzero.decoder.driver import make_seed
from jzero.errors import UserError
from jzero.hosts.platform import is_cpu_chosen
from jzero.model import qwen
from jzero.rollout.sampler import Sampler
from jzero.run.finished import find_model, read_adapter_flags
from jzero.servers import limits, sockets
from jzero.servers.connections import BoundedConfig
from jzero.servers.rules import Rules, make_hosts
from jzero.service.decoders import load, load_with_adapters
from jzero.serving import keys
from jzero.serving.ending import GracefulServer
from jzero.serving.flags import make_parser
from jzero.serving.http import Server, make_app, make_rules
from jzero.serving.jetstream import JetStreamEngine, serve_jetstream
from jzero.serving.limits import Limits
from jzero.serving.requests import RequestReader
from jzero.serving.worker import DecodingWorker
from jzero.workers.pool import Pool

# A decode step computes all slots, also the idle ones. On a CPU a step of many slots takes longer:
# with more than this, a single request would wait for idle slots.
SLOTS_OF_A_CORE = 4
STREAMED_TOKENS = 8  # tokens of one decode call, and so of one event of a stream


def parse(arguments: list[str]) -> tuple[argparse.Namespace, config.Config]:
    """Returns the options of the command, and the settings."""
    parser = make_parser(__doc__)
    options, config_flags = parser.parse_known_args(arguments)

    if bool(options.run) == bool(options.model):
        parser.error(
            "give one model: jzero serve RUN, where RUN is a workdir, a directory or a hub id"
        )
    options.model = options.model or options.run
    options.adapters = read_adapter_flags(options.adapter)
    found = find_model(options.model)
    if options.adapters:
        found = replace(found, adapter=options.adapters.pop("", ""))
    # As in OpenAI's API, texts do not contain the stop string.
    defaults = dialogue_settings(found)
    defaults.rollout.decode_steps = STREAMED_TOKENS
    if is_cpu_chosen():
        cores = num_cores()
        defaults.rollout.num_slots = min(defaults.rollout.num_slots, SLOTS_OF_A_CORE * cores)
    settings = cli.parse_settings(defaults, config_flags)
    if options.jetstream is not None:
        if settings.rollout.draft is not None:
            raise UserError(
                f"--jetstream={options.jetstream}: JetStream takes one token of a slot at a time: "
                "set rollout.draft=none, or remove --jetstream"
            )
        # JetStream takes one token per call.
        settings.rollout.decode_steps = 1
        settings.rollout.num_pages = 0
    check_adapters(options, settings)
    config.validate(settings)
    return options, settings


def check_adapters(options: argparse.Namespace, settings: config.Config) -> None:
    """Raises UserError for options that cannot be with adapters by name."""
    if not options.adapters:
        return
    served_name = options.served_model_name or options.model
    if served_name in options.adapters:
        raise UserError(f"--adapter {served_name}=...: this is the name of the base")
    if settings.model.adapter.path:
        raise UserError("model.adapter.path: remove it, or --adapter NAME=DIR")
    if options.jetstream is not None:
        raise UserError(
            f"--jetstream={options.jetstream}: JetStream's requests name no model: give one "
            "--adapter DIR"
        )


@terminal.keep_stdout_for_answers()
def main() -> None:
    """Runs the command."""
    with cli.user_errors():
        options, settings = parse(cli.start_jax(sys.argv[1:]))
        key = keys.read_key(options.api_key)
        limits_of_server = limits.read_flags(options, Limits)
        # The port is bound before the model is loaded, so that a port in use is reported at once.
        bound = take_port(options, key)
        # JetStream has no preemption, so every slot needs all of its pages.
        has_full_cache = options.jetstream is not None
        held: dict[str, HeldAdapter] = {}
        if options.adapters:
            sampler, params, held = load_bank(settings, options.adapters)
        else:
            sampler, params = load(settings, Pool(0), has_full_cache)
        noise = settings.train.seed, 0  # keys the noise
        sampler.warn_of_missing_stop()
        if options.jetstream is None:
            sockets.listen(options.host, options.port, bound)
    if options.jetstream is not None:
        seed = make_seed(sampler.engine, noise)
        engine = JetStreamEngine(sampler.engine, sampler.tokenizer, params, seed)
        serve_jetstream(options.jetstream, engine)
    else:
        name = options.served_model_name or options.model
        rules = make_rules(make_hosts(options.host, options.allowed_host))
        serve_http(name, sampler, params, held, noise, bound, limits_of_server, rules, key)


def load_bank(
    settings: config.Config, named: Mapping[str, str]
) -> tuple[Sampler, qwen.Params, dict[str, HeldAdapter]]:
    """Returns a sampler, weights with the adapters of `named`, and their places by name."""
    loaded = load_with_adapters(settings, named, Pool(0))
    engine = loaded.sampler.engine
    bank = AdapterBank(
        engine.model,
        loaded.base,
        engine.mesh,
        engine.dtype,
        most_slots=len(named),
        exact=settings.model.exact,
    )
    held: dict[str, HeldAdapter] = {}
    for adapter in loaded.adapters:
        place = None
        try:
            if bank.add(adapter.name, adapter.settings, adapter.factors):
                place = bank.hold(adapter.name)
        except UserError as error:
            raise UserError(f"--adapter {adapter.name}={named[adapter.name]}: {error}") from None
        if place is None:
            raise UserError(
                f"--adapter {adapter.name}={named[adapter.name]}: at most {MOST_SHAPES} different "
                "ranks and sets of targets can be served together: remove this adapter"
            )
        held[adapter.name] = place
    return loaded.sampler, bank.params, held


def take_port(options: argparse.Namespace, key: str | None) -> list[socket.socket]:
    """Returns the bound sockets of the HTTP server, none for JetStream. Raises UserError."""
    if options.jetstream is None:
        return sockets.bind(options.host, options.port)
    if key is not None:
        raise UserError(
            f"--jetstream={options.jetstream}: JetStream's server has no API keys: "
            f"remove --api-key and {keys.KEY_VARIABLE}"
        )
    # JetStream binds its port itself, later: only test here whether the port is free.
    for tried in sockets.bind("", options.jetstream, "--jetstream"):
        tried.close()
    return []


def serve_http(
    model_name: str,
    sampler: Sampler,
    params: qwen.Params,
    held: Mapping[str, HeldAdapter],
    noise: tuple[int, int],
    bound: list[socket.socket],
    limits_of_server: Limits,
    rules: Rules,
    key: str | None,
) -> None:
    """Serves HTTP until Ctrl-C or an error of the decoding thread, and ends the process."""
    worker = DecodingWorker(
        sampler.engine, sampler.tokenizer, limits_of_server.max_waiting_sequences
    )
    reader = RequestReader(
        model_name,
        sampler.engine,
        sampler.tokenizer,
        limits_of_server.max_request_sequences,
        limits_of_server.max_request_logprobs,
        held,
        keeps_control_tokens=sampler.task.control_tokens,
    )
    server = Server(reader, worker, limits_of_server)
    thread = threading.Thread(target=worker.serve, args=(params, noise), daemon=True)
    thread.start()

    def announce() -> None:
        addresses = " and ".join(f"{sockets.url(opened)}/v1" for opened in bound)
        names = ", ".join(reader.models)
        terminal.write(f"{names}: listening on {addresses} until Ctrl-C")

    configuration = BoundedConfig(make_app(server, key), limits_of_server, rules)
    allowed = configuration.limits.max_connections
    if allowed < limits_of_server.max_connections:
        terminal.say(
            f"at most {allowed} connections: this process may not open more files (ulimit -n)"
        )
    # uvicorn raises the signal that ended it once more.
    with contextlib.suppress(KeyboardInterrupt):
        GracefulServer(configuration, server, announce).run(bound)
    # An orderly exit would wait for the thread, which may be in the middle of a call. The status is
    # 1 if the thread has ended with an error.
    os._exit(1 if worker.has_ended else 0)


if __name__ == "__main__":
    terminal.run_command(main)
