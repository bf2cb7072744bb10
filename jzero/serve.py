"""Serves a model over OpenAI's HTTP API, or over JetStream's gRPC API.

    python -m jzero.serve --model DIR [--host HOST] [--port PORT] [--config.section.field=value ...]
    python -m jzero.serve --model DIR --jetstream PORT

The HTTP API (extra `serve`) has completions and chats. One thread decodes all requests together,
and new ones join at its next call of the device; another thread speaks HTTP. With --jetstream,
JetStream's gRPC server (extra `jetstream`) takes the place of HTTP, and decoding is greedy.
"""

import argparse
import os
import sys
import threading

import jax
import uvicorn

from jzero import cli, config, evaluate
from jzero.grading.pool import Pool
from jzero.model import qwen
from jzero.rollout.sampler import Sampler, make_seed
from jzero.serving.http import make_app
from jzero.serving.jetstream import JetStreamEngine, serve_jetstream
from jzero.serving.requests import RequestReader
from jzero.serving.worker import DecodingWorker

STREAMED_TOKENS = 8  # tokens of one call, which is how many a stream sends at a time


def parse(arguments: list[str]) -> tuple[argparse.Namespace, config.Config]:
    """Returns the options of the command, and the settings."""
    parser = cli.make_parser("jzero.serve", __doc__)
    parser.add_argument(
        "--model", required=True, help="directory or hub id of a model, as a run exports it"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--jetstream",
        type=int,
        metavar="PORT",
        help="serve gRPC there, on every interface; no HTTP",
    )
    options, rest = parser.parse_known_args(arguments)

    defaults = evaluate.defaults(options.model)
    defaults.rollout.decode_steps = STREAMED_TOKENS
    defaults.rollout.keep_stop = False
    settings = cli.parse_settings(defaults, rest)
    settings.model.path = options.model
    if options.jetstream:
        # JetStream takes one token a call and knows no preemption.
        settings.rollout.decode_steps = 1
        settings.rollout.num_pages = 0
    config.validate(settings)
    return options, settings


def main() -> None:
    """Runs the command."""
    with cli.user_errors():
        options, settings = parse(cli.start_jax(sys.argv[1:]))
        sampler, params = evaluate.load(settings, Pool(0))
        seed = make_seed(sampler.engine, (settings.train.seed, 0))
    if options.jetstream:
        engine = JetStreamEngine(sampler.engine, sampler.tokenizer, params, seed)
        serve_jetstream(options.jetstream, engine)
    else:
        serve_http(options, sampler, params, seed)


def serve_http(
    options: argparse.Namespace, sampler: Sampler, params: qwen.Params, seed: jax.Array
) -> None:
    """Serves HTTP until Ctrl-C or an error of the decoding thread, and ends the process."""
    worker = DecodingWorker(sampler.engine, sampler.tokenizer)
    reader = RequestReader(options.model, sampler.engine, sampler.tokenizer)
    thread = threading.Thread(target=worker.run, args=(params, seed), daemon=True)
    thread.start()
    print(f"{options.model} on http://{options.host}:{options.port}/v1 until Ctrl-C", flush=True)
    uvicorn.run(
        make_app(reader, worker),
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    # An orderly exit would wait for the thread, which may be inside a call. The status is 1 if the
    # thread has ended before, because of an error.
    os._exit(0 if thread.is_alive() else 1)


if __name__ == "__main__":
    main()
