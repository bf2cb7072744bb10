"""Prints how the grader judges neighbors: answers that are almost the gold, and the gold rewritten.

    python tests/attacks/neighbors.py                  # every kind, and mutated golds
    python tests/attacks/neighbors.py --rounds 100     # more pairs of each kind
    python tests/attacks/neighbors.py --pairs FILE     # pairs from a file, and those it misses

Pairs of each kind are made by `neighbor_kinds` (and by `neighbors_layout`, of layout and spellings)
in as many rounds as wanted; a pair that was made before is not counted again. Where the folder
`shared` lies next to the repository (or `--data` names another), golds of MATH and OlympiadBench
are changed by one character, too. The table has a row for each kind: equal pairs credited and
refused, different pairs credited and refused, pairs per second of processor time, and the slowest
pair in milliseconds.

The exit status is 1 if a different pair is credited, if more than 3 % of the equal pairs are
refused, or if a pair takes more than half a second. FILE is a Python file with a list CASES of
(kind, answer, gold, "E" or "D", ...), or JSON lines with `answer`, `gold` and `equal`.
"""

import argparse
import json
import random
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import neighbors_layout
from neighbor_kinds import KINDS, Pair, Pairs

from jzero.answers.verdict import grade

LARGEST_SHARE_REFUSED = 0.03
SLOWEST_SECONDS = 0.5
ROUNDS = 40
SHARED = Path(__file__).resolve().parents[3] / "shared/data"
DIGITS = "0123456789"
SYMBOLS = "abknxyz"
EXCHANGED = {"+": "-", "<": ">", ">": "<"}


@dataclass
class Row:
    """The counts of one kind."""

    credited: int = 0  # equal pairs
    refused: int = 0
    wrongly_credited: int = 0  # different pairs
    rightly_refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    missed: list[Pair] = field(default_factory=list)

    @property
    def num_pairs(self) -> int:
        return self.credited + self.refused + self.wrongly_credited + self.rightly_refused

    def add(self, pair: Pair) -> None:
        start = time.process_time()
        is_credited = grade(pair.answer, pair.gold, template="answer").correct
        seconds = time.process_time() - start
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)
        if pair.is_equal:
            self.credited += is_credited
            self.refused += not is_credited
        else:
            self.wrongly_credited += is_credited
            self.rightly_refused += not is_credited
        if is_credited != pair.is_equal:
            self.missed.append(pair)


def judged(pairs: Iterable[Pair]) -> Row:
    row = Row()
    for pair in pairs:
        row.add(pair)
    return row


def pairs_of_kind(make: Callable[[random.Random], Pairs], rounds: int, seed: int) -> list[Pair]:
    """Returns the distinct pairs that a maker of pairs gives in many rounds."""
    pairs: dict[Pair, None] = {}
    for number in range(rounds):
        pairs |= dict.fromkeys(make(random.Random(f"{seed}/{number}")))
    return list(pairs)


def generated(rounds: int, seed: int) -> dict[str, list[Pair]]:
    """Returns the pairs of all kinds; those of how answers are written are made elsewhere."""
    pairs = {kind: pairs_of_kind(make, rounds, seed) for kind, make in KINDS.items()}
    layout = neighbors_layout.neighbors(neighbors_layout.GOLDS, rounds)
    for kind, answer, gold, is_same in layout:
        pairs.setdefault(f"layout: {kind}", []).append(Pair(is_same, answer, gold))
    return pairs


# Mutations of golds


def real_golds(data: Path) -> list[str]:
    golds = []
    for name in ("math/math12k_train", "math/math500", "eval/olympiadbench"):
        path = data / f"{name}.jsonl"
        if not path.exists():
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            golds += answer if isinstance(answer, list) else [answer]
    return sorted({gold.strip("$ ") for gold in golds if gold and len(gold) < 120})


CONSTANT_FUNCTION = re.compile(r"[a-z]\([a-z]\) *= *-?[\d.]+")


def mutated(gold: str, rng: random.Random) -> str | None:
    """Returns a gold with one character exchanged so that it is another answer, if that works.

    A digit becomes another digit, plus becomes minus, < becomes >, and a letter that stands for
    itself becomes another letter. Digits of a tuple of zeros or of a power of one are left alone.
    """
    index = rng.randrange(len(gold))
    character = gold[index]
    if character in DIGITS:
        return gold[:index] + rng.choice(DIGITS.replace(character, "")) + gold[index + 1 :]
    if character in EXCHANGED:
        return gold[:index] + EXCHANGED[character] + gold[index + 1 :]
    if CONSTANT_FUNCTION.fullmatch(gold):  # f(x) = 1 is f(z) = 1
        return None
    is_symbol = character in SYMBOLS and not re.search(r"[A-Za-z\\]", gold[:index][-1:])
    if is_symbol and not re.match("[A-Za-z]", gold[index + 1 :]):
        return gold[:index] + rng.choice(SYMBOLS.replace(character, "")) + gold[index + 1 :]
    return None


def mutations(golds: list[str], count: int, seed: int) -> Iterator[Pair]:
    """Yields golds that are another answer after the change of one character."""
    rng = random.Random(seed)
    num_yielded = 0
    while num_yielded < count:
        gold = rng.choice(golds)
        answer = mutated(gold, rng)
        if answer is not None:
            num_yielded += 1
            yield Pair(False, answer, gold)


# Output


def table(rows: dict[str, Row]) -> str:
    width = max(map(len, rows)) + 2
    lines = [
        f"{'':{width}}{'equal':>8}{'equal':>9}{'different':>11}{'different':>11}{'pairs':>8}"
        f"{'slowest':>9}",
        f"{'kind':{width}}{'credited':>8}{'refused':>9}{'credited':>11}{'refused':>11}"
        f"{'a second':>8}{'ms':>9}",
    ]
    for name, row in rows.items():
        rate = row.num_pairs / row.seconds if row.seconds else 0.0
        lines.append(
            f"{name:{width}}{row.credited:>8}{row.refused:>9}{row.wrongly_credited:>11}"
            f"{row.rightly_refused:>11}{rate:>8.0f}{1000 * row.slowest:>9.1f}"
        )
    return "\n".join(lines)


def total(rows: Iterable[Row]) -> Row:
    result = Row()
    for row in rows:
        result.credited += row.credited
        result.refused += row.refused
        result.wrongly_credited += row.wrongly_credited
        result.rightly_refused += row.rightly_refused
        result.seconds += row.seconds
        result.slowest = max(result.slowest, row.slowest)
    return result


def is_judged_right(row: Row) -> bool:
    num_equal = row.credited + row.refused
    return row.wrongly_credited == 0 and row.refused <= LARGEST_SHARE_REFUSED * num_equal


def passes(row: Row) -> bool:
    return is_judged_right(row) and row.slowest <= SLOWEST_SECONDS


def pairs_of_file(path: Path) -> dict[str, list[Pair]]:
    """Returns the pairs of a file by kind."""
    kinds: dict[str, list[Pair]] = {}
    if path.suffix == ".py":
        for kind, answer, gold, label, *_ in runpy.run_path(str(path))["CASES"]:
            if label in ("E", "D"):
                kinds.setdefault(kind, []).append(Pair(label == "E", answer, gold))
        return kinds
    for line in path.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        pair = Pair(bool(case["equal"]), case["answer"], case["gold"])
        kinds.setdefault(case.get("kind", path.stem), []).append(pair)
    return kinds


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each kind")
    parser.add_argument("--mutations", type=int, default=2000, help="changed golds of data sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=SHARED, help="the folder with the golds")
    parser.add_argument("--pairs", type=Path, help="a file of pairs, in place of generated ones")
    parser.add_argument("--missed", type=int, default=20, help="missed pairs to print")
    options = parser.parse_args(arguments)
    if options.pairs is not None:
        pairs = pairs_of_file(options.pairs)
        rows = {kind: judged(found) for kind, found in pairs.items()}
    else:
        made = generated(options.rounds, options.seed)
        rows = {kind: judged(pairs) for kind, pairs in made.items()}
    whole = total(rows.values())
    print(table({**rows, "all": whole}))
    missed = [(kind, pair) for kind, row in rows.items() for pair in row.missed]
    for kind, pair in missed[: options.missed]:
        label = "equal" if pair.is_equal else "different"
        print(f"missed, {label}, {kind}: {pair.answer!r} for {pair.gold!r}")
    golds = real_golds(options.data) if options.pairs is None else []
    if golds and options.mutations:
        row = judged(mutations(golds, options.mutations, options.seed))
        print(
            f"{row.num_pairs} golds changed by one character: {row.wrongly_credited} credited, "
            f"slowest {1000 * row.slowest:.0f} ms"
        )
        for pair in row.missed[: options.missed]:
            print(f"credited: {pair.answer!r} for {pair.gold!r}")
    print("passes" if passes(whole) else "fails")
    return 0 if passes(whole) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
