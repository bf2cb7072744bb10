"""The flags of `jzero tinker`. Imports no jax: a mistake in a flag is reported at once."""

from jzero import cli
from jzero.cli import Parser
from jzero.servers import limits
from jzero.servers.rules import add_allowed_host
from jzero.tinker.limits import TinkerLimits

DEFAULT_CONTEXT = 4096


def make_parser(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero tinker`."""
    parser = cli.make_model_parser("jzero.tinker", doc)
    parser.add_argument("--model", required=True, help="directory or hub id of the base model")
    parser.add_argument(
        "--name", default="", help="name of the model in requests (default: --model)"
    )
    parser.add_argument(
        "--adapters", type=int, default=4, metavar="N", help="adapters in training (default 4)"
    )
    parser.add_argument(
        "--resident",
        type=int,
        default=2,
        metavar="N",
        help="adapters whose optimizer states are on the device; the others wait on the host "
        "(default 2)",
    )
    parser.add_argument(
        "--max-rank", type=int, default=64, metavar="R", help="largest rank (default 64)"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=0,
        metavar="TOKENS",
        help=f"tokens of a prompt and its sample, and of a datum (default: the model's positions, "
        f"at most {DEFAULT_CONTEXT})",
    )
    parser.add_argument("--exact", action="store_true", help="sampler and trainer agree to the bit")
    parser.add_argument(
        "--store", default="tinker-store", metavar="DIR", help="checkpoints (default tinker-store)"
    )
    parser.add_argument("--keys", default="", metavar="FILE", help="lines of NAME tml-KEY")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    add_allowed_host(parser)
    parser.add_argument(
        "--plan", default="", metavar="TOPOLOGY", help="plan for devices such as v5e:1x1, and end"
    )
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for any (default 8000)")
    limits.add_flags(parser, TinkerLimits, "limits of the server")
    return parser
