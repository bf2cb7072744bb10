"""`python -m jzero.watch RUN [RUN ...] [--port N]`: runs as one live page.

A RUN is a workdir, or a folder of workdirs. The page follows runs that are still writing, shows
finished ones, and overlays the curves of several. It shows curves, the time of each phase, memory,
remarks about what is wrong, and the rollouts of every step with their rewards and tokens.

The page is at http://127.0.0.1:8484/ until Ctrl-C. Nothing is written. A run on another machine is
watched through a tunnel (ssh -L 8484:127.0.0.1:8484 MACHINE), or in a folder that is kept in sync.
`python -m jzero.report` writes the same page into one file.
"""

import sys
from pathlib import Path

from jzero import cli, terminal
from jzero.files import exit_on_mistake
from jzero.run import buckets
from jzero.servers.rules import add_allowed_host, listens_at_loopback
from jzero.watching.runs import Watcher, find_runs
from jzero.watching.server import page_server

PORT = 8484


def make_parser() -> cli.Parser:
    """Returns the parser of the command."""
    parser = cli.make_parser("jzero.watch", __doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=Path, help="workdir of a run, or a folder of them"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: a free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; default 127.0.0.1"
    )
    add_allowed_host(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with exit_on_mistake():
        watch(args.runs, args.host, args.port, args.allowed_host)


def watch(paths: list[Path], host: str, port: int, allowed_hosts: list[str]) -> None:
    """Serves the page until Ctrl-C."""
    directories = [buckets.follow_run(path) for path in paths]
    # A page may be opened before its run has written anything.
    watcher = Watcher(find_runs(directories, is_started=False))
    with page_server(host, port, watcher, allowed_hosts) as server:
        if not listens_at_loopback(host):
            terminal.write(
                f"warning: everybody who reaches {host} can read these runs: there is no password. "
                "ssh -L is safer",
                sys.stderr,
            )
        terminal.write(f"{server.url}/ shows {len(watcher.runs)} run(s), until Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            watcher.stop()
            terminal.write("stopped", sys.stderr)


if __name__ == "__main__":
    terminal.run_command(main)
