"""An index of the rollouts in samples.jsonl, which a page filters, and the rows of a few of them.

The index has a few numbers for each line of the file, so that 100,000 rollouts fit into a page. It
is made in blocks, the newest lines first, because the last step is what a page shows first. Rows
are read when they are shown, and are shortened to a bounded size.
"""

import json
import math
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jzero.files import JsonObject, rotated
from jzero.json_values import is_finite_number
from jzero.types import JsonValue
from jzero.watching.lines import LineFile
from jzero.watching.metric_table import parse_row

BLOCK = 500  # lines that are indexed at once
MAX_ROWS = 32  # rows of one reply
MAX_TEXT = 20_000  # characters of a prompt, response or any other text
SHORT_TEXT = 1_000  # characters of a text once a reply has MAX_REPLY_BYTES
MAX_REPLY_BYTES = 4_000_000
MAX_ROW_BYTES = 4_000_000  # of one row of a reply
MAX_TOKEN_TEXT = 100  # characters of one token
MAX_ITEMS = 4096  # of a list in a row
MAX_DEPTH = 6  # of values within a row
MAX_PARTS = 8  # parts of a reward that the index has of a row
MAX_PART_NAME = 100  # characters
MAX_FOUND = 500  # lines that a search returns
SEARCH_SECONDS = 3.0
STEP_ROWS = 64  # rows of one step that the doctor reads
TOKEN_COLUMNS = ("token_texts", "logps", "ages", "token_advantages")

CORRECT, CUT, FAILED = 1, 2, 4  # bits of `flags`


class Block(NamedTuple):
    """The index of neighboring lines; the numbers of a line are at one place of all lists.

    The parts of rewards are separate, because most lines have none: entry i of the three lists says
    that a line of the block has a part with this name and value.
    """

    start: int  # number of the first line
    step: "array[int]"  # -1: the line is damaged or too long
    problem: "array[int]"  # index into a TextTable
    sample: "array[int]"
    group: "array[int]"  # -1: not recorded
    score: "array[float]"  # NaN: no score
    advantage: "array[float]"
    tokens: "array[int]"
    flags: "array[int]"
    reason: "array[int]"  # index into a TextTable
    part_row: "array[int]"  # place of the line in the block
    part_name: "array[int]"  # index into a TextTable
    part_value: "array[float]"

    def to_json(self) -> JsonObject:
        columns: JsonObject = {name: list(getattr(self, name)) for name in self._fields[1:]}
        # JSON has no NaN.
        columns["score"] = [None if math.isnan(x) else x for x in self.score]
        return columns | {"start": self.start}


class TextTable:
    """Numbers texts that occur many times: the ids of problems and the reasons of grades."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Returns the place of a text in `texts`, where it is added if it is new."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number


def empty_block(start: int) -> Block:
    """Returns a block without lines."""
    return Block(
        start,
        step=array("i"),
        problem=array("i"),
        sample=array("i"),
        group=array("i"),
        score=array("d"),
        advantage=array("f"),
        tokens=array("i"),
        flags=array("B"),
        reason=array("i"),
        part_row=array("i"),
        part_name=array("i"),
        part_value=array("d"),
    )


def add_row(block: Block, row: JsonObject, texts: TextTable) -> None:
    """Appends the numbers of a row of samples.jsonl to a block; {} stands for a damaged row."""
    reason = _text(row.get("reason"))
    # Rows of earlier versions have no `correct`.
    flags = CORRECT * bool(row.get("correct", reason == "correct"))
    flags |= CUT * (row.get("finish") == "length") | FAILED * bool(row.get("failed"))
    block.step.append(_integer(row.get("step"), -1))
    block.problem.append(texts.number(_text(row.get("id"))))
    block.sample.append(_integer(row.get("sample"), 0))
    block.group.append(_integer(row.get("group"), -1))
    block.score.append(_finite(row.get("score"), math.nan))
    block.advantage.append(_finite(row.get("advantage"), 0.0))
    block.tokens.append(_integer(row.get("tokens"), 0))
    block.flags.append(flags)
    block.reason.append(texts.number(reason))
    parts = row.get("rewards")
    for name, value in list(parts.items())[:MAX_PARTS] if isinstance(parts, dict) else ():
        number = _finite(value, math.nan)
        if not math.isnan(number):
            block.part_row.append(len(block.step) - 1)
            block.part_name.append(texts.number(name[:MAX_PART_NAME]))
            block.part_value.append(number)


class RolloutIndex:
    """The rollouts of a workdir: of samples.1.jsonl, then of samples.jsonl.

    Lines are numbered from 0 over both files. The worker thread calls `poll` and `index_some`;
    other threads read `blocks` and `texts`, which only grow until `generation` changes.
    """

    def __init__(self, workdir: Path) -> None:
        samples = workdir / "samples.jsonl"
        self._files = [LineFile(rotated(samples)), LineFile(samples)]
        self._num_older = 0  # lines of samples.1.jsonl
        self._clear()

    def _clear(self) -> None:
        self._seen = self._file_generations()
        self._num_older = len(self._files[0])
        self._pending: list[tuple[int, int]] = []  # ranges of lines, the next to index last
        self._num_queued = 0
        self.texts = TextTable()
        self.blocks: list[Block] = []

    def _file_generations(self) -> tuple[int, ...]:
        return tuple(file.generation for file in self._files)

    @property
    def generation(self) -> str:
        """A text that changes if lines have other numbers or contents than before."""
        return f"{self._seen}.{self._num_older}"

    @property
    def is_done(self) -> bool:
        return not self._pending

    def __len__(self) -> int:
        return sum(len(file) for file in self._files)

    def poll(self) -> None:
        """Finds new lines. They are indexed before older lines that are still waiting."""
        for file in self._files:
            file.poll()
        # A rotation moves lines to samples.1.jsonl, and so changes the numbers of all lines.
        has_moved = self._num_older != len(self._files[0])
        if has_moved or self._seen != self._file_generations():
            self._clear()
        if len(self) > self._num_queued:
            self._pending.append((self._num_queued, len(self)))
            self._num_queued = len(self)

    def index_some(self, seconds: float) -> None:
        """Indexes blocks for about `seconds`."""
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            first, last = self._pending.pop()
            # From the end of a range: people look at the newest rollouts first.
            start = max(first, last - BLOCK)
            if start > first:
                self._pending.append((first, start))
            block = empty_block(start)
            for line in self.read(start, last):
                add_row(block, parse_row(line), self.texts)
            # Readers hold no lock: a block becomes visible when it is complete.
            self.blocks.append(block)

    def read(self, first: int, last: int) -> list[bytes]:
        """Returns the lines `first` to `last` - 1."""
        older, newer = self._files
        lines = older.read(first, min(last, self._num_older)) if first < self._num_older else []
        begin = max(0, first - self._num_older)
        return lines + newer.read(begin, max(0, last - self._num_older))

    def rows(self, numbers: Sequence[int]) -> list[JsonObject]:
        """Returns the rows of at most MAX_ROWS lines, with their numbers as "line", shortened."""
        rows: list[JsonObject] = []
        num_bytes = 0
        for number in numbers[:MAX_ROWS]:
            is_line = 0 <= number < len(self)
            [line] = (self.read(number, number + 1) if is_line else []) or [b""]
            # The first rows are complete, and the rest of a large reply is an overview.
            row = shorten_row(parse_row(line), is_full=num_bytes > MAX_REPLY_BYTES)
            row_bytes = len(json.dumps(row))
            if (not row and line == b"") or row_bytes > MAX_ROW_BYTES:
                row = {"note": "This rollout is too large to be shown."}
            num_bytes += min(row_bytes, MAX_ROW_BYTES)
            rows.append(row | {"line": number})
        return rows

    def rows_of_step(self, step: int) -> list[JsonObject]:
        """Returns the first STEP_ROWS rows of a step. Steps ascend within the files."""
        low, high = 0, len(self)
        while low < high:
            # Binary search over lines: an index of the steps would need a pass over the whole file
            # first.
            middle = (low + high) // 2
            if self._step_of_line(middle) < step:
                low = middle + 1
            else:
                high = middle
        rows = [parse_row(line) for line in self.read(low, min(low + STEP_ROWS, len(self)))]
        return [row for row in rows if row.get("step") == step]

    def _step_of_line(self, number: int) -> int:
        lines = self.read(number, number + 1)
        return _integer(parse_row(lines[0]).get("step"), -1) if lines else -1

    def search(self, text: str) -> JsonObject:
        """Returns the lines that contain a text, the newest first; upper and lower case are equal.

        The search ends after MAX_FOUND lines or SEARCH_SECONDS; "searched" is how many lines it
        has read.
        """
        deadline = time.monotonic() + SEARCH_SECONDS
        # A file may have characters as they are, or escaped.
        plain, escaped = (json.dumps(text, ensure_ascii=is_ascii) for is_ascii in (False, True))
        wanted = {quoted[1:-1].encode(errors="replace").lower() for quoted in (plain, escaped)}
        found: list[int] = []
        last = len(self)
        while last > 0 and len(found) < MAX_FOUND and time.monotonic() < deadline:
            first = max(0, last - BLOCK)
            for number, line in zip(range(first, last), self.read(first, last), strict=False):
                lowered = line.lower()
                if any(part in lowered for part in wanted):
                    found.append(number)
            last = first
        found.sort(reverse=True)
        return {"lines": found[:MAX_FOUND], "searched": len(self) - last, "total": len(self)}


def _text(value: JsonValue) -> str:
    return value[:200] if isinstance(value, str) else ""


def _integer(value: JsonValue, default: int) -> int:
    # The index holds int32; a file that another program wrote may have larger numbers.
    if isinstance(value, int) and -(2**31) <= value < 2**31:
        return int(value)  # a bool becomes 0 or 1
    return default


def _finite(value: JsonValue, default: float) -> float:
    if is_finite_number(value) and abs(value) < 1e30:
        return float(value)
    return default


def shorten_row(row: JsonObject, *, is_full: bool = False) -> JsonObject:
    """Returns a row of bounded size. `is_full` leaves out the tokens and most of the texts."""
    shortened = shorten(row, SHORT_TEXT if is_full else MAX_TEXT, MAX_DEPTH)
    assert isinstance(shortened, dict), f"{type(shortened)=}"
    texts = shortened.get("token_texts")
    if isinstance(texts, list):
        shortened["token_texts"] = [str(text)[:MAX_TOKEN_TEXT] for text in texts]
    if is_full:
        for name in TOKEN_COLUMNS:
            shortened.pop(name, None)
    return shortened


def shorten(value: JsonValue, max_text: int = MAX_TEXT, depth: int = MAX_DEPTH) -> JsonValue:
    """Returns a JSON value without the middle of long texts and the end of long lists."""
    if isinstance(value, str):
        return shorten_text(value, max_text)
    if isinstance(value, float) and not math.isfinite(value):
        # JSON has no infinity and no NaN; the page shows the text.
        return str(value)
    if isinstance(value, list | dict) and depth == 0:
        return "..."
    if isinstance(value, list):
        return [shorten(item, max_text, depth - 1) for item in value[:MAX_ITEMS]]
    if isinstance(value, dict):
        items = list(value.items())[:MAX_ITEMS]
        return {name[:200]: shorten(item, max_text, depth - 1) for name, item in items}
    return value


def shorten_text(text: str, max_text: int = MAX_TEXT) -> str:
    """Returns a text without the middle of a long one."""
    if len(text) <= max_text:
        return text
    # The end of a response has its answer, and its start the approach.
    half = max_text // 2
    note = f"\n[... {len(text) - 2 * half} characters are left out here ...]\n"
    return text[:half] + note + text[-half:]
