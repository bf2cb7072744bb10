"""Selects the rows of a set of questions that are worth training on.

    python -m jzero.filter --data DATA --out FILE.jsonl [--rates FILE] [--against SUITE,...]

--rates is the file of pass rates that `jzero evaluate --suite mine=DATA
--config.eval.samples=8` wrote for the same set. Questions with a pass rate of at most --min or at
least --max are dropped: groups of rollouts that are all wrong or all right teach nothing.
--against drops the questions that share --ngram words in a row with a question of a suite
(aime24,math500=FILE,...), so that the suite measures learning and not memorization.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from jzero import cli, json_values, terminal
from jzero.config.data_sources import read_source, split_sources
from jzero.errors import UserError, reason_of
from jzero.files import check_not_input, check_output, parse_json, read_lines, write_atomic
from jzero.problems import problem_sets, row_loader
from jzero.problems.overlap import word_ngrams
from jzero.tasks import suites

MAX_INDEX = 2**53  # of a row


def rows_by_rate(rates: dict[int, float], count: int, lowest: float, highest: float) -> set[int]:
    """Returns the rows with a pass rate strictly between the bounds.

    Args:
        rates: the pass rate of each row, by its index.
        count: the number of rows in the set.
        lowest: exclusive lower bound.
        highest: exclusive upper bound.

    Raises:
        UserError: `rates` has none of the rows 0..count - 1, so it belongs to another set.
    """
    known_rows = rates.keys() & range(count)
    if not known_rows:
        raise UserError(
            f"--rates has none of the {count} rows: evaluate this set as --suite name=DATA"
        )
    # Rows without a rate are dropped: the evaluation left out prompts that are too long.
    return {i for i in known_rows if lowest < rates[i] < highest}


def rows_without_overlap(
    problems: Sequence[str],
    suite_questions: Sequence[str],
    n: int,
) -> set[int]:
    """Returns the indices of the problems that share no n words in a row with a suite.

    A suite question with fewer than n words is compared as a whole.
    """
    suite_ngrams: set[tuple[str, ...]] = set()
    for text in suite_questions:
        suite_ngrams |= word_ngrams(text, n)
    # Only n-grams of equal length can be equal.
    sizes = {len(ngram) for ngram in suite_ngrams}  # n, and the lengths of shorter suite questions
    rows = set()
    for i, text in enumerate(problems):
        shares_words = any(suite_ngrams & word_ngrams(text, size) for size in sizes)
        if not shares_words:
            rows.add(i)
    return rows


def read_rates(path: str) -> dict[int, float]:
    """Returns the pass rate of each row, by its index, from a file that `jzero evaluate` wrote.

    Raises:
        UserError: the file cannot be read or has another format.
    """
    rates = {}
    try:
        for number, line in read_lines(path, name=f"--rates {path}"):
            row = parse_json(line, Path(path), number)
            # The index of a row is at the end of its id, as in "mine/17".
            _, _, digits = json_values.member(row, ("id",), str).rpartition("/")
            index = json_values.bounded_int(int(digits), 0, MAX_INDEX, "the index in id")
            rates[index] = json_values.bounded_number(row.get("accuracy"), 0, 1, "accuracy")
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"--rates {path} is not a file that jzero evaluate wrote ({reason_of(error)})"
        ) from None
    return rates


def make_parser() -> cli.Parser:
    """Returns the parser of the command's flags. The defaults are open-r1's."""
    parser = cli.make_parser("jzero.filter", __doc__)
    parser.add_argument("--data", required=True, help="local file or directory, hub id, config@id")
    parser.add_argument(
        "--out", required=True, type=Path, help="JSON lines to write: the rows that are kept"
    )
    parser.add_argument("--force", action="store_true", help="replace --out if it exists")
    parser.add_argument("--rates", help="file of pass rates that jzero evaluate wrote")
    parser.add_argument("--min", type=float, default=0.1, help="drop rows of this rate or less")
    parser.add_argument("--max", type=float, default=0.9, help="drop rows of this rate or more")
    known_suites = ", ".join(suites.SUITES)
    parser.add_argument("--against", help=f"comma-separated: {known_suites}, or name=FILE")
    # 8 words also catch stock phrases: they drop 1,387 of MATH-12k's 11,974 problems against
    # MATH-500, and 13 words drop 242 (lab/log.md, 2026-11-20).
    parser.add_argument(
        "--ngram", type=int, default=8, help="words in a row that must not be shared"
    )
    return parser


@cli.user_errors()
def main() -> None:
    arguments = make_parser().parse_args()
    if not arguments.rates and not arguments.against:
        raise UserError("nothing to filter by: give --rates or --against")
    if arguments.ngram < 1:
        raise UserError(f"--ngram={arguments.ngram} must be at least 1")

    # The output must not overwrite an input.
    rows = read_source("--data", arguments.data)
    check_not_input(arguments.out, Path(rows.path), "--data")
    if arguments.rates:
        check_not_input(arguments.out, Path(arguments.rates), "--rates")
    check_output(arguments.out, arguments.force)

    dataset = row_loader.open_rows(rows, "train", "--data")
    count = len(dataset)

    # The rows that pass each filter, keyed by the reason for dropping the others.
    passed: dict[str, set[int]] = {}
    if arguments.rates:
        rates = read_rates(arguments.rates)
        passed["too easy or too hard"] = rows_by_rate(rates, count, arguments.min, arguments.max)
    if arguments.against:
        suite_questions = []
        for spec in split_sources(arguments.against):
            suite_questions += suites.load_questions(spec)
        questions = problem_sets.read_questions(dataset, rows.path, rows.problem)
        passed["in a suite"] = rows_without_overlap(questions, suite_questions, arguments.ngram)

    # A row must pass every filter. The output keeps the order of the set.
    kept = sorted(set.intersection(*passed.values()))
    rows_kept = dataset.select(kept)
    # default=str: dates and decimals are no values of JSON.
    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows_kept]
    write_atomic(arguments.out, "".join(f"{line}\n" for line in lines))

    dropped = [f"{count - len(rows)} {reason}" for reason, rows in passed.items()]
    terminal.write(", ".join([f"{count} rows", *dropped, f"{len(kept)} kept"]))


if __name__ == "__main__":
    terminal.run_command(main)
