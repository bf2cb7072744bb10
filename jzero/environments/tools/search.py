"""The tool `search`: finds the passages of a local corpus that match a query best, by BM25.

    task.tools.names=search(corpus="passages.jsonl", results=3)

The corpus is a .jsonl file, a text file with one passage per line, or a
directory of text files. Each line of a .jsonl file is an object with the passage in "text" and an
optional heading in "title". The package rank_bm25 ranks the passages (Robertson and Zaragoza 2009;
`BM25Okapi`).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np

from jzero.errors import UserError, shown
from jzero.extras import install_command
from jzero.files import read_text

if TYPE_CHECKING:
    from jzero.config import TaskConfig

_WORD = re.compile(r"\w+")
_TEXT_FILES = (".txt", ".md")
_MAX_QUERY_WORDS = 64


class _Ranking(Protocol):
    """The part of rank_bm25.BM25Okapi that this module uses."""

    def get_scores(self, query: list[str]) -> np.ndarray: ...


class _Index(NamedTuple):
    passages: list[str]
    ranking: _Ranking


class Search:
    """A corpus as a tool. A search returns at most `results` passages."""

    def __init__(self, task: TaskConfig, corpus: str, results: int = 3) -> None:
        self._path = corpus
        self._num_results = results

    def search(self, query: str) -> str:
        """Searches a collection of texts, and returns the passages that fit best.

        Args:
            query: Words that the passages should have.
        """
        # The time of a search is proportional to the words of the query, which the policy chooses.
        words = _words(query)[:_MAX_QUERY_WORDS]
        if not words:
            raise ValueError("the query has no words")
        # The index is cached, so only the first search of a process waits for it.
        index = _load_index(self._path)
        scores = index.ranking.get_scores(words)
        # At equal scores the earlier passage comes first.
        best = np.argsort(-scores, kind="stable")[: self._num_results]
        known = [index.passages[place] for place in best if _shares_word(index, place, words)]
        if not known:
            return "No passage has any of these words."
        return "\n\n".join(f"[{rank}] {text}" for rank, text in enumerate(known, start=1))

    @staticmethod
    def check(task: TaskConfig, corpus: str = "", results: int = 3) -> None:
        """Raises UserError if the package or the corpus is missing, or an argument is wrong."""
        if importlib.util.find_spec("rank_bm25") is None:
            raise UserError(
                f"task.tools.names=search needs the package rank_bm25: {install_command('search')}"
            )
        if not isinstance(corpus, str) or not corpus:
            raise UserError(
                "task.tools.names=search needs a corpus, a file .jsonl or .txt, or a directory of "
                'text files: write search(corpus="FILE")'
            )
        if type(results) is not int or results < 1:
            raise UserError(
                f"task.tools.names=search(results={shown(results)}) must be a whole number above 0"
            )
        _load_index(corpus)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _shares_word(index: _Index, place: int, words: list[str]) -> bool:
    # The score cannot tell: Okapi's weight of a word in half of the passages is 0.
    return not set(words).isdisjoint(_words(index.passages[place]))


@functools.cache
def _load_index(path: str) -> _Index:
    """Returns the index of a corpus, cached in this process.

    Raises:
        UserError: the corpus cannot be read, or has no passages.
    """
    # An optional dependency, `jzero[search]`. `check` has reported a missing package.
    import rank_bm25  # pyright: ignore[reportMissingImports]

    # A passage without words can never match.
    passages = [passage for passage in _read_passages(Path(path)) if _words(passage)]
    if not passages:
        raise UserError(f"task.tools.names=search(corpus={path}) has no passages")
    ranking = rank_bm25.BM25Okapi([_words(passage) for passage in passages])
    return _Index(passages, cast(_Ranking, ranking))


def _read_passages(path: Path) -> list[str]:
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in _TEXT_FILES)
            return [read_text(file) for file in files]
        lines = read_text(path).splitlines()
    except OSError as error:
        reason = error.strerror
        raise UserError(
            f"task.tools.names=search(corpus={path}) cannot be read: {reason}"
        ) from None
    if path.suffix != ".jsonl":
        return lines
    return [_read_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _read_row(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
        return "\n".join(part for part in (row.get("title", ""), row["text"]) if part)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"task.tools.names=search(corpus={path}) line {number} is not a JSON object with the "
            'text of a passage in "text"'
        ) from None
