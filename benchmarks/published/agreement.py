r"""Compares jzero's published verifiers with the scores of the original code, row by row.

    python benchmarks/published/agreement.py [tests/answers/published.jsonl.xz] [--only oat_fast]

Prints for each verifier the number of rows, how many are paid by the original, how many jzero
scores as the original does, and the rows a second. Prints every row that differs. Exits with 1 if
one differs. `corpus.py` beside this file makes the data.
"""

import argparse
import json
import lzma
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jzero.answers.published import VERIFIERS, load

CORPUS = Path(__file__).parents[2] / "tests" / "answers" / "published.jsonl.xz"
SHOWN = 30  # differing rows that are printed for each verifier


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("corpus", type=Path, nargs="?", default=CORPUS)
    parser.add_argument("--only", action="append", help="a verifier; several are allowed")
    args = parser.parse_args()
    rows = list(read_corpus(args.corpus))
    differing = 0
    print(f"{'verifier':16}{'rows':>7}{'paid':>7}{'equal':>7}{'differ':>8}{'rows/s':>9}")
    for name in args.only or VERIFIERS:
        scored = [row for row in rows if name in row["scores"]]
        load(name)
        start = time.process_time()
        different = differing_rows(name, scored)
        speed = len(scored) / max(time.process_time() - start, 1e-9)
        paid = sum(row["scores"][name] == 1.0 for row in scored)
        equal = len(scored) - len(different)
        print(
            f"{name:16}{len(scored):7}{paid:7}{equal:7}{len(different):8}{speed:9.0f}", flush=True
        )
        for row, score in different[:SHOWN]:
            print(f"  {row['scores'][name]} here {score}: {row['response']!r} | {row['gold']!r}")
        differing += len(different)
    return int(differing > 0)


def read_corpus(path: Path) -> Iterator[dict]:
    """Yields the rows of a corpus: task, response, gold, scores by verifier."""
    content = path.read_bytes()
    text = lzma.decompress(content) if path.suffix == ".xz" else content
    for line in text.decode().splitlines():
        yield json.loads(line)


def differing_rows(verifier: str, rows: list[dict]) -> list[tuple[dict, float]]:
    """Returns the rows that jzero scores otherwise than the original, with jzero's scores."""
    grade = VERIFIERS[verifier].grade
    scores = [grade(row["response"], row["gold"]).score for row in rows]
    return [
        (row, score)
        for row, score in zip(rows, scores, strict=True)
        if row["scores"][verifier] != score
    ]


if __name__ == "__main__":
    sys.exit(main())
