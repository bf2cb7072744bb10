"""Serves a model over OpenAI's HTTP API, or over JetStream's gRPC API.

    jzero serve RUN [--host HOST] [--port PORT] [--config.section.field=value ...]
    jzero serve DIR_OR_ID --adapter DIR
    jzero serve DIR_OR_ID --jetstream PORT

RUN is the workdir of a run: its newest export, on its base if it is an adapter, answers with the
run's lengths, dtype and filters. DIR_OR_ID, or --model DIR_OR_ID, is a model without a run.

The HTTP API (extra `serve`) has completions and chats. One thread decodes all requests together
(continuous batching): a request joins at the next call of the device. Another thread serves HTTP.
With --adapter every request is answered by the model with this adapter, in PEFT's format. With
--jetstream, JetStream's gRPC server (extra `jetstream`) replaces HTTP, and decoding is greedy.
"""

import argparse
import contextlib
import os
import socket
import sys
import threading
from dataclasses import replace

import jax

from jzero import cli, config
from jzero.chat import dialogue_settings
from jzero.errors import UserError
from jzero.evaluate import load
from jzero.model import qwen
from jzero.rollout.sampler import Sampler, make_seed
from jzero.run.finished import find_model
from jzero.serving import keys, limits, sockets
from jzero.serving.connections import BoundedConfig
from jzero.serving.ending import GracefulServer
from jzero.serving.http import Server, make_app
from jzero.serving.jetstream import JetStreamEngine, serve_jetstream
from jzero.serving.limits import Limits
from jzero.serving.requests import RequestReader
from jzero.serving.worker import DecodingWorker
from jzero.workers.pool import Pool

STREAMED_TOKENS = 8  # tokens of one decode call, and so of one event of a stream


def parse(arguments: list[str]) -> tuple[argparse.Namespace, config.Config]:
    """Returns the options of the command, and the settings."""
    parser = cli.make_parser("jzero.serve", __doc__)
    parser.add_argument(
        "run", nargs="?", default="", metavar="RUN", help="workdir of a run, or a model"
    )
    parser.add_argument("--model", default="", help="the same as RUN, as a flag")
    parser.add_argument(
        "--adapter",
        default="",
        help="directory or hub id of an adapter of the model, in PEFT's format",
    )
    parser.add_argument(
        "--served-model-name",
        default="",
        metavar="NAME",
        help="name of the model in requests (default: RUN as it is given)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="name or address to listen on (default 127.0.0.1, only this machine)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on, 0 for any that is free (default 8000)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="answer only requests with this key; other users of the machine cannot see it if it "
        f"is in the environment variable {keys.KEY_VARIABLE} instead (default: no key)",
    )
    parser.add_argument(
        "--jetstream",
        type=int,
        metavar="PORT",
        help="serve gRPC there, on every interface; no HTTP",
    )
    limits.add_flags(parser, Limits, "limits of the HTTP server")
    options, config_flags = parser.parse_known_args(arguments)

    if bool(options.run) == bool(options.model):
        parser.error(
            "give one model: jzero serve RUN, where RUN is a workdir, a directory or a hub id"
        )
    options.model = options.model or options.run
    found = find_model(options.model)
    if options.adapter:
        found = replace(found, adapter=options.adapter)
    # As in OpenAI's API, texts do not contain the stop string.
    defaults = dialogue_settings(found)
    defaults.rollout.decode_steps = STREAMED_TOKENS
    settings = cli.parse_settings(defaults, config_flags)
    if options.jetstream is not None:
        if settings.rollout.draft is not None:
            raise UserError(
                f"--jetstream={options.jetstream}: JetStream takes one token of a slot at a time: "
                "set rollout.draft=none, or leave out --jetstream"
            )
        # JetStream takes one token per call.
        settings.rollout.decode_steps = 1
        settings.rollout.num_pages = 0
    config.validate(settings)
    return options, settings


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
        sampler, params = load(settings, Pool(0), has_full_cache)
        seed = make_seed(sampler.engine, (settings.train.seed, 0))
        if options.jetstream is None:
            sockets.listen(options.host, options.port, bound)
    if options.jetstream is not None:
        engine = JetStreamEngine(sampler.engine, sampler.tokenizer, params, seed)
        serve_jetstream(options.jetstream, engine)
    else:
        name = options.served_model_name or options.model
        serve_http(name, sampler, params, seed, bound, limits_of_server, key)


def take_port(options: argparse.Namespace, key: str | None) -> list[socket.socket]:
    """Returns the bound sockets of the HTTP server, none for JetStream. Raises UserError."""
    if options.jetstream is None:
        return sockets.bind(options.host, options.port)
    if key is not None:
        raise UserError(
            f"--jetstream={options.jetstream}: JetStream's server has no API keys: "
            f"leave out --api-key and {keys.KEY_VARIABLE}"
        )
    # JetStream binds its port itself, later: only test here whether the port is free.
    for tried in sockets.bind("", options.jetstream, "--jetstream"):
        tried.close()
    return []


def serve_http(
    model_name: str,
    sampler: Sampler,
    params: qwen.Params,
    seed: jax.Array,
    bound: list[socket.socket],
    limits_of_server: Limits,
    key: str | None,
) -> None:
    """Serves HTTP until Ctrl-C or an error of the decoding thread, and ends the process."""
    # Every connection takes a file descriptor, and the number of these is limited.
    allowed = sockets.allow_connections(limits_of_server.max_connections)
    if allowed < limits_of_server.max_connections:
        print(f"at most {allowed} connections: this process may not open more files (ulimit -n)")
        limits_of_server = replace(limits_of_server, max_connections=allowed)

    worker = DecodingWorker(
        sampler.engine, sampler.tokenizer, limits_of_server.max_waiting_sequences
    )
    reader = RequestReader(
        model_name,
        sampler.engine,
        sampler.tokenizer,
        limits_of_server.max_request_sequences,
        limits_of_server.max_request_logprobs,
    )
    server = Server(reader, worker, limits_of_server)
    thread = threading.Thread(target=worker.run, args=(params, seed), daemon=True)
    thread.start()

    def announce() -> None:
        addresses = " and ".join(f"{sockets.url(opened)}/v1" for opened in bound)
        print(f"{model_name}: listening on {addresses} until Ctrl-C", flush=True)

    configuration = BoundedConfig(make_app(server, key), limits_of_server)
    # uvicorn raises the signal that ended it once more.
    with contextlib.suppress(KeyboardInterrupt):
        GracefulServer(configuration, server, announce).run(bound)
    # An orderly exit would wait for the thread, which may be in the middle of a call. The status is
    # 1 if the thread has ended with an error.
    os._exit(1 if worker.has_ended else 0)


if __name__ == "__main__":
    main()
