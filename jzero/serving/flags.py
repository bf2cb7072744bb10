"""The flags of `jzero serve`. Imports no jax: a mistake in a flag is reported at once."""

from jzero import cli
from jzero.cli import Parser
from jzero.command_flags import add_adapters
from jzero.servers import limits
from jzero.servers.rules import add_allowed_host
from jzero.serving import keys
from jzero.serving.limits import Limits


def make_parser(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero serve`."""
    parser = cli.make_model_parser("jzero.serve", doc)
    parser.add_argument(
        "run", nargs="?", default="", metavar="RUN", help="workdir of a run, or a model"
    )
    parser.add_argument("--model", default="", help="the same as RUN, as a flag")
    add_adapters(parser)
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
    add_allowed_host(parser)
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
    return parser
