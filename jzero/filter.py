"""`python -m jzero.filter --data DATA --out FILE.jsonl [--rates FILE --min 0.1 --max 0.9] [--against SUITE,...]`

What is worth training on, of a published set. --rates is what `python -m jzero.evaluate --suite mine=DATA
--config.eval.samples=8` wrote of the same set: problems solved at least --max or at most --min of the time are dropped.
--against drops problems that share --ngram words in a row with a problem of a suite (aime24,math500=FILE,...)."""

import json
from collections.abc import Sequence
from pathlib import Path

from jzero import cli
from jzero.errors import UserError
from jzero.files import write_atomic
from jzero.tasks import problem_sets, suites


def by_rate(rates: dict[int, float], count: int, least: float, most: float) -> set[int]:
    """Rows whose pass rate is strictly between the two."""
    known = rates.keys() & range(count)
    if not known:
        raise UserError(
            f"--rates knows none of the {count} rows: evaluate this set as --suite name=DATA"
        )
    return {i for i in known if least < rates[i] < most}


def apart(problems: Sequence[str], known: Sequence[str], n: int) -> set[int]:
    """Rows that share no n words in a row with any known problem; a shorter known problem counts whole."""
    seen = {gram for text in known for gram in problem_sets.grams(text, n)}
    sizes = set(map(len, seen))
    return {
        i
        for i, text in enumerate(problems)
        if not any(seen & problem_sets.grams(text, size) for size in sizes)
    }


def read_rates(path: str) -> dict[int, float]:
    """Pass rate by row, of a file of jzero.evaluate: the number at the end of an id is the row."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        return {int(row["id"].rpartition("/")[2]): float(row["accuracy"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--rates {path} is not a file that jzero.evaluate wrote ({error})"
        ) from None


@cli.user_errors()
def main() -> None:
    parser = cli.make_parser("jzero.filter", __doc__)
    parser.add_argument("--data", required=True, help="local file or directory, hub id, config@id")
    parser.add_argument(
        "--out",
        required=True,
        help="JSON lines to write: the rows that are kept, all their columns",
    )
    parser.add_argument("--rates", help="per-problem file of jzero.evaluate")
    parser.add_argument("--min", type=float, default=0.1)  # this and the other two: as in open-r1
    parser.add_argument("--max", type=float, default=0.9)
    parser.add_argument(
        "--against", help=f"comma-separated: {', '.join(suites.SUITES)}, or name=FILE"
    )
    parser.add_argument("--ngram", type=int, default=8)
    given = parser.parse_args()
    if not given.rates and not given.against:
        raise UserError("nothing to filter by: give --rates or --against")
    if given.ngram < 1:
        raise UserError(f"--ngram={given.ngram} must be at least 1")
    dataset = problem_sets.load_split(given.data, "train", "test")
    count, kept = len(dataset), {}
    if given.rates:
        kept["too easy or too hard"] = by_rate(read_rates(given.rates), count, given.min, given.max)
    if given.against:
        known = [text for spec in suites.split_commas(given.against) for text in suites.texts(spec)]
        kept["in a suite"] = apart(problem_sets.questions(dataset, given.data), known, given.ngram)
    rows = dataset.select(sorted(set.intersection(*kept.values())))
    write_atomic(
        given.out, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    )
    dropped = [f"{count - len(some)} {name}, " for name, some in kept.items()]
    print(f"{count} rows, {''.join(dropped)}{len(rows)} kept")


if __name__ == "__main__":
    main()
