"""`python -m jzero.config [NAME]`: the number of settings of every section, or the help on NAME.

NAME is a section such as rollout, or a setting such as rollout.group_size.
"""

import argparse

from jzero import terminal
from jzero.config.describe import count_table, describe
from jzero.errors import UserError
from jzero.terminal import say


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser("python -m jzero.config", description=__doc__)
    parser.add_argument("name", nargs="?", help="a section or a setting")
    name = parser.parse_args().name
    try:
        say(count_table() if name is None else describe(name))
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    terminal.run_command(main)
