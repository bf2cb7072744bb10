"""The flags of the commands that use JAX.

They are here and not next to the commands, because a mistake in a flag is reported before JAX is
imported: `jzero.__main__` reads a command line with these parsers first, and the command again.
"""

import argparse
from pathlib import Path

from jzero import cli
from jzero.cli import Parser
from jzero.errors import shown

SHOWN_PROBLEMS = 5  # of each kind, by `jzero compare`
RETRIES = 8  # of a request; after the pauses of `jzero.http`
MAX_REFUSED = 32  # refused requests before the first answer that end the command
EXPORT_DTYPES = ("bfloat16", "float32")
AUDIT_DTYPES = ("float32", "float16", "bfloat16")
LOGPROB_CONVENTIONS = ("sampled", "unfiltered", "raw")


def recipe() -> Parser:
    """Returns the parser of `python -m jzero.main`, for the flags that are not settings."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    parser.add_argument("--workdir", default="")
    parser.add_argument("--unfinished_status", type=exit_status, default=0)
    parser.add_argument("--show", action="store_true")
    parser.has_settings = parser.has_processes = True
    return parser


def exit_status(text: str) -> int:
    """Returns the exit status of a process from its text."""
    if not text.isdecimal() or int(text) > 255:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not an exit status: give 0 to 255")
    return int(text)


def add_adapters(parser: Parser) -> None:
    """Adds the flag --adapter, which `run.finished.read_adapter_flags` reads."""
    parser.add_argument(
        "--adapter",
        metavar="[NAME=]DIR",
        action="append",
        default=[],
        help="directory or hub id of an adapter of the model, in PEFT's format; with names it may "
        "be given again",
    )


def evaluate(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero evaluate`."""
    parser = cli.make_model_parser("jzero evaluate", doc)
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help="workdir of a run")
    parser.add_argument(
        "--model", default="", help="directory or hub id of a model, as a run exports it"
    )
    add_adapters(parser)
    task_flags = parser.add_mutually_exclusive_group()
    task_flags.add_argument(
        "--suite",
        default="",
        help="comma-separated: aime24, math500, ... (docs/serve-and-export.md), or name=FILE; "
        "default: the held-out problems of RUN",
    )
    task_flags.add_argument(
        "--loglikelihood",
        metavar="FILE",
        action="append",
        default=[],
        help="multiple choice by log-likelihood: a JSONL file of questions; may be given again",
    )
    parser.add_argument("--out", help="directory to write to; default runs/eval-<date>-<time>")
    return parser


def chat(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero chat`."""
    parser = cli.make_model_parser("jzero.chat", doc)
    parser.add_argument("model", metavar="RUN", help="workdir of a run, or a model")
    parser.add_argument("--adapter", default="", help="an adapter of the model, in PEFT's format")
    parser.add_argument("--system", metavar="TEXT", help="system prompt; default: that of the run")
    parser.add_argument(
        "--temperature", type=float, help="default: that of the run's rollouts; 0: greedy"
    )
    return parser


def compare(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero compare`."""
    parser = cli.make_model_parser("jzero.compare", doc)
    parser.add_argument("base", metavar="BASE", help="workdir of a run, or a model")
    parser.add_argument("run", metavar="RUN", help="workdir of a run, or a model")
    parser.add_argument("--suite", default="", help="other problems than those held out")
    parser.add_argument("--out", help="directory to write to; default runs/compare-<date>-<time>")
    parser.add_argument(
        "--show", type=int, default=SHOWN_PROBLEMS, help="problems to list of each kind"
    )
    return parser


def generate(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero generate`."""
    parser = cli.make_model_parser("jzero.generate", doc)
    parser.add_argument(
        "--model",
        default="",
        help="directory or hub id of a model; with --base-url the name that the servers know",
    )
    parser.add_argument(
        "--model-name",
        default="",
        help="the name that the servers of --base-url know, if it is not --model",
    )
    parser.add_argument(
        "--adapter",
        default="",
        help="directory or hub id of an adapter of the model, in PEFT's format",
    )
    parser.add_argument("--data", default="", help="problems, as in task.data")
    parser.add_argument("--n", type=int, default=1, help="responses to each problem")
    parser.add_argument(
        "--greedy",
        action="store_true",
        help="take the most probable token each time, regardless of rollout.temperature",
    )
    parser.add_argument("--limit", type=int, default=0, help="number of problems; default all")
    parser.add_argument(
        "--out", required=True, type=Path, help="file of JSON lines to write or to continue"
    )
    parser.add_argument(
        "--group", action="store_true", help="write one row for each problem, with lists"
    )
    parser.add_argument(
        "--base-url",
        help="server: http://HOST:PORT/v1, or several servers of the same model with commas "
        "between them; the key is read from OPENAI_API_KEY",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument(
        "--retries",
        type=int,
        default=RETRIES,
        help=f"times that a failed request is repeated, after growing pauses; default {RETRIES}",
    )
    parser.add_argument(
        "--max-refused",
        type=int,
        default=MAX_REFUSED,
        help="refused requests before the first answer that end the command, 0 for no limit; "
        f"default {MAX_REFUSED}",
    )
    parser.add_argument(
        "--retry-errors",
        action="store_true",
        help="ask again for the responses that have an error in the file",
    )
    parser.add_argument(
        "--no-gold",
        action="store_true",
        help="the problems need no answers, and responses are not graded",
    )
    parser.add_argument(
        "--split", help="split of the set to answer, in its order; default the training problems"
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="USER/NAME",
        help="data set on the hub that gets the complete file; created if there is none",
    )
    parser.add_argument("--private", action="store_true", help="create a private data set")
    parser.add_argument(
        "--force", action="store_true", help="replace the files that the data set has"
    )
    return parser


def sample(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero sample`."""
    parser = cli.make_model_parser("jzero.sample", doc)
    parser.add_argument(
        "--join", required=True, metavar="STORE", help="rollout.placement.store of the run"
    )
    parser.add_argument(
        "--name", default="", help="name in the log of the run (default: host and process)"
    )
    parser.add_argument(
        "--idle-minutes",
        type=float,
        default=0.0,
        help="ends after this time without a request (default: never)",
    )
    parser.add_argument(
        "--programs", metavar="DIR", help="keeps compiled programs there, for the next start"
    )
    return parser


def replay(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero replay`."""
    parser = cli.make_model_parser("jzero.replay", doc)
    parser.add_argument("run", metavar="RUN", help="workdir of a run", type=Path)
    parser.add_argument("--step", type=int, help="only the rollouts of this step")
    parser.add_argument(
        "--requests", type=int, default=0, help="only this many of the newest requests (0: all)"
    )
    return parser


def audit(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero audit`."""
    parser = cli.make_parser("jzero.audit", doc)
    parser.has_processes = True
    parser.add_argument("log", metavar="LOG", type=Path, help="rollouts, JSON lines")
    parser.add_argument("--model", required=True, help="directory or hub id of the claimed model")
    parser.add_argument("--adapter", help="directory or hub id of its PEFT adapter")
    parser.add_argument(
        "--also",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="other weights that may have sampled: a model, or an adapter of --model",
    )
    parser.add_argument(
        "--dtype", choices=AUDIT_DTYPES, default="bfloat16", help="of the sampler's activations"
    )
    parser.add_argument(
        "--logprobs",
        choices=LOGPROB_CONVENTIONS,
        default=LOGPROB_CONVENTIONS[0],
        help="what the logged log-probs are: after temperature and filters (sampled), before the "
        "filters (unfiltered), or at temperature 1 (raw, the default of vLLM)",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of rows without one")
    parser.add_argument("--top_k", type=int, default=0, help="of rows without one; 0: all tokens")
    parser.add_argument("--top_p", type=float, default=1.0, help="of rows without one")
    parser.add_argument(
        "--ends",
        default="",
        help="end tokens of the sampler, as 2,7; none: it stopped at no token. Default: "
        "eos_token_id in generation_config.json or config.json",
    )
    parser.add_argument("--limit", type=int, default=0, help="read only N rows; 0: all")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON")
    return parser


def export(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero export`."""
    parser = cli.make_parser("jzero.export", doc)
    parser.add_argument("--workdir", required=True, type=Path, help="workdir of a run")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--step", type=int, help="step of a checkpoint; default the newest")
    parser.add_argument(
        "--dtype",
        choices=EXPORT_DTYPES,
        default="float32",
        help="type of the weights; default float32, as trained",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the run's adapter, in PEFT's format; default: merged into its base",
    )
    parser.add_argument(
        "--license",
        default="",
        help="license of the model, as the hub names it: apache-2.0, ...; default the run's "
        "hub.card.license",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an earlier export, and push to a branch that exists",
    )
    parser.add_argument(
        "--push-to-hub", metavar="USER/NAME", help="model on the hub; created if there is none"
    )
    parser.add_argument(
        "--revision", help="branch to push to, created if there is none; default main"
    )
    parser.add_argument(
        "--public",
        action="store_true",
        help="create a public model; default: a private one, and a public one is refused",
    )
    parser.add_argument(
        "--tag", action="append", default=[], help="tag of the model card; may be given repeatedly"
    )
    parser.add_argument(
        "--language",
        action="append",
        default=[],
        help="language of the model card, such as en; may be given repeatedly",
    )
    return parser


def plan(doc: str | None = None) -> Parser:
    """Returns the parser of `jzero plan`."""
    parser = cli.make_parser("jzero.plan", doc)
    parser.has_settings = True
    parser.passes_on = recipe().flags()
    parser.add_argument("--topology", help="devices to compile for, as above")
    parser.add_argument(
        "--machine", metavar="NAME", help="a usual machine, or here; compiles nothing"
    )
    parser.add_argument("--model", help="instead of the recipe's, such as Qwen2.5-3B")
    parser.add_argument(
        "--largest", action="store_true", help="the largest model that trains; compiles nothing"
    )
    parser.add_argument(
        "--score",
        action="store_true",
        help="plan the programs that score given tokens, too, as a teacher or a server runs them",
    )
    parser.add_argument(
        "--packs", type=Path, metavar="WORKDIR", help="compare values of train.pack for a run"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="what `jzero train` chooses for known models on usual machines; compiles nothing",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON, too")
    return parser
